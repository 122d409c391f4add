"""What stands in a prompt outlives the app, however it ends, until it is sent or its tab is closed."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nanochat.backend.remote.config import RemoteConfig
from nanochat.history import History
from nanochat.ui import pane_screen
from nanochat.ui.app import NanochatApp
from nanochat.ui.pane_screen import DRAFT_S
from nanochat.ui.prompt import FOLD_DRAFT
from tests.ui.driver import SHORT, Driver, started, tiny_config
from tests.ui.test_history import saved_paths

LONG_TEXT = "A line that was pasted.\n" * 5_000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "history.db"


def drafts(file: Path) -> list[str]:
    """As they lie in the file."""
    with closing(sqlite3.connect(file)) as connection:
        return [text for (text,) in connection.execute("SELECT text FROM drafts ORDER BY chat_id")]


def chat_titles(file: Path) -> list[str]:
    with closing(sqlite3.connect(file)) as connection:
        return [title for (title,) in connection.execute("SELECT title FROM chats ORDER BY id")]


async def until_kept(driver: Driver, file: Path, expected: list[str]) -> None:
    await driver.until(lambda: drafts(file) == expected)


def prompts(driver: Driver) -> list[str]:
    main = driver.app.main_screen
    return [main.pane(chat).prompt.full_text for chat in main.workspace.chats]


class TestLeaving:
    async def test_drafts_are_back_with_their_tabs_in_their_order(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file, system="Be brief.") as driver:
            await driver.write("only a draft")
            await driver.press("ctrl+n")
            await driver.ask("Asked")
            await driver.write("a follow-up\nof two lines")
            await driver.press("ctrl+n")
            await driver.write("the last")
            await driver.press("alt+1")
        async with started(tiny_llama, history=file) as driver:
            assert prompts(driver) == ["only a draft", "a follow-up\nof two lines", "the last"]
            assert driver.prompt.text == "only a draft"
            assert driver.chat.system == "Be brief."
            await driver.write("!")  # the cursor is at its end
            assert driver.prompt.text == "only a draft!"
            await driver.ask("")
            assert driver.chat.title == "only a draft!"
        assert drafts(file) == ["a follow-up\nof two lines", "the last"]
        assert sorted(saved_paths(file)) == ["Asked", "only a draft!"]

    async def test_the_last_letters_typed_before_leaving_are_kept(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file, hold=True) as driver:
            for key in ("h", "e", "y", "ctrl+q"):
                driver.app.simulate_key(key)
            await driver.until(lambda: not driver.app.is_running or driver.app._exit)
        assert drafts(file) == ["hey"]

    async def test_what_was_sent_just_before_leaving_is_kept(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file) as driver:
            for key in ("h", "e", "y", "enter", "ctrl+q"):
                driver.app.simulate_key(key)
            await driver.until(lambda: not driver.app.is_running or driver.app._exit)
        assert drafts(file) or list(saved_paths(file)) == ["hey"]

    async def test_what_was_written_before_the_history_was_open(self, tiny_llama: Path, file: Path) -> None:
        History(file).close()
        lock = sqlite3.connect(file, isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
        async with started(tiny_llama, history=file, wait_for_history=False, hold=True) as driver:
            await driver.write("early")
            lock.close()
            await driver.until(lambda: driver.app.main_screen.archive.history is not None)
            await until_kept(driver, file, ["early"])
        assert drafts(file) == ["early"]

    async def test_a_long_paste_is_back_whole(self, tiny_llama: Path, file: Path) -> None:
        assert len(LONG_TEXT) > FOLD_DRAFT
        async with started(tiny_llama, history=file, hold=True) as driver:
            driver.pane.take_prompt(LONG_TEXT)
            await driver.write("What is this?")
        async with started(tiny_llama, history=file, hold=True) as driver:
            assert driver.prompt.full_text == LONG_TEXT + "What is this?"
            assert len(driver.prompt.text) < 200

    async def test_what_comes_from_a_file_is_fit_to_be_shown(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.write("x")
        with closing(sqlite3.connect(file)) as connection, connection:
            connection.execute("UPDATE drafts SET text = char(27) || ']0;title' || char(7) || ' here'")
        async with started(tiny_llama, history=file, hold=True) as driver:
            assert driver.prompt.text.isprintable()
            assert driver.prompt.text.endswith("here")

    async def test_an_edit_under_way_and_what_waited_for_its_end(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file) as driver:
            await driver.ask("Question")
            await driver.write("waits")
            await driver.press("f6")
            assert driver.pane.draft == "waits"  # the message itself is saved
            await driver.write(" changed")
        assert drafts(file) == ["Question changed\nwaits"]


class TestKilled:
    async def test_all_but_a_second_is_back(self, tiny_llama: Path, file: Path, tmp_path: Path) -> None:
        report = tmp_path / "report"
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_write_on, args=(tiny_llama, file, report))
        process.start()
        try:
            end_s = time.monotonic() + 60
            while len(lines := _lines(report)) < 60:
                assert process.is_alive()
                assert time.monotonic() < end_s
                time.sleep(0.02)
        finally:
            process.kill()
            process.join()
        lines = _lines(report)
        last_s = float(lines[-1].split()[0])
        before = [int(line.split()[1]) for line in lines if float(line.split()[0]) <= last_s - 1.0]
        async with started(tiny_llama, history=file, hold=True) as driver:
            assert driver.prompt.text.startswith("x" * before[-1])
            assert not driver.chat.path


def _lines(report: Path) -> list[str]:
    text = report.read_text() if report.exists() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _write_on(model: Path, file: Path, report: Path) -> None:
    """An app in which somebody writes until it is killed."""

    async def write() -> None:
        pane_screen.DRAFT_S = 0.1  # so that a busy machine is not taken for a draft that waits too long
        app = NanochatApp(tiny_config(model), history_file=file)
        app._loader.start = lambda: None  # type: ignore[method-assign]
        async with app.run_test(size=(100, 30)):
            main = app.main_screen
            while main.archive.history is None:
                await asyncio.sleep(0.01)
            prompt = main.pane(main.chat).prompt
            with report.open("a") as lines:
                while True:
                    prompt.insert("x")
                    lines.write(f"{time.monotonic()} {len(prompt.text)}\n")
                    lines.flush()
                    await asyncio.sleep(0.04)

    asyncio.run(write())


class TestForgetting:
    async def test_once_sent(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file) as driver:
            await driver.write("Question")
            await until_kept(driver, file, ["Question"])
            await driver.press("enter")
            await driver.until(lambda: drafts(file) == [])
            await driver.until_idle()
            (chat,) = driver.app.main_screen.archive.history.list_chats()  # type: ignore[union-attr]
            assert chat.title == "Question"
            assert "tiny-llama" in chat.model
        assert list(saved_paths(file)) == ["Question"]

    async def test_once_its_tab_is_closed_or_the_prompt_emptied(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file) as driver:
            await driver.ask("Asked")
            await driver.write("never sent")
            await driver.press("ctrl+n")
            await driver.write("emptied")
            await until_kept(driver, file, ["never sent", "emptied"])
            driver.prompt.take()
            await until_kept(driver, file, ["never sent"])
            assert chat_titles(file) == ["Asked"]
            await driver.write("written anew")
            await until_kept(driver, file, ["never sent", "written anew"])
            await driver.press("ctrl+w")
            await driver.press("ctrl+w")
            await until_kept(driver, file, [])
        assert chat_titles(file) == ["Asked"]
        async with started(tiny_llama, history=file, hold=True) as driver:
            assert prompts(driver) == [""]

    async def test_it_is_in_no_list_and_no_search(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.write("secret words")
            await until_kept(driver, file, ["secret words"])
            history = driver.app.main_screen.archive.history
            assert history is not None
            assert history.list_chats() == history.search("secret") == history.search("New chat") == []

    async def test_it_is_saved_about_once_a_second(
        self, tiny_llama: Path, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with started(tiny_llama, history=file, hold=True) as driver:
            kept: list[Any] = []
            history = driver.app.main_screen.archive.history
            assert history is not None
            keep = history.drafts.keep
            monkeypatch.setattr(history.drafts, "keep", lambda *draft: (kept.append(draft), keep(*draft)))
            start_s = time.monotonic()
            for _ in range(40):
                await driver.write("x")
            await driver.until(lambda: kept and kept[-1][1] == "x" * 40)
            assert len(kept) <= (time.monotonic() - start_s) / DRAFT_S + 1


class TestRefused:
    async def test_a_question_that_a_server_refused(self, tiny_llama: Path, file: Path) -> None:
        nobody = RemoteConfig(url="http://127.0.0.1:9/v1")
        async with started(nobody, sampling=SHORT, history=file, hold=True) as driver:
            driver.load()
            await driver.say("Are you there?")
            await driver.until(lambda: not driver.chat.is_busy)
            assert driver.prompt.text == "Are you there?"
            await driver.until(lambda: drafts(file) == ["Are you there?"])
        assert saved_paths(file) == {}
        async with started(tiny_llama, history=file) as driver:
            assert driver.prompt.text == "Are you there?"
            await driver.press("enter")
            await driver.until(lambda: driver.chat.path)
            await driver.until_idle()
        assert list(saved_paths(file)) == ["Are you there?"]

    async def test_one_that_did_not_fit_behind_others(self, tiny_llama: Path, file: Path) -> None:
        options = {"max_model_len": 64, "num_kv_blocks": 16}
        async with started(tiny_llama, history=file, **options) as driver:
            await driver.ask("Hi")
            await driver.write("y" * 300)
            await driver.press("enter")
            await driver.until(driver.notices)
            await until_kept(driver, file, ["y" * 300])
        async with started(tiny_llama, history=file, hold=True) as driver:
            assert driver.prompt.text == "y" * 300
            assert len(driver.chat.path) == 2


class TestTwoAtOnce:
    async def test_each_keeps_its_own_draft_of_a_chat_that_both_have_open(
        self, tiny_llama: Path, file: Path
    ) -> None:
        async with started(tiny_llama, history=file) as one:
            await one.ask("Shared")
            await one.write("of the one")
            async with started(tiny_llama, history=file, hold=True) as other:
                await other.say("/search Shared")
                await other.until_seen("newest first")
                await other.press("enter")
                await other.until(lambda: other.chat.title == "Shared")
                assert other.prompt.text == ""
                await other.write("of the other")
                await other.until(lambda: sorted(drafts(file)) == ["of the one", "of the other"])
        async with started(tiny_llama, history=file, hold=True) as driver:
            assert prompts(driver) == ["of the one\nof the other"]
            assert drafts(file) == ["of the one\nof the other"]
