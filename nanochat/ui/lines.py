"""A widget of ready-made lines: it draws only those in view, and redraws only those that changed.

For text that is refreshed several times a second, where wrapping and drawing all of it would cost too
much. Knows nothing of what the lines say.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget


def draw(content: Content, style: Style, width: int) -> Strip:
    """One line, filled or cut to ``width`` cells."""
    pieces = content.render(style, "", lambda name: name if isinstance(name, Style) else Style.parse(name))
    strip = Strip([Segment(text, piece.rich_style) for text, piece in pieces])
    return strip.adjust_cell_length(width, style.rich_style)


class LinesWidget(Widget):
    """Shows the lines it was last given; lines beyond its height are cut off."""

    can_focus = False

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: list[Content] = []

    @property
    def text(self) -> str:
        """What the widget says, without styles."""
        return "\n".join(line.plain for line in self._lines)

    def show_lines(self, lines: Sequence[Content]) -> None:
        """Draw these instead."""
        old, self._lines = self._lines, list(lines)
        width = self.size.width
        regions = [
            Region(0, y, width, 1)
            for y in range(max(len(old), len(lines)))
            if y >= len(old) or y >= len(lines) or not old[y].is_same(lines[y])
        ]
        if regions:
            self.refresh(*regions)

    def render_line(self, y: int) -> Strip:
        style, width = self.visual_style, self.content_size.width
        return draw(self._lines[y] if y < len(self._lines) else Content(""), style, width)
