"""A Markdown text that grows, as terminal lines: each delta costs its open block, not the whole text.

Block structure is decided line by line, so a top-level block followed by another can't change any
more. Such closed blocks are laid out once; only the last one, still open, is parsed and laid out
again. A long text is taken in as if it streamed, piece by piece, so that whoever lays it out may stop
after any piece and go on later. So that no piece costs much, long lines are broken and long blocks
divided, at places that depend on the text alone: the lines always equal those of a fresh layout of
the whole text. Knows nothing of widgets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from markdown_it.tree import SyntaxTreeNode
from textual.content import Content

from nanochat.ui.markdown_layout import BLANK, Line, MarkdownLayout

PIECE = 2_000
"""Characters taken in at a time: some 5 ms."""
MAX_LINE = 8_000
"""A line of the source that is longer is broken here."""
MAX_BLOCK = 8_000
"""A block with a part that begins beyond so many characters is divided before that part, or an earlier one."""
MAX_OPEN = 12_000
"""A block without such a part, like a list within a list's only item, is divided here at any line."""
MAX_BLOCK_LINES = 150
MAX_CELLS = 600
"""Many short lines cost more than few long ones: a block of more lines, or a table of more cells, is long too."""
MAX_CHARACTERS = 500_000
MAX_LINES = 10_000
"""What lies beyond so many characters, or lines of the source, isn't shown, and a last line says so. Models of today
don't answer so much; a file may hold it."""


def no_limit() -> bool:
    """There is always time for another piece."""
    return True


class MarkdownDocument:
    """Append text, call :meth:`layout`, read :attr:`lines`."""

    def __init__(self, source: str = "") -> None:
        self.source = source
        self.lines: list[Line] = []
        self.width = 0
        self._layout = MarkdownLayout()
        self._is_finished = False
        self._taken = 0
        """How much of the source is in the lines."""
        self._length = 0
        """The source's length when the lines were last brought up to date, or how much of it they show."""
        self._column = 0
        """Length of the last line taken in."""
        self._open = ""
        """Text of the open blocks."""
        self._closed_lines = 0
        """Lines of the closed blocks."""
        self._is_joined = False
        """Whether the open block goes on from a part that is closed, with no space in between."""

    @property
    def is_complete(self) -> bool:
        """Whether :attr:`lines` show all of the source."""
        return self._length == len(self.source)

    def append(self, text: str) -> None:
        """Add to the end. ``text`` must already be sanitised."""
        self.source += text

    def replace(self, source: str) -> None:
        """Start over with another text, already sanitised."""
        self.source = source
        self._forget_layout()

    def finish(self) -> None:
        """No more text will come: let go of what only growing needs."""
        self._is_finished = True
        if self.is_complete:
            self._layout.clear()

    def layout(self, width: int, has_time: Callable[[], bool] = no_limit) -> int:
        """Bring :attr:`lines` up to date for a width in cells, by one piece at least.

        With pieces left for another time, what is still open isn't laid out, but for a first line to show:
        it may grow long before it is complete, and would cost its whole length each time.

        Args:
            has_time: asked after each piece whether to take in another one.

        Returns:
            The first line that has changed.
        """
        if width != self.width:
            self.width = width
            self._forget_layout()
        if self.is_complete:
            return len(self.lines)
        start = self._closed_lines
        before = self.lines[start:]
        end = _shown_length(self.source)
        blocks = self._take_piece(end)
        while self._taken < end and has_time():
            blocks = self._take_piece(end)
        self._length = self._taken
        if self._taken == end or not self.lines:
            del self.lines[self._closed_lines :]
            self._add(blocks)
            if self._taken == end < len(self.source):
                self._length = len(self.source)
                self._say_more_follows()
        if self._is_finished and self.is_complete:
            self._layout.clear()
        return start + _common_length(before, self.lines[start:])

    def _take_piece(self, end: int) -> Sequence[SyntaxTreeNode]:
        """Take in a piece of the source, and lay out for good what it completes; returns the open blocks."""
        self._layout.forget_unused()
        piece = self.source[self._taken : min(self._taken + PIECE, end)]
        self._taken += len(piece)
        piece = self._broken(piece)
        self._open += piece
        blocks = self._layout.parse(self._open)
        may_close = len(blocks) > 1 or len(self._open) > MAX_BLOCK or any(map(_has_many_lines, blocks))
        if "\n" in piece and may_close and self._close_blocks():
            blocks = self._layout.parse(self._open)
        return blocks

    def _broken(self, piece: str) -> str:
        """The piece with a break after every ``MAX_LINE`` characters of a line."""
        lines = piece.split("\n")
        if self._column + len(lines[0]) <= MAX_LINE:
            self._column = len(lines[-1]) + (self._column if len(lines) == 1 else 0)
            return piece  # the others are shorter than a piece
        head = MAX_LINE - self._column
        self._column = 0
        return piece[:head] + "\n" + self._broken(piece[head:])

    def _close_blocks(self) -> bool:
        """Lay out for good every block that another one follows, and the first parts of a long one.

        Judged by whole lines only: a line still being written may turn out to continue the block
        before it (``#`` is a heading, ``#1`` is not). Returns whether there was any.
        """
        whole_length = self._open.rfind("\n") + 1
        whole, rest = self._open[:whole_length], self._open[whole_length:]
        before = self._closed_lines
        del self.lines[before:]
        while (parted := self._close_some(whole)) is not None:
            whole = parted
        self._open = whole + rest
        return len(whole) < whole_length or self._closed_lines > before

    def _close_some(self, whole: str) -> str | None:
        """Close blocks up to the first long one, and that one's first part; returns the text that is left.

        None: there is nothing to close.
        """
        blocks = self._layout.parse(whole)
        if not blocks:
            return "" if whole else None
        line_starts = [0, *accumulate(len(line) + 1 for line in whole.split("\n"))]
        begins = [0, *(line_starts[_first_line(block)] for block in blocks[1:]), len(whole)]
        for number, block in enumerate(blocks):
            begin, end = begins[number], begins[number + 1]
            if number == len(blocks) - 1 and block.type == "paragraph":
                end = line_starts[
                    (block.map or (0, 1))[1] - 1
                ]  # its last line may yet become a table's heading
            if (cut := _cut(block, begin, end, line_starts)) is None:
                continue
            opening = _opening(block, whole, line_starts)
            if cut - begin <= len(opening):  # no more would be left out than is put before
                cut = next((start for start in line_starts if begin + len(opening) < start < end), None)
            if cut is not None:
                self._close(blocks[:number])
                self._close(self._layout.parse(whole[begin:cut]))
                self._is_joined = _is_seamless(block, whole[:cut])
                return opening + whole[cut:]
        self._close(blocks[:-1])
        return whole[begins[-2] :] if len(blocks) > 1 else None

    def _close(self, blocks: Sequence[SyntaxTreeNode]) -> None:
        if blocks:
            self._add(blocks)
            self._closed_lines = len(self.lines)
            self._is_joined = False

    def _add(self, blocks: Sequence[SyntaxTreeNode]) -> None:
        is_joined = self._is_joined
        for block in blocks:
            lines = self._layout.block(block, self.width)
            if is_joined and block.type == "fence":
                # Its label stands above the first part; its end alone is no line.
                lines = lines[len(self._layout.label(block, self.width)) :] if block.content else []
            elif self.lines and not is_joined:
                self.lines.append(BLANK)
            self.lines += lines
            is_joined = False

    def _say_more_follows(self) -> None:
        rest = f"… {len(self.source) - self._taken:,} more characters; /export writes all of them"
        self.lines += [BLANK, Line(Content.styled(rest, ".url").truncate(self.width, ellipsis=True))]

    def _forget_layout(self) -> None:
        self.lines.clear()
        self._open = ""
        self._taken = self._length = self._column = self._closed_lines = 0
        self._is_joined = False


def _shown_length(source: str) -> int:
    end = min(len(source), MAX_CHARACTERS)
    if source.count("\n", 0, end) <= MAX_LINES:
        return end
    place = -1
    for _ in range(MAX_LINES):
        place = source.index("\n", place + 1)
    return place + 1


def _first_line(block: SyntaxTreeNode) -> int:
    return (block.map or (0, 0))[0]


def _parts(block: SyntaxTreeNode) -> Sequence[int]:
    """Lines at which parts of a block begin: items, rows, or mere lines. Never its first line."""
    first, last = block.map or (0, 0)
    if block.type == "fence":
        return range(first + 2, first + 1 + block.content.count("\n"))
    if block.type in ("paragraph", "code_block"):
        return range(first + 1, last)
    if block.type == "table":
        rows = [row for part in block.children[1:] for row in part.children]
        return [_first_line(row) for row in rows[1:]]
    return [_first_line(child) for child in block.children[1:] if child.map]


def _cut(block: SyntaxTreeNode, begin: int, end: int, line_starts: Sequence[int]) -> int | None:
    """Where to divide a block; None: it isn't long. Offsets; ``end`` is where the next block begins."""
    cuts = [start for start in (line_starts[line] for line in _parts(block)) if start < end]
    first, last, num_lines = _first_line(block), len(line_starts) - 1, _max_lines(block)
    limit = min(begin + MAX_BLOCK, line_starts[min(first + num_lines, last)])
    open_limit = min(begin + MAX_OPEN, line_starts[min(first + 2 * num_lines, last)])
    beyond = next((cut for cut in cuts if cut > limit), None)
    if beyond is not None and beyond <= open_limit:
        return max((cut for cut in cuts if cut <= limit), default=beyond)
    if end > open_limit:
        return max(start for start in line_starts if start <= open_limit)
    return None


def _max_lines(block: SyntaxTreeNode) -> int:
    """How many lines a block may have before it is long; a table has a few at least."""
    if block.type == "table":
        return max(4, MAX_CELLS // len(block.children[0].children[0].children))
    return MAX_BLOCK_LINES


def _has_many_lines(block: SyntaxTreeNode) -> bool:
    first, last = block.map or (0, 0)
    return last - first > _max_lines(block)


def _opening(block: SyntaxTreeNode, whole: str, line_starts: Sequence[int]) -> str:
    """What has to stand again above a block's second part: a fence's first line, a table's heading."""
    num_lines = {"fence": 1, "table": 2}.get(block.type, 0)
    first = _first_line(block)
    return whole[line_starts[first] : line_starts[first + num_lines]]


def _is_seamless(block: SyntaxTreeNode, first_part: str) -> bool:
    """Whether no empty line stands between a block's two parts."""
    if block.type in ("bullet_list", "ordered_list"):
        return not first_part.endswith("\n\n")
    return block.type in ("paragraph", "fence", "code_block")


def _common_length(before: list[Line], after: list[Line]) -> int:
    """How many lines at the beginning look the same."""
    for index, (old, new) in enumerate(zip(before, after, strict=False)):
        if old is not new and not (old.fill == new.fill and old.content.is_same(new.content)):
            return index
    return min(len(before), len(after))
