"""Everything a user can do, in one table: it feeds key bindings, the palette, slash commands and help.

An action's ``id`` names the ``action_<id>`` method of the app or the main screen. Knows neither of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from textual.binding import Binding


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do."""

    id: str
    title: str
    help: str
    keys: str = ""
    """Textual key names, separated by commas."""
    key_label: str = ""
    """How the keys are written for people."""
    slash: str = ""
    """Name of the slash command, without the slash."""
    argument: str = ""
    """What the slash command may take after its name, for the help."""
    footer: str = ""
    """Label in the key bar; empty: not shown there."""
    in_palette: bool = True
    of_app: bool = False
    """Handled by the app, so also while a dialog is on top; all others by the main screen."""


ACTIONS: tuple[Action, ...] = (
    Action("new_chat", "New chat", "open a tab", "ctrl+n", "^N", "new", footer="new"),
    Action("close_chat", "Close chat", "close this tab; asks while it answers", "ctrl+w", "^W", "close", footer="close"),
    Action("fork_chat", "Fork chat", "a tab with the same history; its KV blocks are shared", "ctrl+f", "^F", "fork", footer="fork"),
    Action("stop", "Stop", "end the answer; what has come stays in the context", "escape", "Esc", footer="stop"),
    Action("again", "Answer again", "a new branch; the old answer is kept", "ctrl+r", "^R", "again", footer="again"),
    Action("previous_branch", "Previous branch", "show the answer before this one", "alt+left", "Alt ←"),
    Action("next_branch", "Next branch", "show the answer after this one", "alt+right", "Alt →"),
    Action("next_chat", "Next chat", "go to the tab on the right", "f4,ctrl+pagedown", "F4"),
    Action("previous_chat", "Previous chat", "go to the tab on the left", "f3,ctrl+pageup", "F3"),
    Action("toggle_stats", "Stats panel", "the panel: off, narrow or full", "f2", "F2", "stats", footer="panel"),
    Action("toggle_reasoning", "Show reasoning", "unfold or fold what models think before they answer", "ctrl+t", "^T"),
    Action("screenshot", "Screenshot", "save the screen as an SVG picture", "f5", "F5", "screenshot", footer="screenshot", of_app=True),
    Action("command_palette", "Commands", "search everything here by name", "ctrl+p", "^P", footer="commands", in_palette=False),
    Action("help", "Help", "this page", "f1", "F1", "help", footer="help"),
    Action("system", "System prompt", "show or set what the model is told first", slash="system", argument="TEXT"),
    Action("set", "Sampling settings", "show or set, such as /set temperature 0.2", slash="set", argument="NAME VALUE"),
    Action("drop_oldest", "Drop oldest turns", "leave out as many as the context needs, or a number", slash="drop", argument="TURNS"),
    Action("clear_chat", "Clear chat", "forget this chat's messages", slash="clear"),
    Action("toggle_theme", "Light or dark", "switch the colours", slash="theme"),
    Action("scroll_back", "Scroll up", "a page up in the chat", "pageup", "PgUp", in_palette=False),
    Action("scroll_forward", "Scroll down", "a page down; at the end the chat follows again", "pagedown", "PgDn", in_palette=False),
    Action("interrupt", "Copy, stop or quit", "copies a selection, or stops; twice when idle quits", "ctrl+c", "^C", in_palette=False, of_app=True),
    Action("quit", "Quit", "leave at once", "ctrl+q", "^Q", "quit", of_app=True),
)  # fmt: skip

MAX_JUMP = 9
"""Alt and a digit go to that tab."""

_SLASH = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SlashCall:
    """A prompt that is a command. ``action`` is None when there is no such command."""

    name: str
    argument: str
    action: Action | None


def bindings(*, of_app: bool) -> list[Binding]:
    """Key bindings of the app or of the main screen.

    They have priority, or the prompt's own editing keys would win.
    """
    return [
        Binding(action.keys, action.id, action.title, key_display=action.key_label, show=False, priority=True, id=action.id)
        for action in ACTIONS
        if action.keys and action.of_app is of_app
    ]  # fmt: skip


def jump_bindings() -> list[Binding]:
    """Alt and a digit: straight to a tab."""
    return [
        Binding(f"alt+{number}", f"jump({number})", f"Chat {number}", show=False, priority=True)
        for number in range(1, MAX_JUMP + 1)
    ]


def parse_slash(text: str) -> SlashCall | None:
    """The command in a prompt; None for ordinary text, such as a path or text that begins with ``//``."""
    match = _SLASH.fullmatch(text.strip())
    if match is None:
        return None
    name, argument = match.group(1), (match.group(2) or "").strip()
    found = next((action for action in ACTIONS if action.slash == name), None)
    return SlashCall(name, argument, found)


def slash_hints(prefix: str) -> list[Action]:
    """Commands whose name begins with what follows the slash."""
    return [action for action in ACTIONS if action.slash and action.slash.startswith(prefix)]
