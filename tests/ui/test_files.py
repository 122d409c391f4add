"""Chats to files and back."""

from __future__ import annotations

import errno
import itertools
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest

from nanochat.errors import HistoryError
from nanochat.history import History
from nanochat.settings import AppSettings
from nanochat.ui.file_actions import Target, candidates, export, file_stem, parse_target
from tests.ui.driver import started


@pytest.mark.parametrize(
    ("argument", "target"),
    [
        ("", Target("md", None)),
        ("json", Target("json", None)),
        ("Markdown", Target("md", None)),
        ("a trip.md", Target("md", Path("a trip.md"))),
        ("trip.JSON", Target("json", Path("trip.JSON"))),
        ("json my trip", Target("json", Path("my trip"))),
        ("md notes.txt", Target("md", Path("notes.txt"))),
        ("trip.pdf", None),
        ("nonsense", None),
    ],
)
def test_targets(argument: str, target: Target | None) -> None:
    assert parse_target(argument) == target


def test_a_file_is_named_after_its_chat(tmp_path: Path) -> None:
    stem = file_stem("../Trip to: Hawaï …", datetime(2026, 11, 30))
    assert stem == "trip-to-hawaï-2026-11-30"
    names = [file.name for file in itertools.islice(candidates(tmp_path, "trip", ".md"), 3)]
    assert names == ["trip.md", "trip-2.md", "trip-3.md"]


class TestWhole:
    """A file has its name only once it is whole."""

    @pytest.fixture
    def history(self) -> Iterator[History]:
        with History(None) as history:
            yield history

    def test_not_without_the_latest_messages(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("nanochat.history.database.BUSY_TIMEOUT_S", 0.05)
        with (
            History(tmp_path / "history.db") as history,
            closing(sqlite3.connect(tmp_path / "history.db", isolation_level=None)) as other,
        ):
            chat_id = history.create_chat("Trip")
            history.flush()
            other.execute("BEGIN IMMEDIATE")
            history.add_message(chat_id, None, "Latest")
            with pytest.raises(HistoryError, match="another program has locked"):
                export(history, chat_id, "md", [tmp_path / "trip.md"])
            other.execute("ROLLBACK")
            assert "Latest" in export(history, chat_id, "md", [tmp_path / "trip.md"]).read_text()

    @pytest.mark.parametrize("has_links", [True, False])
    def test_a_name_that_is_taken_is_left_alone(
        self, history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
    ) -> None:
        if not has_links:
            monkeypatch.setattr(os, "link", refuse)
        (tmp_path / "trip.md").write_text("theirs")
        (tmp_path / "trip-2.md").symlink_to(tmp_path / "nowhere")
        chat_id = history.create_chat("Trip")
        written = export(history, chat_id, "md", candidates(tmp_path, "trip", ".md"))
        assert written == tmp_path / "trip-3.md"
        assert written.read_text(encoding="utf-8") == history.export_markdown(chat_id)
        assert (tmp_path / "trip.md").read_text() == "theirs"
        assert len(list(tmp_path.iterdir())) == 3

    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
    @pytest.mark.parametrize("call", ["fsync", "replace"])
    def test_nothing_is_left_of_one_that_is_not(
        self,
        history: History,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        call: str,
        error: BaseException,
    ) -> None:
        chat_id = history.create_chat("Trip")

        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr(os, "link", refuse)
        monkeypatch.setattr(os, call, fail)
        with pytest.raises((HistoryError, KeyboardInterrupt), match="No space left" if error.args else None):
            export(history, chat_id, "md", [tmp_path / "trip.md"])
        assert list(tmp_path.iterdir()) == []


def refuse(*_: object) -> None:
    raise PermissionError(errno.EPERM, "no links here")


async def test_a_chat_is_exported_and_comes_back_with_its_branches(tiny_llama: Path, tmp_path: Path) -> None:
    look = AppSettings(export_folder=str(tmp_path / "out"))
    async with started(tiny_llama, look=look) as driver:
        await driver.say("/export")
        await driver.until_told("nothing to export")
        await driver.ask("Hello there")
        await driver.press("ctrl+r")
        await driver.until_idle()
        await driver.say("/set top_k 3")
        first, second = (child.output.text for child in driver.chat.path[0].children)
        await driver.say("/export")
        await driver.until_told("hello-there-")
        await driver.say("/export")
        await driver.until_told("-2.md")
        markdown, _ = sorted((tmp_path / "out").glob("*.md"), key=lambda file: len(file.name))
        text = markdown.read_text(encoding="utf-8")
        assert "## You\n\nHello there" in text
        file = tmp_path / "my chat.json"
        await driver.say(f"/export {file}")
        await driver.until(file.exists)
        assert len(json.loads(file.read_text(encoding="utf-8"))["messages"]) == 3
        await driver.say(f"/export {file}")
        await driver.until_told("already there")
        await driver.say(f"/import {file}")
        await driver.until(lambda: len(driver.app.main_screen.workspace.chats) == 2)
        assert [child.output.text for child in driver.chat.path[0].children] == [first, second]
        assert driver.chat.sampling == {"top_k": 3}
        await driver.until_seen("‹ 2/2 ›")
        await driver.ask("And on it goes")
        assert driver.answer_text()


async def test_what_cannot_be_exported_or_imported_is_told(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("[]")
    async with started(tiny_llama) as driver:
        await driver.ask("Hello")
        for command, told in (
            ("/export nonsense", "/export writes Markdown"),
            (f"/export {tmp_path / 'file' / 'x.md'}", "can't be written"),
            (f"/import {tmp_path / 'none.json'}", "can't be read"),
            (f"/import {tmp_path}", "can't be read"),
            ("/import ~nosuchuser/x.json", "can't be read"),
            (f"/export {tmp_path / ('x' * 300)}.md", "can't be written"),
            (f"/import {tmp_path / 'file'}", "must be a JSON object"),
            ("/import", "/import followed by a file"),
        ):
            await driver.say(command)
            await driver.until_told(told)
        assert len(driver.app.main_screen.workspace.chats) == 1


async def test_settings_of_a_file_that_cannot_work_are_left_out(tiny_llama: Path, tmp_path: Path) -> None:
    async with started(tiny_llama) as driver:
        await driver.ask("Hello")
        file = tmp_path / "chat.json"
        await driver.say(f"/export {file}")
        await driver.until(lambda: file.exists() and file.read_text(encoding="utf-8"))
        content = json.loads(file.read_text(encoding="utf-8"))
        content["sampling"] = {"temperature": "hot", "stop": None, "logprobs": 5, "top_k": 3, "seed": 1.5}
        file.write_text(json.dumps(content), encoding="utf-8")
        await driver.say(f"/import {file}")
        await driver.until(lambda: len(driver.app.main_screen.workspace.chats) == 2)
        assert driver.chat.sampling == {"top_k": 3}
        await driver.press("f7")
        await driver.until_seen("Settings of this chat")
