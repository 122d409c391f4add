"""Splits an answer into its reasoning (such as ``<think>…</think>``) and the answer proper, as it streams."""

from __future__ import annotations

import re
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
        self._is_growing = False
        """Whether the text is what has streamed so far: what may become a tag is not judged yet."""

    def append(self, text: str, num_tokens: int) -> None:
        """Add streamed text and the number of tokens it came from."""
        was_reasoning = self.is_reasoning
        self._is_growing = True
        self.text += text
        self.num_tokens += num_tokens
        if was_reasoning or self.is_reasoning:
            self.reasoning_tokens += num_tokens

    def replace(self, text: str) -> None:
        """The whole text anew; the token counts stay."""
        self.text = text
        self._is_growing = False

    def copy(self) -> AnswerText:
        """Another one that has the same text and grows on its own."""
        return copy(self)

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        if self.tags is None:
            return False
        return self._begins_inside and self.tags[1] not in self.text

    @property
    def reasoning(self) -> str:
        """What stands before the closing tag; empty if there is no reasoning.

        Where a model forgets to open it, only its end is seen, and is one only alone on a line.
        """
        if self.tags is None or (not self.is_reasoning and self._end is None):
            return ""
        return self.text[: self._end].lstrip().removeprefix(self.tags[0]).strip()

    @property
    def answer(self) -> str:
        """What stands after the reasoning."""
        if self.tags is None:
            return self.text
        if self.is_reasoning or self._may_begin:
            return ""
        end = self._end
        return self.text if end is None else self.text[end + len(self.tags[1]) :].lstrip()

    @property
    def _begins_inside(self) -> bool:
        return self.is_opened or (self.tags is not None and self.text.lstrip().startswith(self.tags[0]))

    @property
    def _may_begin(self) -> bool:
        """Whether all there is so far may be a part of the opening tag."""
        start = self.text.lstrip()
        return self._is_growing and bool(start) and self.tags is not None and self.tags[0].startswith(start)

    @property
    def _end(self) -> int | None:
        """Where the closing tag stands that ends the reasoning."""
        if self.tags is None or self.tags[1] not in self.text:
            return None
        if self._begins_inside:
            return self.text.index(self.tags[1])
        opening, closing = self.tags
        line_end = r"\n" if self._is_growing else r"(?:\n|\Z)"
        alone = rf"^[^\S\n]*({re.escape(closing)})[^\S\n]*{line_end}"
        found = re.search(alone, self.text, re.MULTILINE)
        if found is None or opening in self.text[: found.start(1)]:
            return None
        return found.start(1)
