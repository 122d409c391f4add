"""Containers that only hold others and show nothing themselves, which makes drawing them next to free.

Textual draws every container whole below its children with each change on the screen. ``BLANK`` has it
repeat one empty line instead of keeping and cutting every one of them.
"""

from __future__ import annotations

from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.geometry import Region
from textual.strip import Strip
from textual.widgets import ContentSwitcher

from nanochat.ui.textual_private import LaidOutOnce


class Blank(LaidOutOnce):
    """Shows nothing but its ground. Name it after the container: Textual's styles follow the first base."""

    BLANK = True

    def render_lines(self, crop: Region) -> list[Strip]:
        """Also filtered, which Textual leaves out with ``BLANK``: without colours the ground is grey."""
        strips = super().render_lines(crop)
        if self.BLANK and (filters := self.get_line_filters()):
            _, ground = self.background_colors
            for line_filter in filters:
                strips = [strip.apply_filter(line_filter, ground) for strip in strips]
        return strips


class BlankHorizontal(Horizontal, Blank):
    """Children in a row."""


class BlankVertical(Vertical, Blank):
    """Children in a column."""


class BlankVerticalScroll(VerticalScroll, Blank):
    """Children in a column that scrolls."""


class BlankSwitcher(ContentSwitcher, Blank):
    """One of its children at a time."""
