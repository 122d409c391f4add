"""Tabs: names, order, and ways to reach one that work in every terminal."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from pathlib import Path

import pytest
import textual
from textual._xterm_parser import XTermParser

from nanochat.ui.line_input import TextInput
from nanochat.ui.tab_bar import EdgeMark, TabBar
from nanochat.ui.tab_picker import TabPicker, TitleDialog
from nanochat.ui.textual_private import let_alt_digits_through, let_keys_follow_escape
from tests.ui.driver import Driver, started


def keys_of(sequence: str) -> list[str]:
    """What Textual's parser makes of what a terminal sends."""
    parser = XTermParser(debug=False)
    events = list(parser.feed(sequence))
    time.sleep(0.15)  # longer than it waits for the rest of a sequence
    events += parser.tick()
    return [event.key for event in events]  # type: ignore[attr-defined]


def titles(driver: Driver) -> list[str]:
    return [chat.title for chat in driver.app.main_screen.workspace.chats]


async def with_tabs(driver: Driver, *names: str) -> None:
    for number, name in enumerate(names):
        if number:
            await driver.press("ctrl+n")
        await driver.say(f"/rename {name}")


@pytest.mark.parametrize("digit", range(10))
def test_alt_and_a_digit_is_a_key_and_no_character(digit: int) -> None:
    """Most terminals send Escape and the digit, which Textual takes for a character to write."""
    let_alt_digits_through()
    assert keys_of(f"\x1b{digit}") == [f"alt+{digit}"]


@pytest.mark.parametrize(
    ("sequence", "keys"),
    [
        ("\x1b\x12", ["escape", "ctrl+r"]),
        ("\x1b\x12\x1b\x12", ["escape", "ctrl+r"] * 2),
        ("\x1b\x15", ["escape", "ctrl+u"]),
        ("\x1b", ["escape"]),
        ("\x1b\t", ["shift+tab"]),
    ],
)
def test_escape_and_a_control_key_at_once_are_the_two(sequence: str, keys: list[str]) -> None:
    let_keys_follow_escape()
    assert keys_of(sequence) == keys


def test_the_private_table_is_where_this_version_has_it() -> None:
    assert textual.__version__.startswith("8."), "check nanochat/ui/textual_private.py against this version"


@pytest.mark.parametrize(
    ("sequence", "key"),
    [
        ("\x07", "ctrl+g"),
        ("\x1bOR", "f3"),
        ("\x1bOS", "f4"),
        ("\x1b[17~", "f6"),
        ("\x1b[19~", "f8"),
        ("\x1b[20~", "f9"),
        ("\x1b[5;3~", "alt+pageup"),
        ("\x1b[6;5~", "ctrl+pagedown"),
        ("\x1b[1;3D", "alt+left"),
    ],
)
def test_the_tabs_keys_come_through_as_xterm_sends_them(sequence: str, key: str) -> None:
    assert keys_of(sequence) == [key]


async def test_the_leader_key_and_a_digit_go_to_a_tab(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await with_tabs(driver, "one", "two", "three")
        for digit, title in (("1", "one"), ("3", "three"), ("2", "two")):
            driver.app.simulate_key("ctrl+g")
            driver.app.simulate_key(digit)  # at once: before the list is drawn
            await driver.until(lambda: not isinstance(driver.app.screen, TabPicker))
            assert driver.chat.title == title
            assert driver.prompt.text == ""
        await driver.press("ctrl+g", "9")
        assert isinstance(driver.app.screen, TabPicker)


async def test_the_picker_shows_all_tabs_moves_and_renames(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await with_tabs(driver, "one", "two", "three")
        await driver.press("ctrl+g")
        await driver.until_seen("▸  3 three")
        await driver.press("left", "left")
        await driver.until_seen("▸  1 three")
        await driver.press("down", "enter")
        assert titles(driver) == ["three", "one", "two"]
        assert driver.chat.title == "one"
        await driver.press("ctrl+g", "up", "r")
        await driver.until(lambda: isinstance(driver.app.screen, TitleDialog))
        await driver.press("end", *"!", "enter")
        assert titles(driver) == ["three!", "one", "two"]
        await driver.press("ctrl+g", "escape")
        assert driver.chat.title == "three!"
        assert driver.prompt.has_focus


async def test_commands_go_to_move_and_rename(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await with_tabs(driver, "one", "two", "three")
        await driver.say("/goto 1")
        assert driver.chat.title == "one"
        await driver.say("/move 3")
        assert titles(driver) == ["two", "three", "one"]
        await driver.press("alt+pageup")
        assert titles(driver) == ["two", "one", "three"]
        await driver.press("alt+pagedown", "alt+pagedown")
        assert titles(driver) == ["two", "three", "one"]
        for wrong in ("/goto 4", "/goto 0", "/move x"):
            await driver.say(wrong)
            await driver.until_told("from 1 to 3")
        shown = driver.screen_text().split("\n")[1]
        places = [shown.index(f"{number} {name}") for number, name in enumerate(titles(driver), 1)]
        assert all(first < second for first, second in itertools.pairwise(places))
        await driver.press("f8")
        await driver.until(lambda: isinstance(driver.app.screen, TitleDialog))
        await driver.press("home", *"My ", "enter")
        assert driver.chat.title == "My one"


async def test_names_and_order_are_back_on_the_next_start(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    async with started(tiny_llama, history=file) as driver:
        for number, name in enumerate(("one", "two", "three")):
            if number:
                await driver.press("ctrl+n")
            await driver.ask(name)
        await driver.say("/rename [b]Last[/b] \x1b[2J")
        await driver.say("/move 1")
        await driver.press("ctrl+g", "2")
        assert driver.chat.title == "one"
    async with started(tiny_llama, history=file) as driver:
        assert titles(driver) == ["[b]Last[/b] ␛[2J", "one", "two"]
        assert driver.chat.title == "one"
        await driver.until_seen("1 [b]Last[/b]")


async def test_the_tab_in_view_is_seen_whole_however_the_others_grow(tiny_llama: Path) -> None:
    async with started(tiny_llama, size=(60, 20)) as driver:
        for _ in range(4):
            await driver.press("ctrl+n")
        await driver.press("alt+1")
        await driver.say("/broadcast A long enough title for each")
        await driver.until_idle()
        for number, key in ((0, "alt+1"), (2, "alt+3"), (4, "alt+5")):
            await driver.press(key)
            tab = driver.app.query("Tab")[number]
            bar = driver.app.query_one("TabBar").region
            await driver.until(
                lambda tab=tab, bar=bar: bar.x <= tab.region.x and tab.region.right <= bar.right
            )


async def test_a_wish_to_see_an_older_tab_does_not_win(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True, size=(80, 24)) as driver:
        main = driver.app.main_screen
        for number in range(4):
            if number:
                await main.action_new_chat()
            main.ask(driver.chat, "A question that makes a long title")
        main.action_jump(1)
        await driver.pilot.pause(0.3)  # for a wish that came late
        bar = driver.app.query_one("TabBar").region
        await driver.until(lambda: driver.app.query("Tab").first().region.x == bar.x)


async def test_the_list_of_many_tabs_shows_the_chosen_one_and_the_keys(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True, size=(80, 24)) as driver:
        for _ in range(29):
            await driver.app.main_screen.action_new_chat()
        await driver.press("ctrl+g")
        await driver.until_seen("▸ 30 New chat")
        await driver.until_seen("R renames")
        await driver.press("down")
        await driver.until_seen("▸  1 New chat")
        await driver.press("up", "up", "enter")
        await driver.settle()
        assert driver.app.main_screen.workspace.number(driver.chat) == 29


async def test_the_active_tab_stays_in_view_when_the_terminal_shrinks(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        for _ in range(8):
            await driver.press("ctrl+n")
        bar = driver.app.main_screen.query_one(TabBar)
        await driver.pilot.resize_terminal(40, 20)
        await driver.until(lambda: bar.query_one(".-active").region.right <= bar.region.right == 40)


async def test_closed_tabs_and_dialogs_leave_nothing_behind(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        main, gone = driver.app.main_screen, []
        for _ in range(3):
            await driver.press("ctrl+n")
            await driver.ask("Hello")
            gone += [weakref.ref(driver.pane), weakref.ref(driver.prompt)]
            await driver.press("f7")
            await driver.until(lambda: driver.app.screen is not main)
            gone += [weakref.ref(driver.app.screen), weakref.ref(driver.app.screen.query_one(TextInput))]
            await driver.press("escape")
            await driver.until(lambda: driver.app.screen is main)
            await driver.press("ctrl+w")
            await driver.until(lambda: len(main.workspace.chats) == 1)
        await driver.settle()

        def left() -> list[object]:
            gc.collect()
            return [ref() for ref in gone if ref() is not None]

        await driver.until(lambda: not left())


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_hidden_tabs_are_counted_at_the_ends_of_the_row(
    tiny_llama: Path, size: tuple[int, int]
) -> None:
    async with started(tiny_llama, hold=True, size=size) as driver:
        main = driver.app.main_screen
        height = driver.pane.region.height
        for _ in range(14):
            await main.action_new_chat()

        def hidden() -> tuple[int, int]:
            left, right = driver.app.query_one(TabBar).hidden()
            return len(left), len(right)

        def row() -> str:
            return (driver.screen_text().splitlines() or ["", ""])[1]

        main.action_jump(15)
        await driver.until(lambda: hidden()[0] and f"‹{hidden()[0]}" in row() and "›" not in row())
        assert "New chat" in row()
        main.action_jump(7)
        await driver.until(
            lambda: all(hidden()) and f"‹{hidden()[0]}" in row() and f"{hidden()[1]}›" in row()
        )
        main.action_jump(1)
        await driver.until(lambda: hidden()[1] and f"{hidden()[1]}›" in row() and "‹" not in row())
        assert driver.pane.region.height == height
        before = hidden()[1]
        await driver.pilot.click(driver.app.query(EdgeMark).last())
        await driver.until(lambda: hidden()[1] < before and "‹" in row())
        await driver.pilot.resize_terminal(300, 24)
        await driver.until(lambda: "‹" not in row() and "›" not in row())
