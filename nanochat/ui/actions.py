"""Everything a user can do, in one table: it feeds key bindings, the palette, slash commands and help.

An action's ``id`` names the ``action_<id>`` method of the app or the main screen. Knows neither of them.
The user's settings file may give an action other keys; :func:`remapped` makes the table that holds then.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from textual.binding import Binding

from nanochat.errors import InvalidOption
from nanochat.settings import Settings
from nanochat.ui import keys as key_names

Place = Literal["screen", "app", "prompt", "dialog", "list"]


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do."""

    id: str
    title: str
    help: str
    keys: str = ""
    """Textual key names, separated by commas."""
    slash: str = ""
    """Name of the slash command, without the slash."""
    argument: str = ""
    """What the slash command may take after its name, for the help."""
    footer: str = ""
    """Label in the key bar; empty: not shown there."""
    in_palette: bool = True
    place: Place = "screen"
    """Who handles it: the main screen; the app, so also while a dialog is on top; the prompt; a dialog; or a
    dialog in which nothing is written, so that letters are free.
    """
    call: str = ""
    """The Textual action, where it isn't the id."""
    group: str = ""
    """Its heading in the help."""

    @property
    def needs_argument(self) -> bool:
        """Whether the palette has to ask for one; what may be left out stands in brackets."""
        return bool(self.argument) and not self.argument.startswith("[")

    @property
    def key_label(self) -> str:
        """How its first key is written for people; empty without one."""
        return key_names.label(self.keys)


MAX_JUMP = 9
"""So many tabs have a key of their own."""


def _group(name: str, *actions: Action) -> tuple[Action, ...]:
    return tuple(dataclasses.replace(action, group=name) for action in actions)


ACTIONS: tuple[Action, ...] = (
    *_group(
        "Tabs",
        Action("new_chat", "New chat", "open a tab", "ctrl+n", "new", footer="new"),
        Action("close_chat", "Close chat", "close this tab; asks while it answers", "ctrl+w", "close", footer="close"),
        Action("fork_chat", "Fork chat", "a tab with the same history; its KV blocks are shared", "ctrl+f", "fork", footer="fork"),
        Action("next_chat", "Next chat", "go to the tab on the right", "f4,ctrl+pagedown"),
        Action("previous_chat", "Previous chat", "go to the tab on the left", "f3,ctrl+pageup"),
        Action("goto", "Go to chat", "the tab of that number; ^G and a digit does it in any terminal", "ctrl+g", "goto", argument="[N]"),
        *(
            Action(f"jump_{number}", f"Chat {number}", "go to that tab", f"alt+{number}", in_palette=False, call=f"jump({number})")
            for number in range(1, MAX_JUMP + 1)
        ),
        Action("search", "Search", "all chats, also those without a tab; opens one at the message", "f9", "search", argument="[WORDS]", footer="search"),
        Action("rename", "Rename chat", "give this tab another title", "f8", "rename", argument="[TITLE]"),
        Action("delete_chat", "Delete chat", "close this tab and delete its chat for good; asks first", slash="delete"),
        Action("move", "Move tab", "to that place; ^G and ← or → moves it too", slash="move", argument="N"),
        Action("move_left", "Move tab left", "change places with the tab before", "alt+pageup"),
        Action("move_right", "Move tab right", "change places with the tab after", "alt+pagedown"),
    ),
    *_group(
        "Many at once",
        Action("broadcast", "Broadcast", "send one message to the marked tabs, or to all", slash="broadcast", argument="TEXT"),
        Action("mark", "Mark tab", "let broadcasts go to this tab, or no longer", "alt+m", "mark"),
        Action("compare", "Compare", "two settings side by side, such as temperature=0 | temperature=1", slash="compare", argument="A | B"),
    ),
    *_group(
        "Chat",
        Action("send", "Send", "send what is written", "enter", in_palette=False, place="prompt"),
        Action("new_line", "New line", "a new line in the prompt; so does Shift+Enter in many terminals", "ctrl+j,shift+enter", in_palette=False, place="prompt"),
        Action("stop", "Stop", "end the answer; what has come stays in the context", "escape", footer="stop"),
        Action("again", "Answer again", "a new branch; the old answer is kept", "ctrl+r", "again", footer="again"),
        Action("continue", "Continue", "go on with an answer that was stopped, interrupted or cut off", slash="continue"),
        Action("edit", "Edit and resend", "another text instead of your last message, as a branch; again: the one before", "f6", "edit"),
        Action("previous_branch", "Previous branch", "show the branch before this one", "alt+left"),
        Action("next_branch", "Next branch", "show the branch after this one", "alt+right"),
        Action("copy", "Copy", "copy the answer; or code 2, question, all; over ssh and tmux too", "alt+c", "copy", argument="[WHAT]"),
        Action("copy_code", "Copy code block", "copy the last code block of the answer", "alt+k"),
        Action("drop_oldest", "Drop oldest turns", "leave out as many as the context needs, or a number", slash="drop", argument="[TURNS]"),
        Action("clear_chat", "Clear chat", "forget this chat's messages", slash="clear"),
    ),
    *_group(
        "Files",
        Action("export", "Export chat", "as Markdown or with all branches as JSON, to a file", slash="export", argument="[md|json] [FILE]"),
        Action("import", "Import chat", "open a chat that was exported as JSON", slash="import", argument="FILE"),
    ),
    *_group(
        "Settings",
        Action("system", "System prompt", "show or set what the model is told first", slash="system", argument="TEXT"),
        Action("settings", "Chat settings", "this chat's settings in a dialog", "f7", "settings"),
        Action("preset", "Preset", "take the settings that the settings file has under a name", slash="preset", argument="[NAME]"),
        Action("set", "Sampling settings", "show or set, such as /set temperature 0.2", slash="set", argument="NAME VALUE"),
        Action("think", "Reasoning", "whether the model reasons first; keep: its reasoning stays in the context", slash="think", argument="[on|off|default|keep|drop]"),
        Action("model", "Model", "which one runs, where, and with what cache; or load another", slash="model", argument="[NAME]"),
        Action("toggle_theme", "Theme", "dark, light or contrast; without a name the next one", slash="theme", argument="[NAME]"),
    ),
    *_group(
        "View",
        Action("toggle_stats", "Stats panel", "the panel: off, narrow or full", "f2", "stats", footer="panel"),
        Action("toggle_reasoning", "Show reasoning", "unfold or fold what models think before they answer", "ctrl+t"),
        Action("scroll_back", "Scroll up", "a page up in the chat", "pageup", in_palette=False),
        Action("scroll_forward", "Scroll down", "a page down; at the end the chat follows again", "pagedown", in_palette=False),
        Action("screenshot", "Screenshot", "save the screen, or the panel alone, as an SVG picture", "f5", "screenshot", argument="[panel]", footer="screenshot", place="app"),
    ),
    *_group(
        "App",
        Action("command_palette", "Commands", "search everything here by name", "ctrl+p", footer="commands", in_palette=False),
        Action("help", "Help", "this page", "f1", "help", footer="help"),
        Action("interrupt", "Copy, stop or quit", "copies a selection, or stops; twice when idle quits", "ctrl+c", in_palette=False, place="app"),
        Action("suspend", "Suspend", "back to the shell until fg; ^_ undoes in the prompt", "ctrl+z", place="app"),
        Action("quit", "Quit", "leave at once", "ctrl+q", "quit", place="app"),
    ),
    *_group(
        "In dialogs",
        Action("dialog_close", "Close dialog", "leave all as it is", "escape", in_palette=False, place="dialog"),
        Action("dialog_apply", "Apply", "take the settings as they are written", "ctrl+s", in_palette=False, place="dialog"),
        Action("list_up", "Up", "the entry, field or button before", "up", in_palette=False, place="dialog"),
        Action("list_down", "Down", "the entry, field or button after", "down", in_palette=False, place="dialog"),
        Action("list_page_up", "Page up", "a page of entries up", "pageup", in_palette=False, place="dialog"),
        Action("list_page_down", "Page down", "a page of entries down", "pagedown", in_palette=False, place="dialog"),
        Action("dialog_yes", "Yes", "agree to what is asked", "y", in_palette=False, place="list"),
        Action("dialog_no", "No", "refuse what is asked", "n", in_palette=False, place="list"),
        Action("list_first", "First", "the first tab of the list", "home", in_palette=False, place="list"),
        Action("list_last", "Last", "the last tab of the list", "end", in_palette=False, place="list"),
        Action("list_left", "Left", "move the chosen tab left; the other button", "left", in_palette=False, place="list"),
        Action("list_right", "Right", "move the chosen tab right; the other button", "right", in_palette=False, place="list"),
        Action("list_rename", "Rename", "give the chosen tab another title", "r", in_palette=False, place="list"),
    ),
)  # fmt: skip

_SLASH = re.compile(r"/([A-Za-z][\w-]*)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SlashCall:
    """A prompt that is a command. ``action`` is None when there is no such command."""

    name: str
    argument: str
    action: Action | None


def find(action_id: str, actions: Sequence[Action] = ACTIONS) -> Action:
    """The action with this id."""
    return next(action for action in actions if action.id == action_id)


def dialog_binding(action_id: str, call: str, *, priority: bool = False) -> Binding:
    """A key binding of a dialog, with the keys of an action; ``call`` is the Textual action that it runs there."""
    return Binding(find(action_id).keys, call, show=False, priority=priority, id=action_id)


def dialog_keys(actions: Sequence[Action]) -> dict[str, str]:
    """Ids of the actions in dialogs by key."""
    rows = [action for action in actions if action.place in ("dialog", "list")]
    return {key: action.id for action in rows for key in key_names.split(action.keys)}


def bindings(place: Place) -> list[Binding]:
    """Key bindings of the app or of the main screen.

    They have priority, or the prompt's own editing keys would win.
    """
    return [
        Binding(action.keys, action.call or action.id, action.title, show=False, priority=True, id=action.id)
        for action in ACTIONS
        if action.keys and action.place == place
    ]


def remapped(keys: Mapping[str, str]) -> tuple[Action, ...]:
    """The table with other keys: ``keys`` maps action ids to key names, separated by commas.

    Raises:
        InvalidOption: there is no such action or key, the key is needed for writing, or two actions want it.
    """
    known = {action.id for action in ACTIONS}
    for action_id, wanted in keys.items():
        if action_id not in known:
            raise InvalidOption(f'"{action_id}" is no action; there are: {", ".join(sorted(known))}.')
        names = key_names.split(wanted)
        if not names:
            raise InvalidOption(f'"{action_id}" needs the name of a key, such as "ctrl+g" or "f9".')
        for name in names:
            _check_key(action_id, name)
    table = tuple(
        dataclasses.replace(action, keys=",".join(key_names.split(keys[action.id])))
        if action.id in keys
        else action
        for action in ACTIONS
    )
    _check_owners([action for action in table if action.place not in ("dialog", "list")])
    _check_owners([action for action in table if action.place in ("app", "dialog", "list")])
    return table


def _check_owners(actions: Sequence[Action]) -> None:
    """Of actions that can be wanted at the same time, no two may have the same key."""
    owners: dict[str, str] = {}
    for action in actions:
        for name in key_names.split(action.keys):
            if (owner := owners.setdefault(name, action.id)) != action.id:
                raise InvalidOption(
                    f'"{owner}" and "{action.id}" both have the key {name}; give one of them another.'
                )


def chosen_actions(settings: Settings) -> tuple[Action, ...]:
    """The table with the keys of the user's settings file.

    Raises:
        InvalidOption: the file's keys can't work; the message names the file.
    """
    try:
        return remapped(settings.keys)
    except InvalidOption as error:
        raise InvalidOption(f"In {settings.path}: [keys] {error}") from None


def _check_key(action_id: str, name: str) -> None:
    if not key_names.exists(name):
        raise InvalidOption(
            f'"{action_id}" has no key "{name[:30]}"; write it like "ctrl+g", "alt+left", "shift+f2" or "f9".'
        )
    place = find(action_id).place
    if place in ("dialog", "list") and (name == "enter" or name.isdecimal()):
        raise InvalidOption(f'"{action_id}" can\'t have the key {name}, which chooses in dialogs.')
    in_text = key_names.writes(name) if place in ("prompt", "dialog") else not key_names.is_free(name)
    if in_text and place != "list":
        raise InvalidOption(f'"{action_id}" can\'t have the key {name}, which is needed for writing.')


def parse_slash(text: str) -> SlashCall | None:
    """The command in a prompt; None for ordinary text, such as a path or text that begins with ``//``."""
    match = _SLASH.fullmatch(text.strip())
    if match is None:
        return None
    name, argument = match.group(1).lower(), (match.group(2) or "").strip()
    found = next((action for action in ACTIONS if action.slash == name), None)
    return SlashCall(name, argument, found)


def slash_hints(prefix: str) -> list[Action]:
    """The command of this name, or else those whose name begins so."""
    prefix = prefix.lower()
    found = [action for action in ACTIONS if action.slash and action.slash.startswith(prefix)]
    return [action for action in found if action.slash == prefix] or found
