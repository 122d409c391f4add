"""Keys typed faster than tabs open and close: none meets a chat that has no page, none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from textual.widgets import OptionList

from nanochat.history import SearchHit
from nanochat.ui.chat import Chat
from nanochat.ui.dialogs import Confirm
from nanochat.ui.pane_screen import PaneScreen
from nanochat.ui.search_screen import Answered, Found, SearchScreen
from tests.ui.driver import ENDLESS, LONG, Driver, started

EVERY_KEY = ("f3", "f4", "f6", "alt+2", "ctrl+pagedown", "ctrl+e", "ctrl+w")
"""What acts on the chat in view, or brings another one there."""


def press_while_pages_are_made(driver: Driver, monkeypatch: pytest.MonkeyPatch, keys: Sequence[str]) -> None:
    """Have keys arrive whenever a page is about to be made, and be handled before it is there."""
    add_panes = PaneScreen._add_panes

    async def add_panes_late(screen: PaneScreen, chats: Sequence[Chat]) -> None:
        adding = asyncio.create_task(add_panes(screen, chats))
        for key in keys:
            driver.app.simulate_key(key)
        await adding

    monkeypatch.setattr(PaneScreen, "_add_panes", add_panes_late)


async def test_keys_while_a_tab_opens(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(tiny_llama, hold=True) as driver:
        main = driver.app.main_screen
        await driver.press("ctrl+n")
        press_while_pages_are_made(driver, monkeypatch, EVERY_KEY)
        for command in ("/new", "/fork", "/compare temperature=0 | temperature=1"):
            await driver.say(command)
            await driver.settle()
        await driver.pilot.click(".new-tab")
        await driver.settle()
        assert all(main.is_open(chat) for chat in main.workspace.chats)
        assert main.pane(driver.chat).display


async def test_keys_before_the_screen_is_there(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_mount = PaneScreen.on_mount

    async def mount_late(screen: PaneScreen) -> None:
        for key in EVERY_KEY:
            screen.app.simulate_key(key)
        await asyncio.sleep(0.2)  # long enough for them to be handled; if it isn't, nothing is tested
        on_mount(screen)

    monkeypatch.setattr(PaneScreen, "on_mount", mount_late)
    async with started(tiny_llama, hold=True) as driver:
        await driver.say("/rename goes on")
        assert driver.chat.title == "goes on"


@pytest.mark.parametrize("presses", [2, 3, 5])
async def test_every_press_closes_a_tab(tiny_llama: Path, presses: int) -> None:
    async with started(tiny_llama, hold=True) as driver:
        main = driver.app.main_screen
        for _ in range(3):
            await driver.press("ctrl+n")
        for _ in range(presses):
            driver.app.simulate_key("ctrl+w")
        await driver.until(lambda: len(main.workspace.chats) == max(1, 4 - presses))
        assert len(main.query("Tab")) == len(main.workspace.chats)
        assert main.pane(driver.chat).prompt.has_focus


async def test_the_only_tab_is_closed_twice_at_once(tiny_llama: Path) -> None:
    """By ways that don't wait for each other, as a command and a key do."""
    async with started(tiny_llama, hold=True) as driver:
        main, first = driver.app.main_screen, driver.chat
        await asyncio.gather(main._close(first), main._close(first))
        assert main.workspace.chats == [driver.chat]
        assert driver.chat is not first
        await driver.say("/rename goes on")
        assert driver.chat.title == "goes on"


@pytest.mark.parametrize("action", ["clear_chat", "delete_chat"])
async def test_an_answer_that_began_while_the_dialog_asked(
    long_llama: Path, tmp_path: Path, action: str
) -> None:
    async with started(long_llama, sampling=ENDLESS, history=tmp_path / "h.db", **LONG) as driver:
        main, chat = driver.app.main_screen, driver.chat
        await driver.say("first")
        await driver.until(lambda: chat.live is not None and chat.live.answer.text)
        await driver.press("escape")
        await driver.until(lambda: not chat.is_busy)
        getattr(main, f"action_{action}")()
        await driver.until(lambda: isinstance(driver.app.screen, Confirm))
        assert main.ask(chat, "second")
        await driver.press("y")
        await driver.until_told("Stop the answer first")
        assert chat in main.workspace.chats
        assert [message.text for message in chat.path if message.role == "user"] == ["first", "second"]
        main.action_stop()
        await driver.until(lambda: not chat.is_busy)


async def test_the_first_message_is_not_lost_as_the_history_opens(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "h.db"
    async with started(tiny_llama, history=file) as driver:
        await driver.ask("before")
    async with started(tiny_llama, history=file, hold=True, wait_for_history=False) as driver:
        main, chat = driver.app.main_screen, driver.chat
        driver.prompt.on_its_way.append("sent just now")  # as between Enter and its message
        await driver.until(lambda: len(main.workspace.chats) > 1)
        assert chat in main.workspace.chats


async def test_a_choice_stands_though_other_results_come(tiny_llama: Path) -> None:
    def hit(number: int) -> SearchHit:
        return SearchHit(
            chat_id=number,
            chat_title=f"chat {number}",
            message_id=None,
            role=None,
            created_at=0.0,
            snippet="",
            spans=(),
        )

    async with started(tiny_llama, hold=True) as driver:
        chosen: list[Found | None] = []
        screen = SearchScreen(lambda *_: None)
        driver.app.push_screen(screen, chosen.append)
        await driver.until(lambda: screen.is_mounted)
        screen.on_answered(Answered(0, [hit(1), hit(2)]))
        await driver.settle()
        options = screen.query_one(OptionList)
        options.highlighted = 1
        options.action_select()  # a click: its message is on its way
        screen.on_answered(Answered(0, [hit(3)]))
        await driver.until(lambda: chosen)
        assert chosen == [Found(2, None)]
