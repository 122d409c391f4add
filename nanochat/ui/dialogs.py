"""Screens on top of the chat: a question with two answers, and the help."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Button, Static

from nanochat.ui.actions import ACTIONS, MAX_JUMP, Action, dialog_binding, find
from nanochat.ui.chrome import actions_of
from nanochat.ui.dialog import Dialog

MAX_COMMAND = 24
"""Cells of the help's column of commands; a longer one takes a line of its own."""


class Confirm(Dialog[bool]):
    """Asks a question; True if the user agrees."""

    BINDINGS: ClassVar = [
        dialog_binding("dialog_close", "answer(False)"),
        dialog_binding("dialog_no", "answer(False)"),
        dialog_binding("dialog_yes", "answer(True)"),
        *(dialog_binding(f"list_{way}", "app.focus_next") for way in ("left", "right", "up", "down")),
    ]

    def __init__(self, question: str, yes: str, no: str = "Cancel", *, is_final: bool = False) -> None:
        """``is_final``: what is agreed to can't be undone, so Enter alone doesn't agree."""
        super().__init__()
        self._question, self._yes, self._no = question, yes, no
        self._is_final = is_final

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(self._question, markup=False)
            with Horizontal(classes="buttons"):
                yield Button(self._yes, id="yes", variant="primary", compact=True)
                yield Button(self._no, id="no", compact=True)

    def on_mount(self) -> None:
        self.query_one("#no" if self._is_final else "#yes").focus()

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")


def help_text(actions: Sequence[Action] = ACTIONS, width: int = 100) -> Content:
    """Every action with its key and slash command, under the headings of the actions table.

    Three columns within ``width`` cells; what an action does is wrapped in the last one.
    """
    rows = [row for row in actions if not row.id.startswith("jump_") or row.id == "jump_1"]
    keys = {row.id: _jump_label(actions) if row.id == "jump_1" else row.key_label for row in rows}
    key_width = 2 + max(len(key) for key in keys.values())
    command_width = min(MAX_COMMAND, 2 + max(len(f"/{row.slash} {row.argument}") for row in rows))
    lines: list[Content] = []
    for group, members in itertools.groupby(rows, lambda row: row.group):
        lines += [Content("")] if lines else []
        lines.append(Content.styled(group, "bold"))
        for row in members:
            lines += _help_lines(row, keys[row.id], key_width, command_width, width)
    copy, quit = find("interrupt", actions).key_label, find("quit", actions).key_label
    foot = (
        f"{copy} copies what is selected with the mouse; {quit} quits. // sends text that starts with a slash. "
        "The settings file can give every action other keys, and Enter stays what it is in dialogs: "
        "nanochat config --example shows how."
    )
    lines += [Content(""), *Content.styled(foot, "$muted").wrap(max(20, width))]
    return Content("\n").join(lines)


def _help_lines(row: Action, key: str, key_width: int, command_width: int, width: int) -> list[Content]:
    name = f"/{row.slash} " if row.slash else ""
    command = Content.styled(name, "$primary") + Content.styled(row.argument, "$muted")
    head = Content.styled(f"{key:<{key_width}}", "$accent") + command
    indent = key_width + command_width
    wrapped = Content(row.help).wrap(max(16, width - indent))
    if len(head) >= indent:  # too long for its column: the help begins below it
        return [head, *(Content(" " * indent) + line for line in wrapped)]
    first, *rest = wrapped
    return [head.pad_right(indent - len(head)) + first, *(Content(" " * indent) + line for line in rest)]


def _jump_label(actions: Sequence[Action]) -> str:
    first, last = (find(f"jump_{number}", actions) for number in (1, MAX_JUMP))
    return f"{first.key_label}–{last.key_label.split()[-1]}"


class Help(Dialog[None]):
    """Keys and commands, from the actions table."""

    BINDINGS: ClassVar = [
        dialog_binding("dialog_close", "dismiss_help"),
        dialog_binding("help", "dismiss_help"),
        Binding("enter", "dismiss_help", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._text = Static("", markup=False)

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog help"):
            yield self._text

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        self._text.update(help_text(actions_of(self), self._text.size.width or self.size.width // 2))

    def action_dismiss_help(self) -> None:
        self.dismiss(None)
