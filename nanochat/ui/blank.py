"""Containers that only hold others and show nothing themselves, which makes drawing them next to free.

Textual draws every container whole below its children with each change on the screen. ``BLANK`` has it
repeat one empty line instead of keeping, filtering and cutting every one of them.
"""

from __future__ import annotations

from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import ContentSwitcher


class BlankHorizontal(Horizontal):
    """Children in a row."""

    BLANK = True


class BlankVertical(Vertical):
    """Children in a column."""

    BLANK = True


class BlankVerticalScroll(VerticalScroll):
    """Children in a column that scrolls."""

    BLANK = True


class BlankSwitcher(ContentSwitcher):
    """One of its children at a time."""

    BLANK = True
