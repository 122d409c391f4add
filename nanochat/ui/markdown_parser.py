"""The Markdown that is understood: CommonMark's blocks and tables, and its inline text with strikethrough.

No text is lost. Left out is what would hide some (raw HTML, link reference definitions); what the
parser would drop (all that is nested too deep, a table row's cells beyond its heading's) is kept as it
is written; and where a link leads stands beside it. Knows nothing of widths or of streaming.
"""

from __future__ import annotations

from collections.abc import Sequence

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock, blockquote, list_block, table
from markdown_it.rules_block.table import escapedSplit, getLine
from markdown_it.token import Token
from textual.content import Content, Span

from nanochat.sanitize import sanitize, sanitize_line

TAB = 4
MAX_NESTING = 20
"""Lists, which count twice, and quotes nested deeper are text: ten levels of a list, twenty of a quote."""
MAX_COLUMNS = 100
"""What would be a table of more is text."""

_EMPHASIS = {"em": ".em", "strong": ".strong", "s": ".strike"}
_LINK_SCHEMES = ("https://", "http://", "mailto:")
"""Whatever else is written as a link looks like plain text, with its target."""


def block_parser() -> MarkdownIt:
    """CommonMark's blocks and tables, without inline parsing, which the layout does lazily.

    Left out: raw HTML and link reference definitions, which would hide text, and underlined headings,
    which a growing list looks like for a moment.
    """
    # Beyond its own limit the parser drops everything up to the end of the text; with ours it never comes to that.
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": MAX_NESTING + 4}).enable("table")
    blocks = parser.block.ruler
    blocks.at("blockquote", _quote, {"alt": ["paragraph", "reference", "blockquote", "list"]})
    blocks.at("list", _list, {"alt": ["paragraph", "reference", "blockquote"]})
    blocks.at("table", _table, {"alt": ["paragraph", "reference"]})
    return parser.disable(["inline", "text_join", "reference", "html_block", "lheading"])


def inline_parser() -> MarkdownIt:
    """CommonMark's inline text and strikethrough, without raw HTML."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough")
    return parser.disable("html_inline")


def _quote(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    return not _is_too_deep(state, start, silent) and blockquote(state, start, end, silent)


def _list(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    return not _is_too_deep(state, start, silent) and list_block(state, start, end, silent)


def _is_too_deep(state: StateBlock, line: int, silent: bool) -> bool:
    """Whether what begins here is nested too deep, unless it only ends a paragraph that is further in."""
    ends_inner = silent and state.sCount[line] < state.blkIndent
    return state.level >= MAX_NESTING and not ends_inner


def _table(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A table whose rows may have more cells than its heading: what is too many goes into the last one, bars and all."""
    if getLine(state, start).count("|") > MAX_COLUMNS:
        return False
    first = len(state.tokens)
    if not table(state, start, end, silent):
        return False
    for index in range(first, len(state.tokens)):
        token = state.tokens[index]
        if token.type == "tr_open" and token.map is not None:
            row = getLine(state, token.map[0]).strip()
            cells = _cells_from(state.tokens, index)
            # A first bar and a last one enclose the cells.
            if row.count("|") >= len(cells) and len(columns := _columns(row)) > len(cells):
                cells[-1].content = "|".join(columns[len(cells) - 1 :]).strip()
    return True


def _cells_from(tokens: Sequence[Token], row: int) -> list[Token]:
    cells = []
    while tokens[row].type != "tr_close":
        row += 1
        if tokens[row].type == "inline":
            cells.append(tokens[row])
    return cells


def _columns(row: str) -> list[str]:
    columns = escapedSplit(row)
    if columns and not columns[0]:
        del columns[0]
    if columns and not columns[-1]:
        del columns[-1]
    return columns


def inline_content(tokens: Sequence[Token]) -> Content:
    """Inline tokens as text with styles. Entities may decode to control characters: cleaned here."""
    text: list[str] = []
    spans: list[Span] = []
    open_styles: list[tuple[str, int]] = []
    links: list[tuple[str, str, int]] = []
    position = 0

    def add(piece: str, style: str = "") -> None:
        nonlocal position
        if style:
            spans.append(Span(position, position + len(piece), style))
        text.append(piece)
        position += len(piece)

    for token in tokens:
        kind = token.type
        name, _, end = kind.rpartition("_")
        if kind in ("softbreak", "hardbreak"):
            add("\n")  # models write verse and addresses without Markdown's two spaces
        elif kind == "code_inline":
            add(sanitize(token.content), ".code")
        elif kind == "image":
            add(f"[{_clean(token.content)}] {_target(_attribute(token, 'src'), token)}", ".url")
        elif kind == "link_open":
            href = _attribute(token, "href")
            links.append((href, _target(href, token), position))
        elif kind == "link_close" and links:
            href, target, start = links.pop()
            shown = "".join(text)[start:]
            if href.lower().startswith(_LINK_SCHEMES):
                spans.append(Span(start, position, ".link"))
            if href.removeprefix("mailto:") != shown or target != f"({href})":
                add(f" {target}", ".url")  # where a link leads is never hidden
        elif name in _EMPHASIS and end == "open":
            open_styles.append((_EMPHASIS[name], position))
        elif name in _EMPHASIS and end == "close" and open_styles:
            style, start = open_styles.pop()
            spans.append(Span(start, position, style))
        else:
            add(sanitize(token.content).expandtabs(TAB))
    return Content("".join(text), spans)


def _attribute(token: Token, name: str) -> str:
    return _clean(str(token.attrs.get(name, "")))


def _clean(text: str) -> str:
    return sanitize_line(text, len(text))


def _target(address: str, token: Token) -> str:
    """Where a link leads or an image lies, with its title, as they are written."""
    title = _attribute(token, "title")
    return f'({address} "{title}")' if title else f"({address})"
