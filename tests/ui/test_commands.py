"""Keys, slash commands, the palette, pastes and the panel: what a person at the keyboard can do."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.cells import cell_len
from textual import events

from nanochat.ui.actions import ACTIONS
from nanochat.ui.app import NanochatApp
from nanochat.ui.dialogs import Confirm, Help, help_text
from nanochat.ui.keys import split
from nanochat.ui.main_screen import MainScreen
from nanochat.ui.message import AnswerMessage, UserMessage
from nanochat.ui.prompt import FOLD_CHARACTERS, Prompt
from tests.ui.driver import ENDLESS, LONG, plain, started


def test_every_action_has_its_method_and_its_line_in_the_help() -> None:
    shown = " ".join(help_text(width=400).plain.split())
    owners = {"app": NanochatApp, "prompt": Prompt, "screen": MainScreen}
    for action in ACTIONS:
        if (owner := owners.get(action.place)) is not None:  # keys of dialogs are tried in test_keys.py
            assert callable(getattr(owner, f"action_{(action.call or action.id).split('(')[0]}"))
        assert action.help in shown


@pytest.mark.parametrize("width", [30, 56, 72, 100, 200])
def test_the_help_keeps_to_its_width_and_loses_no_word(width: int) -> None:
    shown = help_text(width=width).plain
    assert max(map(cell_len, shown.split("\n"))) <= max(width, 56)
    assert sorted(shown.split()) == sorted(help_text(width=400).plain.split())


def test_no_key_and_no_command_is_taken_twice() -> None:
    for places in (("app", "screen", "prompt"), ("app", "dialog", "list")):
        keys = [key for action in ACTIONS if action.place in places for key in split(action.keys)]
        assert len(keys) == len(set(keys))
    names = [action.slash for action in ACTIONS if action.slash]
    assert len(names) == len(set(names))


async def test_lines_are_broken_by_ctrl_j_and_shift_enter(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.press("a", "ctrl+j", "b", "shift+enter", "c")
        assert driver.prompt.text == "a\nb\nc"
        await driver.press("enter")
        await driver.until(lambda: driver.chat.path)
        assert driver.chat.path[0].text == "a\nb\nc"


async def test_keys_typed_fast_take_effect_in_their_order(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.press(
            *"teh", "backspace", "backspace", *"he", "left", "left", *"X", "end", *"!", "home", "delete"
        )
        assert driver.prompt.text == "Xhe!"


async def test_blank_text_is_not_sent(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.say("  \n ")
        assert driver.chat.path == []


async def test_an_unknown_command_says_so_and_is_not_sent(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.say("/nosuch thing")
        await driver.until_told("There is no command /nosuch")
        assert driver.chat.path == []
        assert driver.prompt.text == "/nosuch thing"


@pytest.mark.parametrize(
    ("written", "sent"),
    [("//new is a command", "/new is a command"), ("/usr/bin is a folder", "/usr/bin is a folder")],
)
async def test_text_that_only_looks_like_a_command_is_sent(tiny_llama: Path, written: str, sent: str) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.say(written)
        await driver.until(lambda: driver.chat.path)
        assert driver.chat.path[0].text == sent


async def test_a_command_with_text_it_does_not_take_is_refused(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.say("/new please")
        await driver.until_told("/new takes nothing after it")
        assert len(driver.app.main_screen.workspace.chats) == 1


async def test_commands_are_hinted_while_they_are_written(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.press("/", "f")
        assert "/fork" in str(driver.prompt.border_subtitle)
        await driver.press("x")
        assert "no such command" in str(driver.prompt.border_subtitle)
        await driver.press("backspace", "backspace", *"set")
        await driver.until_seen("/set NAME VALUE ·")


async def test_what_is_selected_with_the_mouse_is_copied(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        await driver.ask("Some words of mine")
        message = driver.pane.query_one(UserMessage)
        await driver.pilot.mouse_down(message, offset=(2, 1))
        await driver.pilot.hover(message, offset=(12, 1))
        await driver.pilot.mouse_up(message, offset=(12, 1))
        await driver.press("ctrl+c")
        await driver.until(lambda: "Some words" in driver.app.clipboard)
        assert driver.app.is_running


async def test_tabs_open_close_and_are_reached_by_keys_and_mouse(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        workspace = driver.app.main_screen.workspace
        await driver.say("/new")
        await driver.press("ctrl+n")
        assert [workspace.number(chat) for chat in workspace.chats] == [1, 2, 3]
        reached = []
        for key in ("f4", "f4", "f3", "alt+2", "alt+9", "ctrl+pageup", "ctrl+pagedown"):
            await driver.press(key)
            reached.append(workspace.number(driver.chat))
        assert reached == [1, 2, 1, 2, 2, 1, 2]
        await driver.pilot.click("Tab", offset=(2, 0))
        assert workspace.number(driver.chat) == 1
        await driver.pilot.click("NewTab")
        await driver.settle()
        assert len(workspace.chats) == 4
        await driver.say("/close")
        await driver.until(lambda: len(workspace.chats) == 3)
        assert driver.prompt.has_focus


async def test_keys_typed_right_after_opening_a_tab_go_to_it(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.press("ctrl+n", *"fast", "enter", "ctrl+n", *"er")
        await driver.until(lambda: driver.prompt.text == "er")
        chats = driver.app.main_screen.workspace.chats
        assert [chat.path[0].text for chat in chats if chat.path] == ["fast"]
        assert chats[1].path


async def test_the_key_bar_can_be_clicked(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.pilot.click("KeyBar", offset=(3, 0))
        await driver.until(lambda: len(driver.app.main_screen.workspace.chats) == 2)


async def test_a_draft_stays_with_its_chat(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.write("half a thou")
        await driver.press("ctrl+n")
        assert driver.prompt.text == ""
        await driver.press("f3")
        assert driver.prompt.text == "half a thou"


async def test_settings_of_a_chat(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        await driver.say("/set max_tokens 3")
        await driver.ask("Hello")
        answer = driver.chat.last_answer
        assert answer is not None
        assert answer.output is not None
        assert len(answer.output.token_ids) == 3
        await driver.say("/set top_p 7")
        assert "top_p must be a number" in driver.notices()[-1]
        await driver.say("/set nonsense 1")
        assert "no setting" in driver.notices()[-1]
        await driver.say("/set max_tokens default")
        assert "max_tokens 12 ·" in driver.notices()[-1]
        await driver.press("ctrl+n")
        assert driver.chat.sampling == {}


async def test_the_system_prompt_is_sent_first(tiny_llama: Path) -> None:
    async with started(tiny_llama, system="Be brief.") as driver:
        await driver.ask("Hello")
        with_system = driver.chat.path[-1].output
        assert with_system is not None
        await driver.say("/system")
        assert "Be brief." in driver.notices()[-1]
        await driver.say("/system A much longer system prompt than before.")
        await driver.press("ctrl+r")
        await driver.until_idle()
        again = driver.chat.path[-1].output
        assert again is not None
        assert again.metrics.prompt_tokens > with_system.metrics.prompt_tokens


async def test_clearing_asks_first(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        await driver.ask("Hello")
        await driver.say("/clear")
        assert isinstance(driver.app.screen, Confirm)
        await driver.press("y")
        await driver.until(lambda: not driver.chat.path)
        await driver.settle()
        assert not driver.pane.query(AnswerMessage)


async def test_help_and_the_palette_open_and_close(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.press("f1")
        assert isinstance(driver.app.screen, Help)
        await driver.press("ctrl+n")
        assert len(driver.app.main_screen.workspace.chats) == 1
        await driver.press("escape")
        await driver.press("ctrl+p")
        await driver.press(*"fork")
        await driver.until_seen("a tab with the same history")
        await driver.press("enter")
        await driver.until(lambda: len(driver.app.main_screen.workspace.chats) == 2)


async def test_a_large_paste_is_folded_and_sent_whole(tiny_llama: Path) -> None:
    pasted = "line of text\n" * 100_000
    async with started(tiny_llama, hold=True) as driver:
        await driver.write("Look: ")
        driver.prompt.post_message(events.Paste(pasted))
        await driver.settle()
        assert len(driver.prompt.text) < 100
        assert "100,001 lines" in driver.prompt.text
        await driver.press("backspace")
        assert driver.prompt.text == "Look: "
        driver.prompt.post_message(events.Paste(pasted))
        await driver.press("enter")
        await driver.until(lambda: driver.chat.path)
        assert driver.chat.path[0].text == "Look: " + pasted.strip()
        (message,) = driver.pane.query(UserMessage)
        assert "more characters" in plain(message)


async def test_folded_pastes_go_as_one_and_no_two_are_mixed_up(tiny_llama: Path) -> None:
    first, second, third = ("".join(f"{letter} {n}\n" for n in range(30)) for letter in "abc")
    async with started(tiny_llama, hold=True) as driver:
        for text in (first, second):
            driver.prompt.post_message(events.Paste(text))
            await driver.settle()
        for place, key in ((0, "delete"), (5, "delete"), (5, "backspace")):
            driver.prompt.move_cursor((0, place))
            await driver.press(key)
            assert driver.prompt.full_text == second
            await driver.press("ctrl+underscore")
            assert driver.prompt.full_text == first + second
        driver.prompt.move_cursor((0, 5))
        await driver.press("x", "backspace", "backspace")
        assert driver.prompt.full_text == second
        driver.prompt.move_cursor(driver.prompt.document.end)
        driver.prompt.post_message(events.Paste(third))
        await driver.settle()
        assert driver.prompt.full_text == second + third


async def test_a_large_text_given_back_is_folded_too(tiny_llama: Path) -> None:
    text = "line of text\n" * 5_000
    async with started(tiny_llama, hold=True) as driver:
        await driver.write("and more")
        driver.pane.restore_prompt(text)
        assert len(driver.prompt.text) < 100
        assert driver.prompt.full_text == f"{text}\nand more"
        driver.pane.withdraw_draft(f"{text}\nand more")
        assert driver.prompt.text == ""


async def test_a_paste_is_one_message_without_escape_sequences(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        driver.prompt.post_message(events.Paste("one\r\ntwo\x1b[2J\rthree"))
        await driver.settle()
        assert driver.prompt.text == "one\ntwo␛[2J\nthree"
        assert len("x" * FOLD_CHARACTERS) == FOLD_CHARACTERS
        await driver.press("enter")
        await driver.until(lambda: len(driver.chat.path) == 2)


async def test_the_panel_fits_the_screen_and_can_be_cycled(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        await driver.until_seen("KV blocks")
        await driver.press("f2")
        await driver.until_seen("■ = ")
        assert driver.app.query_one("StatsPanel").size.width < 30
        await driver.say("/stats")
        assert not driver.app.query_one("StatsPanel").display
        await driver.press("f2")
        await driver.pilot.resize_terminal(80, 24)
        await driver.until(lambda: driver.app.query_one("StatsLine").display)
        await driver.until_seen("KV ")
        await driver.pilot.resize_terminal(200, 60)
        await driver.until_seen("Context of this chat")


async def test_a_screenshot_is_saved_and_its_place_named(tiny_llama: Path, tmp_path: Path) -> None:
    async with started(tiny_llama, hold=True, screenshots=tmp_path / "new") as driver:
        await driver.write("in the picture")
        await driver.press("f5")
        (picture,) = (tmp_path / "new").iterdir()
        assert picture.suffix == ".svg"
        root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
        assert "picture" in "".join(root.itertext())
        await driver.until_told("Screenshot saved")


async def test_a_screenshot_of_the_panel_alone(tiny_llama: Path, tmp_path: Path) -> None:
    async with started(tiny_llama, screenshots=tmp_path) as driver:
        await driver.until_seen("KV blocks")
        place = driver.app.query_one("StatsPanel").region
        rows = driver.screen_text().split("\n")[place.y : place.bottom]
        ends = [
            row[place.x + 1 : place.right].split()[-1]
            for row in rows
            if row[place.x + 1 : place.right].strip()
        ]
        await driver.say("/screenshot panel")
        (picture,) = tmp_path.iterdir()
        shown = "".join(ElementTree.fromstring(picture.read_text(encoding="utf-8")).itertext())
        assert all(word in shown for word in ends)  # nothing is cut off
        assert "Prefix" in shown
        assert "Ask" not in shown
        await driver.say("/screenshot everything")
        await driver.until_told("/screenshot panel")
        await driver.press("f2", "f2")
        await driver.say("/screenshot panel")
        await driver.until_told("isn't shown")
        assert len(list(tmp_path.iterdir())) == 1


async def test_a_screenshot_that_cannot_be_saved_says_why(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    async with started(tiny_llama, hold=True, screenshots=tmp_path / "file") as driver:
        await driver.press("f5")
        await driver.until_told("can't be saved")


async def test_ctrl_c_stops_and_quits_only_when_pressed_twice(long_llama: Path) -> None:
    async with started(long_llama, sampling=ENDLESS, **LONG) as driver:
        await driver.say("Go")
        await driver.until(lambda: driver.chat.live and driver.chat.live.answer.text)
        await driver.press("ctrl+c")
        await driver.until_idle()
        assert driver.app.is_running
        await driver.press("ctrl+c")
        assert driver.app.is_running
        await driver.press("ctrl+c", "ctrl+c")
        await driver.until(lambda: not driver.app.is_running)
        assert driver.app.return_code == 0


@pytest.mark.slow
async def test_quitting_while_many_chats_answer(long_llama: Path) -> None:
    async with started(long_llama, sampling=ENDLESS, **LONG) as driver:
        for number in range(8):
            if number:
                await driver.press("ctrl+n")
            await driver.say("Go")
        await driver.until(lambda: len(driver.app.main_screen.workspace.busy) == 8)
        await driver.press("ctrl+q")
        await driver.until(lambda: not driver.app.is_running)
        assert driver.app.return_code == 0


async def test_what_is_typed_right_after_enter_is_a_text_of_its_own(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        names = {"\r": "enter", " ": "space", "/": "slash"}
        for character in "/rename A\rhello\rnext":
            driver.app.post_message(events.Key(names.get(character, character), character))
        await driver.until(lambda: driver.chat.path)
        await driver.until_idle()
        assert driver.chat.title == "A"
        assert [message.text for message in driver.chat.path if message.role == "user"] == ["hello"]
        assert driver.prompt.text == "next"


def test_every_command_of_the_specification_is_there() -> None:
    wanted = "help new close fork again edit system set broadcast compare stats export search model screenshot clear quit"
    assert set(wanted.split()) <= {action.slash for action in ACTIONS}


async def test_the_palette_has_every_action_that_it_should(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.press("ctrl+p")
        await driver.until(lambda: driver.app.screen.query("CommandList"))
        listed = driver.app.screen.query_one("CommandList")
        wanted = [action for action in driver.app.actions if action.in_palette]
        await driver.until(lambda: listed.option_count == len(wanted))


async def test_a_command_in_capitals_is_a_command(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.say("/NEW")
        await driver.until(lambda: len(driver.app.main_screen.workspace.chats) == 2)


@pytest.mark.parametrize("text", ["/new2", "/no-such", "/Q"])
async def test_anything_like_a_command_is_never_sent(tiny_llama: Path, text: str) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.say(text)
        await driver.until_told("There is no command")
        assert driver.chat.path == []
