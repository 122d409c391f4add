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
from nanochat.ui.prompt import HINT

_KEY_WIDTH = 12
_SLASH_WIDTH = 14


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
    heading = "bold $accent"
    lines = [Content.styled("Keys", heading)]
    for action in ACTIONS:
        if action.key_label:
            lines.append(_help_line(action.key_label, _KEY_WIDTH, action.title, action.help))
    lines.append(_help_line(f"Alt 1–{MAX_JUMP}", _KEY_WIDTH, "Jump", "go to that tab"))
    lines.append(
        _help_line(
            "Enter",
            _KEY_WIDTH,
            "Send",
            HINT.split(" · ")[1] + "; Shift+Enter too, where the terminal tells it apart",
        )
    )
    lines += [Content(""), Content.styled("Commands", heading)]
    for action in ACTIONS:
        if action.slash:
            name = f"/{action.slash} {action.argument}".strip()
            lines.append(_help_line(name, _SLASH_WIDTH + 6, "", action.help))
    lines += [
        Content(""),
        Content.styled(
            "Select text with the mouse and copy it with ^C. Begin with // to send text that starts with a slash.",
            "$muted",
        ),
    ]
    return Content("\n").join(lines)


def _help_line(key: str, width: int, title: str, help: str) -> Content:
    line = Content.styled(f"{key:<{width}}", "$primary")
    if title:
        line += Content(f"{title:<20}")
    return line + Content.styled(help, "$muted")


class Help(ModalScreen[None]):
    """Keys and commands, from the actions table."""

    BINDINGS: ClassVar = [Binding("escape,f1,q,enter", "dismiss_help", show=False)]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog help"):
            yield Static(help_text(), markup=False)

    def action_dismiss_help(self) -> None:
        self.dismiss(None)
