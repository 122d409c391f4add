"""The user's keys: what the settings file may give an action, and that it then holds everywhere."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.binding import Binding
from textual.widgets import TextArea

from nanochat.errors import InvalidOption
from nanochat.settings import load_settings
from nanochat.settings_example import example
from nanochat.ui import keys as key_names
from nanochat.ui.actions import ACTIONS, chosen_actions, find, remapped
from nanochat.ui.chrome import fitting_keys
from nanochat.ui.dialogs import Help, help_text
from tests.ui.driver import started


@pytest.mark.parametrize(
    ("keys", "label"),
    [
        ("ctrl+n", "^N"),
        ("alt+left", "Alt ←"),
        ("f4,ctrl+pagedown", "F4"),
        ("escape", "Esc"),
        ("ctrl+shift+f2", "Ctrl Shift F2"),
        ("pageup", "PgUp"),
        ("alt+9", "Alt 9"),
        ("", ""),
    ],
)
def test_keys_are_written_for_people(keys: str, label: str) -> None:
    assert key_names.label(keys) == label


def test_every_default_key_exists_and_leaves_writing_alone() -> None:
    for action in ACTIONS:
        for key in key_names.split(action.keys):
            assert key_names.exists(key)
            assert key_names.is_free(key) or action.place in ("prompt", "dialog", "list")


@pytest.mark.parametrize("key", ["ctrl+", "crtl+g", "f99", "ctrl+ctrl+g", "", "+", "<any>"])
def test_keys_that_do_not_exist(key: str) -> None:
    assert not key_names.exists(key)


@pytest.mark.parametrize("key", ["a", "A", "space", "enter", "shift+left", "backspace", "tab"])
def test_keys_that_writing_needs(key: str) -> None:
    assert not key_names.is_free(key)


@given(st.text(max_size=30))
def test_any_text_as_a_key_makes_a_table_or_a_sentence(text: str) -> None:
    with suppress(InvalidOption):
        assert find("fork_chat", remapped({"fork_chat": text})).keys


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"frok_chat": "ctrl+g"}, '"frok_chat" is no action'),
        ({"fork_chat": "ctrl+n"}, '"new_chat" and "fork_chat" both have the key ctrl+n'),
        ({"fork_chat": "x"}, "needed for writing"),
        ({"send": "a"}, "needed for writing"),
        ({"new_line": "space"}, "needed for writing"),
        ({"fork_chat": "strg+g"}, 'no key "strg+g"'),
        ({"fork_chat": ""}, "needs the name of a key"),
        ({"dialog_close": "q"}, "needed for writing"),
        ({"dialog_yes": "escape"}, '"dialog_close" and "dialog_yes" both have the key escape'),
        ({"dialog_yes": "ctrl+q"}, '"quit" and "dialog_yes" both have the key ctrl+q'),
        ({"list_rename": "7"}, "which chooses in dialogs"),
    ],
)
def test_keys_that_cannot_work(keys: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        remapped(keys)
    assert sentence in str(caught.value)


def test_a_mistake_is_told_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[keys]\nquit = "ctrl+n"\n')
    with pytest.raises(InvalidOption, match=r"config\.toml: \[keys\] .*ctrl\+n"):
        chosen_actions(load_settings(file))


def test_two_actions_can_change_places() -> None:
    table = remapped({"new_chat": "ctrl+w", "close_chat": "ctrl+n"})
    assert (find("new_chat", table).key_label, find("close_chat", table).key_label) == ("^W", "^N")


async def test_remapped_keys_work_and_are_shown(tiny_llama: Path) -> None:
    keys = {"new_chat": "ctrl+w", "close_chat": "ctrl+n", "fork_chat": "f12,ctrl+o", "jump_1": "ctrl+b"}
    async with started(tiny_llama, hold=True, keys=keys) as driver:
        chats = driver.app.main_screen.workspace.chats
        await driver.press("ctrl+w")
        assert len(chats) == 2
        await driver.press("f12", "ctrl+o")
        assert len(chats) == 4
        await driver.press("ctrl+b")
        assert driver.chat is chats[0]
        await driver.press("ctrl+n")
        await driver.until(lambda: len(chats) == 3)
        await driver.until_seen("^W new")
        await driver.until_seen("F12 fork")
        await driver.press("ctrl+f")  # now free for the prompt: deletes a word
        assert len(chats) == 3
        assert "F12" in help_text(driver.app.actions).plain
        await driver.press("f1")
        assert isinstance(driver.app.screen, Help)
        await driver.until_seen("F12")


async def test_the_key_that_sends_can_be_another(tiny_llama: Path) -> None:
    keys = {"send": "ctrl+s", "new_line": "enter"}
    async with started(tiny_llama, hold=True, keys=keys) as driver:
        await driver.until_seen("^S sends · Enter new line")
        await driver.press("a", "enter", "b")
        assert driver.prompt.text == "a\nb"
        await driver.press("ctrl+s")
        await driver.until(lambda: driver.chat.path)
        assert driver.chat.path[0].text == "a\nb"


async def test_keys_in_dialogs_can_be_others(tiny_llama: Path) -> None:
    keys = {
        "dialog_close": "ctrl+x",
        "dialog_yes": "j",
        "list_down": "ctrl+e",
        "list_rename": "t",
        "goto": "f12",
    }
    async with started(tiny_llama, hold=True, keys=keys) as driver:
        chats = driver.app.main_screen.workspace.chats
        await driver.press("ctrl+n", "f12")
        await driver.until_seen("↑ ^E Enter too · ← → moves it · T renames")
        await driver.press("r", "escape")  # no longer any key of this list
        await driver.press("ctrl+e", "t")
        await driver.until_seen("Title of this chat")
        assert driver.chat is chats[0]
        await driver.press("ctrl+x")
        await driver.press("f12")
        await driver.until_seen("T renames")
        await driver.press("f12")
        await driver.until(lambda: driver.app.screen is driver.app.main_screen)
        await driver.say("Waiting for the model")
        await driver.press("ctrl+w")
        await driver.until_seen("still answering. Close it?")
        await driver.press("y")
        assert len(chats) == 2
        await driver.press("j")
        await driver.until(lambda: len(chats) == 1)
        await driver.press("f9")
        await driver.until_seen("↑ ^E Enter opens one.")
        await driver.press("ctrl+x")
        await driver.until(lambda: driver.app.screen is driver.app.main_screen)
        assert "leave all as it is" in help_text(driver.app.actions).plain


async def test_home_and_end_in_the_list_of_tabs(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.press("ctrl+n", "ctrl+n", "ctrl+n")
        chats = list(driver.app.main_screen.workspace.chats)
        await driver.press("ctrl+g", "home", "enter")
        await driver.until(lambda: driver.chat is chats[0])
        await driver.press("ctrl+g", "end", "enter")
        await driver.until(lambda: driver.chat is chats[-1])


def test_the_example_names_every_key() -> None:
    text = example((action.id, action.keys, action.help) for action in ACTIONS if action.keys)
    for action in ACTIONS:
        assert (f"# {action.id} = " in text.partition("[keys]")[2]) == bool(action.keys)


def test_no_default_key_hides_one_of_the_prompt_but_on_purpose() -> None:
    editing = {
        key: binding.action
        for binding in TextArea.BINDINGS
        if isinstance(binding, Binding)
        for key in binding.key.split(",")
    }
    placed = [action for action in ACTIONS if action.place in ("screen", "app")]
    taken = {key for action in placed for key in key_names.split(action.keys)}
    # ^Z suspends, as in any terminal program; ^_ undoes.
    on_purpose = {"ctrl+w", "ctrl+f", "ctrl+c", "ctrl+z", "pageup", "pagedown", "f6", "f7"}
    assert taken & set(editing) <= on_purpose


def test_default_keys_arrive_from_plain_terminals() -> None:
    """Most terminals send Escape and the letter for Alt, and Textual takes some of these for other keys."""
    keys = {key for action in ACTIONS for key in key_names.split(action.keys)}
    assert not keys & {"alt+b", "alt+f", "alt+enter", "alt+tab", "alt+backspace", "ctrl+i", "ctrl+m"}


@pytest.mark.parametrize("width", [0, 8, 20, 40, 78, 98, 118, 300])
def test_the_key_bar_fits_and_shows_the_way_to_all_else_first(width: int) -> None:
    shown = fitting_keys(ACTIONS, width)
    assert len("   ".join(f"{action.key_label} {action.footer}" for action in shown)) <= width
    ids = [action.id for action in shown]
    assert ids == [action.id for action in ACTIONS if action.id in ids]
    assert {"help", "command_palette"} <= set(ids) or width < 30
    assert "new_chat" in ids or width < 40


async def test_keys_typed_ahead_close_a_dialog_once(tiny_llama: Path) -> None:
    """Those after the one that closes it come to it as well; the screen below must stay."""
    async with started(tiny_llama) as driver:
        main = driver.app.main_screen
        for opens, keys in (
            ("ctrl+g", ("1", "enter", "escape")),
            ("f1", ("f1", "f1", "escape")),
            ("f8", ("enter", "enter", "escape")),
            ("f9", ("escape", "escape", "escape")),
            ("f7", ("escape", "escape", "ctrl+s")),
            ("/delete", ("n", "y", "escape")),
        ):
            await (driver.say(opens) if opens.startswith("/") else driver.press(opens))
            await driver.until(lambda: driver.app.screen is not main)
            await driver.press(*keys)
            await driver.until(lambda: driver.app.screen is main)
            await driver.settle()
            assert driver.app.is_running, opens
            assert len(main.workspace.chats) == 1, opens
