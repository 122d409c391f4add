"""All tabs in a list: a digit goes to one, arrows choose and move one. And the line for a new title.

It is the way to a tab that works in every terminal, because each of its keys does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from nanochat.ui.line_input import LineInput

FRAME_ROWS = 8
"""Rows of the screen that the list leaves free: for its frame, the hint, and what it lies on."""
HINT = "1–9 goes there · ↑ ↓ Enter too · ← → moves it · r renames"


@dataclass(frozen=True, slots=True)
class PickedTab:
    """What the user wants: an order of the chats by id, and perhaps to go to one, or to rename it."""

    order: tuple[int, ...]
    chat_id: int | None
    is_to_be_renamed: bool = False


class TabPicker(ModalScreen[PickedTab]):
    """Gives a :class:`PickedTab`."""

    BINDINGS: ClassVar = [Binding("escape,ctrl+g,q", "leave", show=False)]

    def __init__(self, labels: Sequence[tuple[int, Content]], active_id: int) -> None:
        """``labels``: each chat's id and how it is written, in the tabs' order."""
        super().__init__()
        self._labels = dict(labels)
        self._order = [chat_id for chat_id, _ in labels]
        self._chosen = active_id

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(self._shown(), id="tabs", markup=False)
            yield Static(Content.styled(HINT, "$muted"), markup=False)

    def on_key(self, event: events.Key) -> None:
        """Every key at once, also one typed before the list is drawn."""
        place = self._order.index(self._chosen)
        if event.key.isdecimal() and len(event.key) == 1:
            if 1 <= int(event.key) <= len(self._order):
                self._leave(self._order[int(event.key) - 1])
        elif event.key in ("up", "down"):
            self._chosen = self._order[(place + (1 if event.key == "down" else -1)) % len(self._order)]
        elif event.key in ("left", "right"):
            self._order.remove(self._chosen)
            self._order.insert(max(0, place + (1 if event.key == "right" else -1)), self._chosen)
        elif event.key == "enter":
            self._leave(self._chosen)
        elif event.key == "r":
            self.dismiss(PickedTab(tuple(self._order), self._chosen, is_to_be_renamed=True))
        else:
            return
        event.stop()
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        if self.is_current and self.is_mounted:
            for shown in self.query("#tabs").results(Static):
                shown.update(self._shown())

    def action_leave(self) -> None:
        self._leave(None)

    def _leave(self, chat_id: int | None) -> None:
        self.dismiss(PickedTab(tuple(self._order), chat_id))

    def _shown(self) -> Content:
        """As many tabs as there is room for, around the chosen one."""
        rows = max(1, self.app.size.height - FRAME_ROWS)
        place = self._order.index(self._chosen)
        first = max(0, min(place - rows // 2, len(self._order) - rows))
        lines = []
        for number, chat_id in enumerate(self._order[first : first + rows], first + 1):
            is_chosen = chat_id == self._chosen
            mark = Content.styled("▸ " if is_chosen else "  ", "$accent")
            head = mark + Content.styled(f"{number:>2} ", "$muted")
            lines.append(head + self._labels[chat_id].stylize_before("bold" if is_chosen else "$muted"))
        return Content("\n").join(lines)


class TitleDialog(ModalScreen[str | None]):
    """Asks for a title; None if the user leaves it as it is."""

    BINDINGS: ClassVar = [Binding("escape", "leave", show=False)]

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static("Title of this chat", markup=False)
            yield LineInput(self._title, compact=True)

    def action_leave(self) -> None:
        self.dismiss(None)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)
