"""Splits an answer into its reasoning (such as ``<think>…</think>``) and the answer proper, as it streams."""

from __future__ import annotations

from copy import copy


class AnswerText:
    """An answer's sanitised text in two parts, with the number of tokens the reasoning took."""

    def __init__(self) -> None:
        self.text = ""
        self.num_tokens = 0
        self.reasoning_tokens = 0
        self.tags: tuple[str, str] | None = None
        """What encloses the model's reasoning; None for a model without any."""
        self.is_opened = False
        """Whether the prompt has opened the reasoning already, so that the text begins inside it."""

    def append(self, text: str, num_tokens: int) -> None:
        """Add streamed text and the number of tokens it came from."""
        was_reasoning = self.is_reasoning
        self.text += text
        self.num_tokens += num_tokens
        if was_reasoning or self.is_reasoning:
            self.reasoning_tokens += num_tokens

    def replace(self, text: str) -> None:
        """The whole text anew; the token counts stay."""
        self.text = text

    def copy(self) -> AnswerText:
        """Another one that has the same text and grows on its own."""
        return copy(self)

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        if self.tags is None:
            return False
        opening, closing = self.tags
        begins = self.is_opened or self.text.lstrip().startswith(opening)
        return begins and closing not in self.text

    @property
    def reasoning(self) -> str:
        """What stands before the closing tag; empty if there is no reasoning.

        Where the prompt has opened it, or a model forgets to, only its end is seen.
        """
        if self.tags is None:
            return ""
        opening, closing = self.tags
        head, close, _ = self.text.partition(closing)
        if not close and not self.is_reasoning:
            return ""
        return head.lstrip().removeprefix(opening).strip()

    @property
    def answer(self) -> str:
        """What stands after the reasoning."""
        if self.tags is None:
            return self.text
        if self.is_reasoning:
            return ""
        _, close, tail = self.text.partition(self.tags[1])
        return tail.lstrip() if close else self.text
