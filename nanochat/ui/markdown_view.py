"""A widget that shows growing Markdown: it draws only the lines in view, and redraws only what changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style

from nanochat.ui.markdown_document import MarkdownDocument, no_limit
from nanochat.ui.markdown_layout import Line
from nanochat.ui.textual_private import Growing

CURSOR = "▍"
MAX_STRIPS = 1_000
"""Drawn lines kept; more than any screen shows."""


class MarkdownView(Growing):
    """Shows a :class:`MarkdownDocument`. Text given to it must already be sanitised."""

    STYLES: ClassVar[frozenset[str]] = frozenset(
        {
            *("em", "strong", "strike", "code", "link", "url", "h1", "h3", "bullet", "rule"),
            *("quote-bar", "fence", "fence-label", "table-header"),
        }
    )
    COMPONENT_CLASSES: ClassVar[set[str]] = {f"markdown--{name}" for name in STYLES}
    can_focus = False

    class Waiting(Message):
        """There was no time for all of the text; :meth:`lay_out_more` goes on."""

    def __init__(self, source: str = "", has_time: Callable[[], bool] = no_limit) -> None:
        """``has_time`` is asked between the pieces of a long text; :class:`Waiting` tells if it left any."""
        super().__init__()
        self._document = MarkdownDocument(source)
        self._has_time = has_time
        self._strips: dict[int, Strip] = {}
        self._styles: dict[str, Style] = {}
        self._is_live = False

    @property
    def source(self) -> str:
        """The text shown."""
        return self._document.source

    @property
    def text(self) -> str:
        """What stands on the screen, line by line, without styles."""
        return "\n".join(line.content.plain for line in self._document.lines)

    @property
    def is_complete(self) -> bool:
        """Whether all of the text has been laid out."""
        return self._document.is_complete

    @property
    def is_live(self) -> bool:
        """Whether a cursor stands at the end."""
        return self._is_live

    @is_live.setter
    def is_live(self, is_live: bool) -> None:
        if is_live != self._is_live:
            self._is_live = is_live
            self._strips.pop(len(self._document.lines) - 1, None)
            self.refresh()

    def append(self, text: str) -> None:
        """Add to the end."""
        self._document.append(text)
        self._relayout()

    def replace(self, source: str) -> None:
        """Show another text."""
        self._document.replace(source)
        self._relayout()

    def show(self, source: str) -> None:
        """Show a text; cheap when the one shown has only grown."""
        if not source.startswith(self.source):
            self.replace(source)
        elif len(source) > len(self.source):
            self.append(source[len(self.source) :])

    def finish(self) -> None:
        """No more text will come."""
        self._document.finish()

    def on_resize(self) -> None:
        if not self.is_complete:
            self.post_message(self.Waiting())

    def lay_out_more(self) -> None:
        """Go on with a text for which there was no time; nothing before the widget has a width."""
        if not self.is_complete and self.content_size.width:
            self._relayout()

    def _relayout(self) -> None:
        width = self.content_size.width
        if width == 0:
            self.refresh(layout=True)
            return
        before = len(self._document.lines)
        first = self._lay_out(width)
        if self._is_live:
            first = min(first, max(0, before - 1))  # the cursor stood there
        self._forget_strips(first)
        after = len(self._document.lines)
        changed = Region(0, first, self.size.width, max(before, after) - first)
        if after != before:
            self.refresh(changed, layout=True)
        elif first < before:
            self.refresh(changed)

    def _lay_out(self, width: int) -> int:
        first = self._document.layout(width, self._has_time)
        if not self._document.is_complete:
            self.post_message(self.Waiting())
        return first

    def _forget_strips(self, first: int) -> None:
        for y in [y for y in self._strips if y >= first]:
            del self._strips[y]

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        if width != self._document.width:
            self._forget_strips(self._lay_out(width))
        return len(self._document.lines)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._styles.clear()
        self._strips.clear()

    def render_lines(self, crop: Region) -> list[Strip]:
        """The lines as they are: with no border and no padding, Textual would only keep them a second time."""
        width = self.size.width
        if width != self.content_size.width or self.opacity != 1 or self.get_line_filters():
            return super().render_lines(crop)
        strips = [self.render_line(y) for y in crop.line_range]
        start, end = crop.column_span
        return strips if (start, end) == (0, width) else [strip.crop(start, end) for strip in strips]

    def render_line(self, y: int) -> Strip:
        width = self.content_size.width
        if y >= len(self._document.lines):
            return Strip.blank(width, self._style("").rich_style)
        if (strip := self._strips.get(y)) is None:
            if len(self._strips) >= MAX_STRIPS:
                self._strips.clear()
            strip = self._strips[y] = self._draw(self._document.lines[y], y, width)
        return strip

    def _draw(self, line: Line, y: int, width: int) -> Strip:
        content, base = line.content, self._style("")
        if self._is_live and y == len(self._document.lines) - 1 and cell_len(content.plain) < width:
            content = content + Content.styled(CURSOR, "$accent")
        if (selection := self.text_selection) is not None and (span := selection.get_span(y)) is not None:
            start, end = span
            style = self.screen.get_visual_style("screen--selection")
            content = content.stylize(style, start, len(content) if end == -1 else end)
        rest = self._style(line.fill, is_fill=True) if line.fill else base
        strip = _strip(content[line.offset :].render(rest, "", self._style))
        strip = strip.extend_cell_length(width - line.offset, rest.rich_style)
        if line.offset:
            strip = Strip.join([_strip(content[: line.offset].render(base, "", self._style)), strip])
        return strip.apply_offsets(0, y)

    def _style(self, name: str | Style, *, is_fill: bool = False) -> Style:
        """A style by its name in the layout (``.strong``), or any other style Textual knows.

        The empty name is the widget's own style. Styles that fill include the background.
        """
        if isinstance(name, Style):
            return name
        if (style := self._styles.get(name)) is None:
            if not name:
                style = self.visual_style
            elif name.startswith("."):
                style = self.get_visual_style(f"markdown--{name[1:]}", partial=not is_fill)
            else:
                style = Style.parse(name)
            self._styles[name] = style
        return style

    @property
    def allow_select(self) -> bool:
        return True

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        return selection.extract(self.text), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self._strips.clear()
        self.refresh()


def _strip(pieces: Iterable[tuple[str, Style]]) -> Strip:
    return Strip([Segment(text, style.rich_style) for text, style in pieces])
