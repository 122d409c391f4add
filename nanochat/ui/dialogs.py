"""Screens on top of the chat: a question with two answers, and the help."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from nanochat.ui.actions import ACTIONS, MAX_JUMP


class Confirm(ModalScreen[bool]):
    """Asks a question; True if the user agrees."""

    BINDINGS: ClassVar = [
        Binding("escape,n", "answer(False)", show=False),
        Binding("y", "answer(True)", show=False),
        Binding("left,right,up,down", "app.focus_next", show=False),
    ]

    def __init__(self, question: str, yes: str, no: str = "Cancel") -> None:
        super().__init__()
        self._question, self._yes, self._no = question, yes, no

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(self._question, markup=False)
            with Horizontal(classes="buttons"):
                yield Button(self._yes, id="yes", variant="primary", compact=True)
                yield Button(self._no, id="no", compact=True)

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")


def help_text() -> Content:
    """Every action with its key and slash command."""
    rows = [(action.key_label, action.slash, action.argument, action.help) for action in ACTIONS]
    rows += [
        (f"Alt 1–{MAX_JUMP}", "", "", "go to that tab"),
        ("Enter", "", "", "send"),
        ("^J", "", "", "new line; so does Shift+Enter in many terminals"),
    ]
    lines = [Content.styled(f"{'key':<9}{'command':<22}", "$muted")]
    for key, slash, argument, help in rows:
        name = f"/{slash} " if slash else ""
        command = Content.styled(name, "$primary") + Content.styled(argument, "$muted")
        lines.append(Content.styled(f"{key:<9}", "$accent") + command.pad_right(22 - len(command)) + help)
    lines += [
        Content(""),
        Content.styled(
            "^C copies what is selected with the mouse. // sends text that starts with a slash.", "$muted"
        ),
    ]
    return Content("\n").join(lines)


class Help(ModalScreen[None]):
    """Keys and commands, from the actions table."""

    BINDINGS: ClassVar = [Binding("escape,f1,q,enter", "dismiss_help", show=False)]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog help"):
            yield Static(help_text(), markup=False)

    def action_dismiss_help(self) -> None:
        self.dismiss(None)
