"""Editing a message, answering again, and walking the branches: nothing is lost, and all of it is saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanochat.history import History
from nanochat.sanitize import sanitize
from nanochat.ui.chat import Chat, Message
from nanochat.ui.message import AnswerMessage, UserMessage
from tests.ui.driver import ENDLESS, LONG, SHORT, Driver, plain, started
from tests.ui.test_chat import answered, texts


def questions(driver: Driver) -> list[str]:
    return [message.text for message in driver.chat.path if message.role == "user"]


def test_an_edited_message_is_a_branch_beside_the_old_one() -> None:
    chat = answered(Chat(), ("q1", "a1"), ("q2", "a2"))
    chat.editing = chat.path[0]
    answered(chat, ("q1 edited", "b1"))
    assert texts(chat) == ["q1 edited", "b1"]
    assert chat.path[0].branch == (2, 2)
    assert chat.editing is None
    assert chat.choose_branch(chat.path[0], -1)
    assert texts(chat) == ["q1", "a1", "q2", "a2"]
    assert len(list(chat.messages())) == 6


def test_an_edit_goes_to_its_own_branch_whichever_is_looked_at_meanwhile() -> None:
    chat = answered(Chat(), ("q1", "a1"), ("q2", "a2"))
    chat.editing = chat.path[0]
    answered(chat, ("other", "b1"))
    chat.choose_branch(chat.path[0], -1)
    chat.editing = chat.path[2]
    chat.choose_branch(chat.path[0], 1)
    answered(chat, ("q2 edited", "a3"))
    assert texts(chat) == ["q1", "a1", "q2 edited", "a3"]


def test_a_refused_edit_leaves_the_old_branch_and_can_be_tried_again() -> None:
    chat = answered(Chat(), ("q1", "a1"))
    chat.editing = old = chat.path[0]
    chat.ask("too long")
    assert chat.withdraw()[0] == "too long"
    assert texts(chat) == ["q1", "a1"]
    assert chat.editing is old


def test_choosing_a_message_leads_the_path_through_it() -> None:
    chat = answered(Chat(), ("q1", "a1"), ("q2", "a2"))
    deep = chat.path[3]
    chat.editing = chat.path[0]
    answered(chat, ("other", "b"))
    chat.choose(deep)
    assert texts(chat) == ["q1", "a1", "q2", "a2"]


def test_a_continued_answer_that_is_refused_is_as_it_was() -> None:
    chat = answered(Chat(), ("q1", "a1"))
    answer, output = chat.path[1], chat.path[1].output
    chat.continue_answer(answer)
    assert chat.is_busy
    assert chat.withdraw() == ("", None)
    assert answer.output is output


async def test_editing_by_key_resends_as_a_branch_and_keys_walk_it(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    async with started(tiny_llama, history=file) as driver:
        first = await driver.ask("First")
        await driver.ask("Second")
        await driver.write("a thought")
        await driver.press("f6")
        assert driver.prompt.text == "Second"
        assert "Editing" in str(driver.prompt.border_title)
        await driver.pilot.resize_terminal(100, 30)
        await driver.until_seen("Esc leaves")
        await driver.press("f6")
        assert driver.prompt.text == "First"
        await driver.press("!", "enter")
        await driver.until_idle()
        assert questions(driver) == ["First!"]
        assert driver.prompt.text == "a thought"
        assert driver.prompt.border_title is None
        await driver.until_seen("‹ 2/2 ›")
        await driver.press("alt+left")
        assert questions(driver) == ["First", "Second"]
        await driver.press("alt+right")
        assert questions(driver) == ["First!"]
        await driver.press("alt+left")
    async with started(tiny_llama, history=file) as driver:
        assert questions(driver) == ["First", "Second"]
        assert driver.chat.path[1].output.text == first  # type: ignore[union-attr]
        assert driver.chat.path[0].branch == (1, 2)
        await driver.press("alt+right")
        assert questions(driver) == ["First!"]
    with History(file) as history:
        (chat,) = history.list_chats()
        assert history.path(chat.id)[0].text == "First!"
        assert len(history.tree(chat.id)) == 6


async def test_escape_leaves_an_edit(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        await driver.ask("First")
        await driver.write("mine")
        await driver.press("f6", "x")
        await driver.press("escape")
        assert driver.prompt.text == "mine"
        driver.prompt.take()
        assert driver.chat.editing is None
        assert questions(driver) == ["First"]
        await driver.ask("Second")
        assert questions(driver) == ["First", "Second"]


async def test_branches_and_edits_by_mouse(tiny_llama: Path) -> None:
    async with started(tiny_llama, sampling=SHORT | {"temperature": 2.0}) as driver:
        first = await driver.ask("Question")
        await driver.press("ctrl+r")
        await driver.until_idle()
        await driver.until_seen("Assistant  ‹ 2/2 ›")
        label = driver.pane.query_one(AnswerMessage).query_one(".speaker")
        await driver.pilot.click(label, offset=(11, 0))
        await driver.until(lambda: driver.answer_text() == first)
        await driver.until_seen("Assistant  ‹ 1/2 ›")
        message = driver.pane.query_one(UserMessage)
        await driver.pilot.click(message, offset=(plain(message).index("✎") + 2, 0))
        await driver.until(lambda: driver.prompt.text == "Question")
        await driver.press("?", "enter")
        await driver.until_idle()
        assert questions(driver) == ["Question?"]
        await driver.until_seen("You  ‹ 2/2 ›")


async def test_stopping_keeps_the_partial_answer_and_the_branches(long_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    async with started(long_llama, history=file, sampling=ENDLESS, **LONG) as driver:
        for key in ("", "ctrl+r", "ctrl+r"):
            await (driver.press(key) if key else driver.say("Go"))
            await driver.until(lambda: driver.chat.live and len(driver.chat.live.answer.text) > 20)
            await driver.press("escape")
            await driver.until_idle()
        await driver.until_seen("‹ 3/3 ›")
        engine = driver.app.main_screen.bridge.backend.engine  # type: ignore[union-attr]
        await driver.until(lambda: engine.stats().blocks_used == 0)
    with History(file) as history:
        (chat,) = history.list_chats()
        _, *answers = history.tree(chat.id)
    assert len(answers) == 3
    assert all(len(answer.text) > 20 and answer.finish_reason == "cancelled" for answer in answers)


async def test_a_fork_is_saved_and_lives_on_its_own(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    async with started(tiny_llama, history=file) as driver:
        await driver.ask("Root")
        await driver.press("ctrl+f")
        await driver.ask("Only in the fork")
        await driver.press("f3")
        await driver.ask("Only in the original")
    async with started(tiny_llama, history=file) as driver:
        chats = driver.app.main_screen.workspace.chats
        assert [chat.title for chat in chats] == ["Root", "Fork of Root"]
        assert [[message.text for message in chat.path if message.role == "user"] for chat in chats] == [
            ["Root", "Only in the original"],
            ["Root", "Only in the fork"],
        ]


async def test_continuing_an_answer_leaves_its_fork_as_it_is(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        text = await driver.ask("Go")
        await driver.press("ctrl+f", "f3")
        await driver.say("/continue")
        await driver.until_idle()
        assert len(driver.answer_text()) > len(text)
        await driver.press("f4")
        assert driver.chat.title == "Fork of Go"
        assert driver.answer_text() == text
        assert driver.chat.path[-1].answer.text == sanitize(text)


async def test_a_fork_of_a_continued_answer_has_what_was_there(long_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    async with started(long_llama, history=file, sampling=ENDLESS, **LONG) as driver:
        await driver.say("Go")
        await driver.until(lambda: driver.chat.live and driver.chat.live.answer.text)
        await driver.press("escape")
        await driver.until_idle()
        kept = driver.answer_text()
        await driver.say("/continue")
        await driver.until(lambda: driver.chat.live and len(driver.chat.live.answer.text) > len(kept) + 20)
        await driver.press("ctrl+f")
        forked = driver.answer_text()
        assert forked.startswith(kept[: len(kept) - 1])
        assert not driver.chat.is_busy
    with History(file) as history:
        texts = {chat.title: history.path(chat.id)[-1].text for chat in history.list_chats()}
    assert texts["Fork of Go"] == forked
    assert len(texts["Go"]) > len(forked) + 20


@pytest.mark.parametrize("command", ["/edit", "/continue", "/again"])
async def test_without_messages_there_is_nothing_to_do(tiny_llama: Path, command: str) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.say(command)
        await driver.until_told("here is no")
        assert driver.chat.path == []


def test_messages_come_parents_first() -> None:
    chat = answered(Chat(), ("q1", "a1"), ("q2", "a2"))
    chat.begin_answer(chat.path[0])
    seen: set[Message] = {chat.root}
    for message in chat.messages():
        assert message.parent in seen
        seen.add(message)
    assert len(seen) == 6


async def test_an_edit_sent_from_another_branch_is_in_view_after_a_restart(
    tiny_llama: Path, tmp_path: Path
) -> None:
    file = tmp_path / "history.db"
    async with started(tiny_llama, history=file) as driver:
        await driver.ask("one")
        await driver.ask("two")
        await driver.press("f6", "f6")
        await driver.ask(" edited")
        await driver.press("alt+left", "f6")
        await driver.write(" edited")
        await driver.press("alt+right")
        assert questions(driver) == ["one edited"]
        await driver.press("enter")
        await driver.until_idle()
        assert questions(driver) == ["one", "two edited"]
    async with started(tiny_llama, history=file) as driver:
        assert questions(driver) == ["one", "two edited"]
