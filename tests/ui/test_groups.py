"""Broadcasts to all or marked tabs, and two settings of a chat side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanochat.settings import Preset
from nanochat.ui.chat import Chat
from nanochat.ui.chat_pane import ChatPane
from nanochat.ui.group_actions import told_apart
from nanochat.ui.message import AnswerMessage, BranchLabel, UserMessage
from tests.ui.driver import ENDLESS, LONG, Driver, plain, started


def questions(chat: Chat) -> list[str]:
    return [message.text for message in chat.path if message.role == "user"]


def live_line(pane: ChatPane) -> str:
    answers = list(pane.query(AnswerMessage))
    return plain(answers[-1].query_one(".answer-footer")) if answers else ""


def chats(driver: Driver) -> list[Chat]:
    return driver.app.main_screen.workspace.chats


async def test_a_broadcast_goes_to_all_tabs(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        await driver.write("a draft")
        await driver.press("ctrl+n", "ctrl+n")
        await driver.say("/broadcast Hello all")
        await driver.until_idle()
        assert [questions(chat) for chat in chats(driver)] == [["Hello all"]] * 3
        assert all(chat.last_answer and chat.last_answer.output for chat in chats(driver))
        await driver.until_told("Sent to 3 tabs")
        await driver.press("alt+1")
        assert driver.prompt.text == "a draft"


async def test_a_broadcast_goes_to_marked_tabs_only(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        await driver.say("/mark")
        await driver.until_seen("✓")
        await driver.press("ctrl+n", "ctrl+n", "alt+m")
        await driver.say("/broadcast Hello")
        await driver.until_idle()
        assert [questions(chat) for chat in chats(driver)] == [["Hello"], [], ["Hello"]]
        await driver.press("ctrl+w")
        await driver.until(lambda: len(chats(driver)) == 2)
        assert driver.app.main_screen.workspace.recipients == [chats(driver)[0]]
        await driver.press("alt+1", "alt+m")
        assert driver.app.main_screen.workspace.recipients == chats(driver)


async def test_a_broadcast_leaves_busy_tabs_alone_and_says_so(long_llama: Path) -> None:
    async with started(long_llama, sampling=ENDLESS, **LONG) as driver:
        await driver.say("First")
        await driver.press("ctrl+n")
        await driver.say("/broadcast Second")
        await driver.until_told("Sent to 1 tab. 1 tab still answering got nothing.")
        assert [questions(chat) for chat in chats(driver)] == [["First"], ["Second"]]


async def test_a_broadcast_without_a_text_says_how(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.say("/broadcast")
        await driver.until_told("all 1 tabs")
        assert driver.chat.path == []


async def test_two_settings_are_compared_side_by_side(tiny_llama: Path) -> None:
    presets = {"brief": Preset("Be brief.", {"max_tokens": 3})}
    async with started(tiny_llama, presets=presets) as driver:
        await driver.ask("First")
        await driver.ask("Second")
        await driver.say("/compare brief | max_tokens=5 temperature=0")
        await driver.until(lambda: len(chats(driver)) == 3)
        await driver.until_idle()
        original, left, right = chats(driver)
        assert driver.chat is left
        assert left.title == "brief · First"
        assert [questions(chat) for chat in (original, left, right)] == [["First", "Second"]] * 3
        lengths = [len(chat.path[-1].output.token_ids) for chat in (left, right)]
        assert lengths == [3, 5]
        assert (left.system, right.system) == ("Be brief.", None)
        assert right.path[-1].output.metrics.cached_tokens > 0
        screen = driver.app.main_screen
        panes = [screen.pane(chat) for chat in (original, left, right)]
        assert [pane.display for pane in panes] == [False, True, True]
        await driver.until(lambda: panes[1].region.right == panes[2].region.x > 0)
        assert abs(panes[1].size.width - panes[2].size.width) <= 1
        assert all(len(pane.query(AnswerMessage)) == 2 for pane in panes[1:])
        assert not right.is_unread

        await driver.ask("Third")
        assert questions(left)[-1] == questions(right)[-1] == "Third"
        assert questions(original)[-1] == "Second"

        screen.set_focus(panes[2].prompt)
        await driver.until(lambda: driver.chat is right)
        assert [pane.display for pane in panes] == [False, True, True]
        await driver.press("alt+1")
        assert [pane.display for pane in panes] == [True, False, False]
        await driver.press("alt+3")
        assert [pane.display for pane in panes] == [False, True, True]
        await driver.say("/compare")
        assert [pane.display for pane in panes] == [False, False, True]
        await driver.ask("Fourth")
        assert questions(left)[-1] == "Third"


async def test_both_sides_say_how_their_answers_get_on(long_llama: Path) -> None:
    async with started(long_llama, sampling=ENDLESS, **LONG) as driver:
        await driver.say("First")
        await driver.until(lambda: driver.chat.live and driver.chat.live.answer.num_tokens)
        await driver.press("escape")
        await driver.until_idle()
        await driver.say("/compare top_k=1 | top_k=2")
        await driver.until(lambda: len(chats(driver)) == 3)
        panes = [driver.app.main_screen.pane(chat) for chat in chats(driver)[1:]]
        for pane in panes:
            await driver.until(lambda pane=pane: "tokens" in live_line(pane))


async def test_closing_one_side_ends_the_comparison(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        await driver.say("/compare top_k=1 | top_k=2")
        await driver.until(lambda: len(chats(driver)) == 3)
        _, left, right = chats(driver)
        await driver.press("ctrl+w")
        await driver.until(lambda: left not in chats(driver))
        await driver.until(lambda: driver.app.main_screen.pane(driver.chat).display)
        assert driver.app.main_screen.workspace.partner(right) is None


async def test_what_cannot_be_compared_is_told(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        for argument, told in (
            ("nosuch | top_k=1", '"nosuch" is no preset'),
            ("top_k=1", "two settings or presets"),
            ("top_k=1 |", "two settings or presets"),
            ("top_k=1 | top_p=7", "top_p must be"),
            ("top_k=1 | hotness=7", 'no setting "hotness"'),
        ):
            await driver.say(f"/compare {argument}")
            assert told in driver.notices()[-1]
        assert len(chats(driver)) == 1
        await driver.say("/compare")
        await driver.until_told("Write two settings")


async def test_what_cannot_work_is_not_compared_while_the_model_loads(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.say("/compare temperature=-1 | temperature=0")
        await driver.until(lambda: driver.notices() and "temperature" in driver.notices()[0])
        assert len(chats(driver)) == 1


async def test_a_message_from_elsewhere_leaves_an_edit_as_it_is(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        await driver.ask("First")
        await driver.write("draft")
        await driver.press("f6")
        await driver.write(" edited")
        await driver.press("ctrl+n")
        await driver.say("/broadcast Hello")
        await driver.until_idle()
        await driver.press("alt+1")
        assert questions(driver.chat) == ["First", "Hello"]
        assert driver.prompt.text == "First edited"
        await driver.press("enter")
        await driver.until_idle()
        assert questions(driver.chat) == ["First edited"]
        assert driver.chat.path[0].branch == (2, 2)
        assert driver.prompt.text == "draft"


async def test_clicks_act_on_the_side_where_they_fall(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        await driver.ask("First")
        await driver.say("/compare top_k=1 | top_k=2")
        await driver.until(lambda: len(chats(driver)) == 3)
        await driver.until_idle()
        _, left, right = chats(driver)
        await driver.press("ctrl+r")
        await driver.until_idle()
        driver.app.main_screen.set_focus(driver.app.main_screen.pane(right).prompt)
        await driver.until(lambda: driver.chat is right)
        widget = driver.app.main_screen.pane(left).query(AnswerMessage).last()
        widget.query_one(BranchLabel).action_step(-1)
        await driver.until(lambda: left.path[-1].branch == (1, 2))
        shown = driver.app.main_screen.pane(left).query(AnswerMessage).last()
        assert shown.message is left.path[-1]
        driver.app.main_screen.pane(left).query_one(UserMessage).action_edit()
        await driver.until(lambda: driver.chat is left)
        assert driver.prompt.text == "First"


@pytest.mark.parametrize(
    ("one", "other", "labels"),
    [
        ("top_k=1", "top_k=2", ("top_k=1", "top_k=2")),
        (
            "max_tokens=200 top_p=0.9 temperature=0",
            "max_tokens=200 top_p=0.9 temperature=1.2",
            ("temperature=0", "temperature=1.2"),
        ),
        ("temperature=0", "temperature=0 top_p=0.9", ("temperature=0", "…mperature=0 top_p=0.9")),
        (
            "my-long-preset-for-work-brief",
            "my-long-preset-for-work-verbose",
            ("…preset-for-work-brief", "…eset-for-work-verbose"),
        ),
        ("same", "same", ("same", "same")),
    ],
)
def test_what_differs_between_two_settings_is_seen(one: str, other: str, labels: tuple[str, str]) -> None:
    found = told_apart(one, other)
    assert all(len(label) <= 22 for label in found)
    assert found == labels


def test_labels_are_short_and_two_settings_of_some_length_never_look_alike() -> None:
    for shared in range(40):
        for length in range(1, 40):
            one, other = "x" * shared + "a" * length, "x" * shared + "b" * length
            labels = told_apart(one, other)
            assert labels[0] != labels[1]
            assert max(map(len, labels)) <= 22


async def test_compared_chats_say_above_which_they_are_however_long_their_settings(tiny_llama: Path) -> None:
    async with started(tiny_llama, size=(80, 24)) as driver:
        await driver.ask("First")
        shared = "max_tokens=200 top_p=0.9 repetition_penalty=1.1"
        await driver.say(f"/compare {shared} temperature=0 | {shared} temperature=1.5")
        await driver.until(lambda: len(chats(driver)) == 3)
        await driver.until_seen(" temperature=0 · First")
        await driver.until_seen(" temperature=1.5 · First")
        await driver.say("/compare")
        await driver.until(lambda: not any(label.display for label in driver.app.query(".pane-label")))
