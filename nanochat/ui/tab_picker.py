"""All tabs in a list: a digit goes to one, arrows choose and move one. And the line for a new title.

It is the way to a tab that works in every terminal, because each of its keys does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, Static

from nanochat.ui.actions import Action, dialog_binding, dialog_keys, find
from nanochat.ui.chrome import actions_of
from nanochat.ui.dialog import Dialog
from nanochat.ui.line_input import LineInput

FRAME_ROWS = 8
"""Rows of the screen that the list leaves free: for its frame, the hint, and what it lies on."""


@dataclass(frozen=True, slots=True)
class PickedTab:
    """What the user wants: an order of the chats by id, and perhaps to go to one, or to rename it."""

    order: tuple[int, ...]
    chat_id: int | None
    is_to_be_renamed: bool = False


class TabPicker(Dialog[PickedTab]):
    """Gives a :class:`PickedTab`."""

    BINDINGS: ClassVar = [dialog_binding(action_id, "leave") for action_id in ("dialog_close", "goto")]

    def __init__(self, labels: Sequence[tuple[int, Content]], active_id: int) -> None:
        """``labels``: each chat's id and how it is written, in the tabs' order."""
        super().__init__()
        self._labels = dict(labels)
        self._order = [chat_id for chat_id, _ in labels]
        self._chosen = active_id

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog tabs"):
            yield Static(self._shown(), id="tabs", markup=False)
            yield Static(Content.styled(picker_hint(actions_of(self)), "$muted"), markup=False)

    def on_key(self, event: events.Key) -> None:
        """Every key at once, also one typed before the list is drawn."""
        if event.key.isdecimal() and len(event.key) == 1:
            if 1 <= int(event.key) <= len(self._order):
                self._leave(self._order[int(event.key) - 1])
        elif event.key == "enter":
            self._leave(self._chosen)
        elif not self._obey(dialog_keys(actions_of(self)).get(event.key, "")):
            return
        event.stop()
        self._draw()

    def _obey(self, action_id: str) -> bool:
        """Choose, move or rename; False if the action does nothing here."""
        place, last = self._order.index(self._chosen), len(self._order) - 1
        to_choose = {
            "list_up": (place - 1) % len(self._order),
            "list_down": (place + 1) % len(self._order),
            "list_first": 0,
            "list_last": last,
        }
        if action_id in to_choose:
            self._chosen = self._order[to_choose[action_id]]
        elif action_id in ("list_left", "list_right"):
            self._order.remove(self._chosen)
            self._order.insert(max(0, place + (1 if action_id == "list_right" else -1)), self._chosen)
        elif action_id == "list_rename":
            self.dismiss(PickedTab(tuple(self._order), self._chosen, is_to_be_renamed=True))
        else:
            return False
        return True

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


def picker_hint(actions: Sequence[Action]) -> str:
    """The list's keys."""
    names = ("list_up", "list_down", "list_left", "list_right", "list_rename")
    up, down, left, right, rename = (find(name, actions).key_label for name in names)
    return f"1–9 goes there · {up} {down} Enter too · {left} {right} moves it · {rename} renames"


class TitleDialog(Dialog[str | None]):
    """Asks for a title; None if the user leaves it as it is."""

    BINDINGS: ClassVar = [dialog_binding("dialog_close", "leave", priority=True)]

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
