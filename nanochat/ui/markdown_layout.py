"""Markdown blocks as styled terminal lines.

A pure function of a parsed block and a width: nothing here knows of widgets, themes or streaming.
Styles are names such as ``.strong``, resolved by whoever draws; highlighted code carries theme
variables such as ``$text-accent``. No text is lost: raw HTML, link reference definitions and link
targets are shown as they are written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from markdown_it.tree import SyntaxTreeNode
from rich.cells import cell_len
from textual.content import Content
from textual.highlight import HighlightTheme, highlight

from nanochat.ui.markdown_parser import TAB, block_parser, inline_content, inline_parser
from nanochat.ui.recent import Recent

BULLETS = "•◦▪"
MIN_WIDTH = 8
"""Narrower than this, blocks are laid out as if they had this width."""
HIGHLIGHT_LINES = 100
"""Code is highlighted in pieces of this many lines: growing code costs its last piece, not the whole."""
HIGHLIGHT_COLUMNS = 1_000
"""Code with a longer line isn't highlighted: lexers may take long over it."""
INLINE_CHARACTERS = 12_000
INLINE_MARKS = 800
"""A paragraph longer than this, or with more brackets, stars and the like, is shown as it is written: each of them
costs some 10 µs at every delta, those of links and images three times that."""
COLUMN_GAP = "  "

_LANGUAGE = re.compile(r"[\w+#.-]{1,24}")


class CodeColours(HighlightTheme):
    """Few hues and no underlines: code should be readable, not festive. Keys are Pygments token types."""

    STYLES: dict[tuple[str, ...], str] = {  # noqa: RUF012 - declared so by Textual
        ("Comment",): "$muted italic",
        ("Keyword",): "$secondary",
        ("Literal", "Number"): "$accent",
        ("Literal", "String"): "$success",
        ("Name", "Builtin"): "$primary",
        ("Name", "Class"): "bold",
        ("Name", "Decorator"): "$accent",
        ("Name", "Function"): "$primary",
        ("Name", "Tag"): "$primary",
        ("Operator", "Word"): "$secondary",
    }


@dataclass(frozen=True, slots=True)
class Line:
    """One line, at most as wide as the layout, or ``MIN_WIDTH`` where that is more: whoever draws cuts the rest off."""

    content: Content
    fill: str = ""
    """Style that paints the rest of the line too, from ``offset`` on."""
    offset: int = 0
    """Cells before the filled part."""


BLANK = Line(Content(""))


class MarkdownLayout:
    """Lays blocks out, keeping what it has parsed, wrapped and highlighted for the next time.

    A streaming message is laid out again at every delta, so that its unchanged parts must be cheap.
    """

    def __init__(self) -> None:
        self._blocks = block_parser()
        self._inlines = inline_parser()
        self._parsed: Recent[str, Content] = Recent()
        self._wrapped: Recent[tuple[str, str, int], list[Content]] = Recent()
        self._code_lines: Recent[tuple[str, str, int], list[Line]] = Recent()
        self._rows: Recent[tuple[object, ...], list[Line]] = Recent()

    def parse(self, source: str) -> list[SyntaxTreeNode]:
        """Top-level blocks; ``map`` gives each one's first line and the line after its last."""
        return SyntaxTreeNode(self._blocks.parse(source)).children

    def forget_unused(self) -> None:
        """Keep only what was asked for since the last call: a text that grows leaves all its shorter forms behind."""
        self._parsed.forget_unused()
        self._wrapped.forget_unused()
        self._code_lines.forget_unused()
        self._rows.forget_unused()

    def clear(self) -> None:
        """Forget what was kept; a finished message needs it no more."""
        self._parsed.clear()
        self._wrapped.clear()
        self._code_lines.clear()
        self._rows.clear()

    def block(self, node: SyntaxTreeNode, width: int) -> list[Line]:
        """Lines of one block, at most ``width`` cells wide (``MIN_WIDTH`` at least)."""
        width = max(width, MIN_WIDTH)
        kind = node.type
        if kind == "paragraph":
            return self._text(node, width)
        if kind == "heading":
            return self._text(node, width, ".h1" if node.tag in ("h1", "h2") else ".h3")
        if kind in ("fence", "code_block"):
            return self._code(node, width)
        if kind in ("bullet_list", "ordered_list"):
            return self._list(node, width)
        if kind == "blockquote":
            bar = Content.styled("▌ ", ".quote-bar")
            return self._indented(node.children, bar, bar, width)
        if kind == "hr":
            return [Line(Content.styled("─" * width, ".rule"))]
        if kind == "table":
            return self._table(node, width)
        return self._wrap(node.content, "", width)

    def _sequence(self, nodes: Sequence[SyntaxTreeNode], width: int, *, spaced: bool = True) -> list[Line]:
        lines: list[Line] = []
        for node in nodes:
            if lines and spaced:
                lines.append(BLANK)
            lines += self.block(node, width)
        return lines

    def _text(self, node: SyntaxTreeNode, width: int, style: str = "") -> list[Line]:
        return self._wrap(_inline_source(node), style, width)

    def _wrap(self, source: str, style: str, width: int) -> list[Line]:
        return [Line(content) for content in self._wrapped_contents(source, style, width)]

    def _wrapped_contents(self, source: str, style: str, width: int) -> list[Content]:
        key = (source, style, width)
        if (kept := self._wrapped.get(key)) is not None:
            return kept
        content = self._inline(source)
        if style:
            content = content.stylize_before(style)
        return self._wrapped.keep(key, content.wrap(width) or [Content("")])

    def _inline(self, source: str) -> Content:
        if (kept := self._parsed.get(source)) is not None:
            return kept
        if len(source) > INLINE_CHARACTERS or _num_marks(source) > INLINE_MARKS:
            return Content(source.expandtabs(TAB))
        tokens = self._inlines.parseInline(source)
        return self._parsed.keep(source, inline_content(tokens[0].children or []))

    def _list(self, node: SyntaxTreeNode, width: int) -> list[Line]:
        lines: list[Line] = []
        items = node.children
        is_loose = any(
            not child.hidden for item in items for child in item.children if child.type == "paragraph"
        )
        first_number = int(node.attrs.get("start", 1))
        digits = len(str(first_number + len(items) - 1))
        depth = sum(1 for parent in _ancestors(node) if parent.type == "bullet_list")
        for number, item in enumerate(items, first_number):
            bullet = (
                BULLETS[depth % len(BULLETS)]
                if node.type == "bullet_list"
                else f"{number:>{digits}}{node.markup}"
            )
            if lines and is_loose:
                lines.append(BLANK)
            first, rest = Content.styled(bullet + " ", ".bullet"), Content(" " * (cell_len(bullet) + 1))
            lines += self._indented(item.children, first, rest, width, spaced=is_loose)
        return lines

    def _indented(
        self,
        nodes: Sequence[SyntaxTreeNode],
        first: Content,
        rest: Content,
        width: int,
        *,
        spaced: bool = True,
    ) -> list[Line]:
        """Blocks behind a mark on their first line and another on the others.

        Nested so deep that hardly any width is left, they go below the mark instead.
        """
        inner = width - cell_len(first.plain)
        if inner < MIN_WIDTH:
            return [Line(first.rstrip()), *self._sequence(nodes, width, spaced=spaced)]
        return _indent(self._sequence(nodes, inner, spaced=spaced) or [BLANK], first, rest)

    def _code(self, node: SyntaxTreeNode, width: int) -> list[Line]:
        """Code on a background of its own, a space before and after it, its language on top."""
        language = _language(node.info)
        rows = node.content.removesuffix("\n").expandtabs(TAB).split("\n")
        lines = self.label(node, width)
        for start in range(0, len(rows), HIGHLIGHT_LINES):
            lines += self._code_piece("\n".join(rows[start : start + HIGHLIGHT_LINES]), language, width)
        return lines

    def label(self, fence: SyntaxTreeNode, width: int) -> list[Line]:
        """What stands above a fence's code: its language, and whatever else was written after it."""
        width = max(width, MIN_WIDTH)
        info = Content(fence.info.strip().expandtabs(TAB))
        rows = [row.plain.strip() for row in info.wrap(width - 2)] if info else []
        spaces = [" " * (width - 1 - cell_len(row)) for row in rows]
        return [
            Line(Content.styled(space + row, ".fence-label"), ".fence")
            for space, row in zip(spaces, rows, strict=True)
        ]

    def _code_piece(self, code: str, language: str, width: int) -> list[Line]:
        key = (code, language, width)
        if (kept := self._code_lines.get(key)) is not None:
            return kept
        lines: list[Line] = []
        for content in highlighted(code, language):
            rows = fold(content, width - 2) if cell_len(content.plain) > width - 2 else [content]
            lines += [Line(Content(" ") + row, ".fence") for row in rows]
        return self._code_lines.keep(key, lines)

    def _table(self, node: SyntaxTreeNode, width: int) -> list[Line]:
        rows = [row for part in node.children for row in part.children]
        sources = [[_inline_source(cell) for cell in row.children] for row in rows]
        columns = len(sources[0])
        available = width - len(COLUMN_GAP) * (columns - 1)
        if available < 3 * columns:
            return self._records(sources, width)
        natural = [max(_width(self._inline(row[column])) for row in sources) for column in range(columns)]
        widths = fit_columns(natural, available)
        aligns = [_align(cell) for cell in rows[0].children]
        lines: list[Line] = []
        for index, row in enumerate(sources):
            style = ".table-header" if index == 0 else ""
            lines += self._row(row, style, widths, aligns)
            if index == 0:
                rule = COLUMN_GAP.join("─" * size for size in widths)
                lines.append(Line(Content.styled(rule, ".rule")))
        return lines

    def _row(self, row: list[str], style: str, widths: list[int], aligns: list[str]) -> list[Line]:
        key = (style, *row, *widths, *aligns)
        if (kept := self._rows.get(key)) is not None:
            return kept
        cells = [self._wrapped_contents(cell, style, size) for cell, size in zip(row, widths, strict=True)]
        return self._rows.keep(key, [Line(line) for line in _join_cells(cells, widths, aligns)])

    def _records(self, sources: list[list[str]], width: int) -> list[Line]:
        """A table too wide for its columns: one ``header: cell`` line a cell."""
        lines: list[Line] = []
        for row in sources[1:]:
            if lines:
                lines.append(BLANK)
            lines += self._record(sources[0], row, width)
        return lines or self._wrap(" · ".join(sources[0]), ".table-header", width)

    def _record(self, headers: list[str], row: list[str], width: int) -> list[Line]:
        key = (width, *headers, *row)
        if (kept := self._rows.get(key)) is not None:
            return kept
        lines: list[Line] = []
        for header, cell in zip(headers, row, strict=True):
            name = self._inline(header).stylize_before(".table-header")
            lines += [Line(part) for part in (name + ": " + self._inline(cell)).wrap(width)]
        return self._rows.keep(key, lines)


def highlighted(code: str, language: str) -> list[Content]:
    """One content a line of code, coloured when the language is known and no line is extreme."""
    rows = code.split("\n")
    if not language or max(map(len, rows)) > HIGHLIGHT_COLUMNS:
        return [Content(row) for row in rows]
    coloured = highlight(code, language=language, theme=CodeColours).split("\n", allow_blank=True)[
        : len(rows)
    ]
    unchanged = [line.plain.rstrip() for line in coloured] == [row.rstrip() for row in rows]
    return coloured if unchanged else [Content(row) for row in rows]  # a lexer may drop blank lines


def fold(content: Content, width: int) -> list[Content]:
    """A line cut at every ``width`` cells (2 at least). Textual's own drops what follows combining characters."""
    if content.plain.isascii():
        return content.fold(width)
    rows, start, cells = [], 0, 0
    for index, character in enumerate(content.plain):
        size = cell_len(character)
        if cells + size > width:
            rows.append(content[start:index])
            start, cells = index, 0
        cells += size
    return [*rows, content[start:]]


def fit_columns(natural: Sequence[int], available: int) -> list[int]:
    """Widths that sum to at most ``available``: narrow columns keep theirs, wide ones share the rest."""
    widths = [max(1, width) for width in natural]
    if sum(widths) <= available:
        return widths
    left, open_columns = available, len(widths)
    for index in sorted(range(len(widths)), key=widths.__getitem__):
        widths[index] = min(widths[index], max(1, left // open_columns))
        left -= widths[index]
        open_columns -= 1
    return widths


def _join_cells(cells: list[list[Content]], widths: list[int], aligns: list[str]) -> list[Content]:
    height = max(map(len, cells), default=1)
    lines = []
    for row in range(height):
        line = Content("")
        for column, width in enumerate(widths):
            cell = cells[column] if column < len(cells) else []
            content = cell[row] if row < len(cell) else Content("")
            space = max(0, width - cell_len(content.plain))
            before = {"right": space, "center": space // 2}.get(aligns[column], 0)
            line = line + (COLUMN_GAP if column else "") + " " * before + content + " " * (space - before)
        lines.append(line.rstrip())
    return lines


def _num_marks(source: str) -> int:
    """How much there is to parse; what begins a link's target or an image counts thrice."""
    return sum(map(source.count, ("*", "_", "~", "[", "](", "](", "![", "![")))


def _indent(lines: Sequence[Line], first: Content, rest: Content) -> list[Line]:
    indent = cell_len(first.plain)
    return [
        replace(line, content=(rest if index else first) + line.content, offset=line.offset + indent)
        for index, line in enumerate(lines)
    ]


def _inline_source(node: SyntaxTreeNode) -> str:
    return node.children[0].content if node.children else ""


def _width(content: Content) -> int:
    return max(map(cell_len, content.plain.split("\n")))


def _align(cell: SyntaxTreeNode) -> str:
    return str(cell.attrs.get("style", "")).removeprefix("text-align:")


def _language(info: str) -> str:
    """The first word of what stands after a fence's mark."""
    match = _LANGUAGE.match(info.strip())
    return match.group().lower() if match else ""


def _ancestors(node: SyntaxTreeNode) -> list[SyntaxTreeNode]:
    found = []
    parent = node.parent
    while parent is not None:
        found.append(parent)
        parent = parent.parent
    return found
