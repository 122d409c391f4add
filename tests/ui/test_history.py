"""Chats outlive the app: saved as they stream, back on the next start, and never in the way of chatting."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanochat.history import History, Message
from nanochat.sanitize import sanitize
from nanochat.ui.dialogs import Confirm
from nanochat.ui.message import AnswerMessage
from tests.ui.driver import ENDLESS, LONG, SHORT, Driver, plain, started


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "history.db"


@contextlib.contextmanager
def opened(file: Path) -> Iterator[History]:
    with History(file) as history:
        yield history


def saved_paths(file: Path) -> dict[str, list[Message]]:
    """Messages of the active path by the chat's title."""
    with History(file) as history:
        return {chat.title: history.path(chat.id) for chat in history.list_chats()}


def tabs(driver: Driver) -> list[str]:
    return [chat.title for chat in driver.app.main_screen.workspace.chats]


def shown_texts(driver: Driver) -> list[str]:
    return [
        message.text if message.role == "user" else message.output.text if message.output else ""
        for message in driver.chat.path
    ]


async def streaming(driver: Driver, characters: int = 30) -> None:
    await driver.until(lambda: driver.chat.live and len(driver.chat.live.answer.text) > characters)


class TestSaving:
    async def test_a_chat_is_created_on_its_first_message(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file) as driver:
            await driver.press("ctrl+n")
            assert driver.chat.store_id is None
            text = await driver.ask("Hello there")
        paths = saved_paths(file)
        assert list(paths) == ["Hello there"]
        question, answer = paths["Hello there"]
        assert (question.text, answer.text, answer.state) == ("Hello there", text, "complete")
        assert len(answer.token_ids) == SHORT["max_tokens"]
        assert answer.finish_reason == "length"
        assert answer.metrics["completion_tokens"] == SHORT["max_tokens"]
        assert "tiny-llama" in answer.model

    async def test_an_answer_is_saved_within_a_second_while_it_streams(
        self, long_llama: Path, file: Path
    ) -> None:
        async with started(long_llama, history=file, sampling=ENDLESS, **LONG) as driver:
            await driver.say("Go")
            await streaming(driver)
            assert driver.chat.live is not None
            shown = driver.chat.live.answer.num_tokens
            await driver.pilot.pause(1.0)
            with opened(file) as other:
                (chat,) = other.list_chats()
                answer = other.path(chat.id)[1]
            assert answer.state == "streaming"
            assert len(answer.token_ids) >= shown

    async def test_what_was_said_before_the_history_is_open_is_saved_too(
        self, tiny_llama: Path, file: Path
    ) -> None:
        History(file).close()
        lock = sqlite3.connect(file, isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
        async with started(tiny_llama, history=file, wait_for_history=False) as driver:
            text = await driver.ask("Early")
            assert driver.app.main_screen.archive.history is None
            await driver.say("Second")
            lock.execute("ROLLBACK")
            await driver.until(lambda: driver.app.main_screen.archive.history is not None)
            await driver.until_idle()
            second = driver.answer_text()
        lock.close()
        assert [message.text for message in saved_paths(file)["Early"]] == ["Early", text, "Second", second]

    async def test_a_refused_question_is_not_kept(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file, max_model_len=64, num_kv_blocks=16) as driver:
            await driver.say("x" * 300)
            await driver.until(driver.notices)
            assert driver.prompt.full_text == "x" * 300
        assert saved_paths(file) == {}

    async def test_an_early_question_is_answered_and_saved_by_the_model_that_came(
        self, tiny_llama: Path, file: Path
    ) -> None:
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.say("Early")
            driver.load()
            await driver.until_ready()
            await driver.until_idle()
        question, answer = saved_paths(file)["Early"]
        assert (question.text, answer.state) == ("Early", "complete")
        assert "tiny-llama" in answer.model

    async def test_settings_and_titles_are_saved(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file) as driver:
            await driver.ask("Hello")
            await driver.say("/set top_k 7")
            await driver.say("/set stop END")
            await driver.say("/system Be brief.")
        async with started(tiny_llama, history=file) as driver:
            assert driver.chat.sampling == {"top_k": 7, "stop": ("END",)}
            assert driver.chat.system == "Be brief."
            await driver.ask("Again")

    async def test_clearing_clears_the_saved_chat(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file) as driver:
            await driver.ask("Hello")
            await driver.say("/clear")
            await driver.until(lambda: isinstance(driver.app.screen, Confirm))
            await driver.press("y")
            await driver.until(lambda: not driver.chat.path)
            await driver.ask("Anew")
        paths = saved_paths(file)
        assert [message.role for message in paths["Anew"]] == ["user", "assistant"]
        assert len(paths) == 1

    async def test_a_deleted_chat_is_gone(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file) as driver:
            await driver.ask("Keep")
            await driver.press("ctrl+n")
            await driver.ask("Drop")
            await driver.say("/delete")
            await driver.until(lambda: isinstance(driver.app.screen, Confirm))
            await driver.press("enter")  # what can't be undone needs more than that
            await driver.until(lambda: not isinstance(driver.app.screen, Confirm))
            assert tabs(driver) == ["Keep", "Drop"]
            await driver.say("/delete")
            await driver.until(lambda: isinstance(driver.app.screen, Confirm))
            await driver.press("y")
            await driver.until(lambda: tabs(driver) == ["Keep"])
        assert list(saved_paths(file)) == ["Keep"]


class TestRestoring:
    async def test_the_last_sessions_tabs_are_back(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file) as driver:
            first = await driver.ask("First")
            await driver.press("ctrl+n")
            await driver.ask("Second")
            await driver.press("ctrl+n")
            await driver.ask("Third")
            await driver.press("ctrl+w")
            await driver.until(lambda: len(tabs(driver)) == 2)
            await driver.press("f3")
            assert driver.chat.title == "First"
        async with started(tiny_llama, history=file) as driver:
            assert tabs(driver) == ["First", "Second"]
            assert driver.chat.title == "First"
            assert shown_texts(driver) == ["First", first]
            await driver.until(lambda: driver.pane.query(AnswerMessage))
            (answer,) = driver.pane.query(AnswerMessage)
            footer = plain(answer.query_one(".answer-footer"))
            assert "cut off at its length limit" in footer
            assert "12 tokens" in footer
            await driver.ask("Go on")
        assert [message.role for message in saved_paths(file)["First"]] == ["user", "assistant"] * 2

    async def test_a_restored_chat_continues_token_for_token(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file) as driver:
            await driver.ask("A question long enough to fill a block or two")
            answer = driver.chat.path[-1].output
            assert answer is not None
            unbroken = answer.metrics.prompt_tokens + len(answer.token_ids)
            await driver.ask("Then")
            together = driver.answer_text()
            prompt = driver.chat.path[-1].output.metrics.prompt_tokens  # type: ignore[union-attr]
        with opened(file) as history:
            (chat,) = history.list_chats()
            history.delete_message(history.path(chat.id)[2].id)
        async with started(tiny_llama, history=file) as driver:
            assert driver.chat.context_tokens == unbroken
            assert await driver.ask("Then") == together
            assert driver.chat.path[-1].output.metrics.prompt_tokens == prompt  # type: ignore[union-attr]

    async def test_a_text_typed_meanwhile_stays_in_view(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file) as driver:
            await driver.ask("Old")
        lock = sqlite3.connect(file, isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
        async with started(tiny_llama, history=file, hold=True, wait_for_history=False) as driver:
            await driver.write("typed at once")
            lock.execute("ROLLBACK")
            await driver.until(lambda: driver.app.main_screen.archive.history is not None)
            assert tabs(driver) == ["Old", "New chat"]
            assert driver.prompt.text == "typed at once"
        lock.close()

    async def test_an_interrupted_answer_is_marked_and_can_be_continued(
        self, long_llama: Path, file: Path
    ) -> None:
        async with started(long_llama, history=file, sampling=ENDLESS, **LONG) as driver:
            await driver.say("Go")
            await streaming(driver)
            await driver.press("ctrl+q")
            await driver.until(lambda: not driver.app.is_running)
        before = saved_paths(file)["Go"][1]
        assert before.state == "interrupted"
        assert len(before.token_ids) > 0
        sampling = SHORT | {"max_tokens": 20}
        async with started(long_llama, history=file, sampling=sampling, **LONG) as driver:
            await driver.until_seen("interrupted")
            assert driver.chat.path[1].is_interrupted
            await driver.say("/continue")
            await driver.until_idle()
            output = driver.chat.path[1].output
            assert output is not None
            assert output.text.startswith(before.text.removesuffix("�"))
            assert abs(len(output.token_ids) - len(before.token_ids) - 20) <= 3  # a character cut short
            assert len(driver.chat.path) == 2
            assert not driver.chat.path[1].is_interrupted
            await driver.ask("And then?")
        after = saved_paths(file)["Go"][1]
        assert (after.state, after.text) == ("complete", output.text)

    async def test_continuing_gives_what_would_have_come_anyway(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file, sampling=SHORT | {"max_tokens": 40}) as driver:
            whole = await driver.ask("Go")
            await driver.press("ctrl+n")
            await driver.say("/set max_tokens 15")
            await driver.ask("Go")
            await driver.say("/set max_tokens 25")
            await driver.say("/continue")
            await driver.until_idle()
            assert driver.answer_text()[:30] == whole[:30]
            metrics = driver.chat.path[1].output.metrics  # type: ignore[union-attr]
            assert abs(metrics.completion_tokens - 40) <= 3

    async def test_a_stranger_answer_is_no_obstacle(self, tiny_llama: Path, file: Path) -> None:
        """What was written by another model, or by hand, in a file that was imported."""
        with opened(file) as history:
            chat = history.create_chat("\x1b[2JOdd\x07", sampling={"nonsense": 1, "temperature": 0.0})
            question = history.add_message(chat, None, "Hi \x1b]0;x\x07")
            answer = history.begin_answer(chat, question)
            history.finish_answer(
                answer,
                text="[bold]é\x1b[31m",
                token_ids=[999_999, 3],
                finish_reason="odd",
                metrics={"ttft_s": "soon", "preemptions": -1, "reasoning_tags": [1], "prompt_tokens": 1e300},
            )
            history.save_tabs([chat])
        async with started(tiny_llama, history=file) as driver:
            await driver.until_seen("[bold]é␛[31m")
            assert "\x1b" not in driver.screen_text()
            await driver.ask("More")


class TestQuitting:
    @pytest.mark.slow
    async def test_with_eight_tabs_generating_it_leaves_and_saves_all(
        self, long_llama: Path, file: Path
    ) -> None:
        async with started(long_llama, history=file, sampling=ENDLESS, **LONG) as driver:
            for number in range(8):
                if number:
                    await driver.press("ctrl+n")
                await driver.say(f"Go {number}")
            chats = driver.app.main_screen.workspace.chats
            await driver.until(lambda: all(chat.live and chat.live.answer.text for chat in chats))
            await driver.press("ctrl+q")
            await driver.until(lambda: not driver.app.is_running)
            driver.app.close_engine()
            shown = {chat.title: chat.live.answer.text for chat in chats if chat.live}
        paths = saved_paths(file)
        assert len(paths) == 8
        for title, text in shown.items():
            assert paths[title][1].state == "interrupted"
            assert sanitize(paths[title][1].text).startswith(text)

    async def test_closing_a_busy_tab_keeps_what_it_has_said(self, long_llama: Path, file: Path) -> None:
        async with started(long_llama, history=file, sampling=ENDLESS, **LONG) as driver:
            await driver.say("Go")
            await streaming(driver)
            await driver.press("ctrl+w")
            await driver.press("y")
            await driver.until(lambda: tabs(driver) == ["New chat"])
        answer = saved_paths(file)["Go"][1]
        assert (answer.state, answer.finish_reason) == ("complete", "cancelled")
        assert len(answer.token_ids) > 0


class TestTrouble:
    """A history that can't be used never stops chatting."""

    @pytest.mark.parametrize("kind", ["corrupt", "foreign", "no folder", "directory"])
    async def test_one_sentence_and_chats_stay_in_memory(
        self, tiny_llama: Path, file: Path, kind: str
    ) -> None:
        file.parent.mkdir(parents=True)
        if kind == "corrupt":
            file.write_bytes(b"SQLite format 3\x00" + b"\xff" * 5000)
        elif kind == "foreign":
            with contextlib.closing(sqlite3.connect(file)) as connection:
                connection.execute("CREATE TABLE theirs (a)")
        elif kind == "no folder":
            file.parent.rmdir()
            file.parent.write_text("in the way")
        else:
            file.mkdir()
        async with started(tiny_llama, history=file) as driver:
            await driver.until_told("kept in memory only")
            assert len(driver.app._notifications) == 1
            await driver.until_seen("not saved")
            assert await driver.ask("Hello")
            await driver.press("ctrl+f")
            assert await driver.ask("More")
            assert driver.chat.store_id is not None
        assert driver.app.unsaved is None

    async def test_a_locked_history(
        self, tiny_llama: Path, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("nanochat.history.database.BUSY_TIMEOUT_S", 0.2)
        History(file).close()
        lock = sqlite3.connect(file, isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
        async with started(tiny_llama, history=file) as driver:
            await driver.until_told("another program has locked")
            assert await driver.ask("Hello")
        lock.close()

    async def test_a_disk_that_fills_up_says_so_once_and_all_is_saved_when_there_is_room(
        self, tiny_llama: Path, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("nanochat.history.writer.RETRY_S", 0.05)
        async with started(tiny_llama, history=file) as driver:
            await driver.ask("Before")
            writer: Any = driver.app.main_screen.archive.history._writer  # type: ignore[union-attr]
            full, save = [True], writer._database.writing

            @contextlib.contextmanager
            def writing() -> Iterator[Any]:
                with save() as connection:
                    connection.execute(f"PRAGMA max_page_count = {1 if full[0] else 1_000_000}")
                    yield connection

            writer._database.writing = writing
            await driver.say(f"/system {'long ' * 10_000}")
            await driver.until_told("the disk is full")
            await driver.until_seen("not saved")
            await driver.press("ctrl+n")
            text = await driver.ask("After")
            assert len([told for told in driver.app._notifications if "disk" in told.message]) == 1
            full[0] = False
            await driver.until_told("being saved again")
            await driver.until(lambda: "not saved" not in driver.screen_text())
        assert saved_paths(file)["After"][1].text == text
        with opened(file) as history:
            assert {len(chat.system or "") for chat in history.list_chats()} == {0, 49_999}

    async def test_a_read_only_file(self, tiny_llama: Path, file: Path) -> None:
        History(file).close()
        with contextlib.closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
        async with started(tiny_llama, history=Path("/proc/version")) as driver:
            await driver.until_told("kept in memory only")
            assert await driver.ask("Hello")
