"""A Markdown text that grows, as terminal lines: each delta costs its open block, not the whole text.

Block structure is decided line by line, so a top-level block followed by another can't change any
more. Such closed blocks are laid out once; only the last one, still open, is parsed and laid out
again. The lines always equal those of a fresh layout of the whole text. Knows nothing of widgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from markdown_it.tree import SyntaxTreeNode

from nanochat.ui.markdown_layout import BLANK, Line, MarkdownLayout


class MarkdownDocument:
    """Append text, call :meth:`layout`, read :attr:`lines`."""

    def __init__(self, source: str = "") -> None:
        self.source = source
        self.lines: list[Line] = []
        self.width = 0
        self._layout = MarkdownLayout()
        self._open_start = 0
        """Where in the source the open block begins."""
        self._closed_lines = 0
        """Lines of the closed blocks."""
        self._is_current = False
        self._new_line_came = True

    def append(self, text: str) -> None:
        """Add to the end. ``text`` must already be sanitised."""
        self.source += text
        self._is_current = False
        self._new_line_came |= "\n" in text

    def replace(self, source: str) -> None:
        """Start over with another text, already sanitised."""
        self.source = source
        self._forget_layout()

    def finish(self) -> None:
        """No more text will come: let go of what only growing needs."""
        self._layout.clear()

    def layout(self, width: int) -> int:
        """Bring :attr:`lines` up to date for a width in cells; returns the first line that has changed."""
        if width != self.width:
            self.width = width
            self._forget_layout()
        if self._is_current:
            return len(self.lines)
        start = self._closed_lines
        before = self.lines[start:]
        blocks = self._layout.parse(self.source[self._open_start :])
        if self._new_line_came and len(blocks) > 1:  # one block alone has no other that follows it
            blocks = self._close_blocks() or blocks
        self._new_line_came = False
        del self.lines[self._closed_lines :]
        self._add(blocks)
        self._is_current = True
        return start + _common_length(before, self.lines[start:])

    def _close_blocks(self) -> list[SyntaxTreeNode] | None:
        """Lay out for good every block that another one follows; returns those still open, if that has changed.

        Judged by whole lines only: a line still being written may turn out to continue the block
        before it (``#`` is a heading, ``#1`` is not).
        """
        whole = self.source[self._open_start : self.source.rfind("\n") + 1]
        blocks = self._layout.parse(whole)
        if len(blocks) < 2:
            return None
        line_starts = [0, *accumulate(len(line) + 1 for line in whole.split("\n"))]
        first_open = (blocks[-1].map or (0, 0))[0]
        del self.lines[self._closed_lines :]
        self._add(self._layout.parse(whole[: line_starts[first_open]]))
        self._closed_lines = len(self.lines)
        self._open_start += line_starts[first_open]
        return self._layout.parse(self.source[self._open_start :])

    def _add(self, blocks: Sequence[SyntaxTreeNode]) -> None:
        for block in blocks:
            if self.lines:
                self.lines.append(BLANK)
            self.lines += self._layout.block(block, self.width)

    def _forget_layout(self) -> None:
        self.lines.clear()
        self._open_start = 0
        self._closed_lines = 0
        self._is_current = False
        self._new_line_came = True


def _common_length(before: list[Line], after: list[Line]) -> int:
    """How many lines at the beginning look the same."""
    for index, (old, new) in enumerate(zip(before, after, strict=False)):
        if old is not new and not (old.fill == new.fill and old.content.is_same(new.content)):
            return index
    return min(len(before), len(after))
