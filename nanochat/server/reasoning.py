"""Splits a streamed answer into the model's reasoning and the answer proper, each piece as soon as it is certain."""

from __future__ import annotations


class ReasoningSplitter:
    """Takes text piece by piece.

    The reasoning is what stands between the tags at the very beginning of an answer; blanks around it belong to
    neither part. A tag anywhere else is text. What may be the beginning of a tag is held back.
    """

    def __init__(self, tags: tuple[str, str] | None, *, is_opened: bool) -> None:
        """``tags`` enclose the reasoning; None: there is never any. ``is_opened``: the prompt has opened it."""
        self._tags = tags
        self._state = "answer" if tags is None else "begin"
        if tags is not None and is_opened:
            self._state = "reasoning"
        self._held = ""
        self._is_blank = True
        """Whether the part being written has no text yet: blanks at its beginning are left out."""

    def push(self, text: str) -> tuple[str, str]:
        """New text of the reasoning, and of the answer."""
        if self._tags is None:
            return "", text
        self._held += text
        reasoning = answer = ""
        if self._state == "begin":
            self._begin(self._tags[0])
        if self._state == "reasoning":
            reasoning = self._take_reasoning(self._tags[1])
        if self._state == "blank":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "answer"
        if self._state == "answer":
            answer, self._held = self._held, ""
        return reasoning, answer

    def flush(self) -> tuple[str, str]:
        """What is held back, once no more will come."""
        held, self._held = self._held, ""
        if self._state == "reasoning":
            return held.rstrip(), ""
        return "", held if self._state == "begin" else ""

    def _begin(self, opening: str) -> None:
        start = self._held.lstrip()
        if start.startswith(opening):
            self._held, self._state = start[len(opening) :], "reasoning"
        elif start and not opening.startswith(start):
            self._state = "answer"

    def _take_reasoning(self, closing: str) -> str:
        if self._is_blank:
            self._held = self._held.lstrip()
        head, found, tail = self._held.partition(closing)
        if found:
            self._held, self._state = tail, "blank"
            return head.rstrip()
        # Blanks may turn out to be the last, and any end of the text a tag's beginning.
        keep = next(length for length in range(len(closing) - 1, -1, -1) if head.endswith(closing[:length]))
        certain = head[: len(head) - keep].rstrip()
        self._held = head[len(certain) :]
        self._is_blank = self._is_blank and not certain
        return certain
