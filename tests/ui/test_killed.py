"""The app is killed while it streams: the next start finds all that had ended, and of the rest all but a second."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from nanochat.history import History, Message
from nanochat.history.store import SAVE_INTERVAL_S
from tests.ui import streaming_app
from tests.ui.driver import started

START_S = 90.0
Report = tuple[float, dict[str, tuple[int, bool]]]


def kill_while_streaming(model: Path, file: Path, report: Path, seed: int) -> list[Report]:
    """Kill an app at a random moment; returns what it has shown, and when."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["nanochat.engine.engine", "nanochat.backend.context", "tests.ui.streaming_app"]
    )
    process = context.Process(target=streaming_app.run, args=(model, file, report, seed))
    process.start()
    try:
        end_s = time.monotonic() + START_S
        while not report.exists() or report.stat().st_size == 0:
            assert process.is_alive()
            assert time.monotonic() < end_s
            time.sleep(0.01)
        time.sleep(random.Random(seed).uniform(0.05, 3.0))
    finally:
        process.kill()
        process.join()
    lines = report.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def check(file: Path, reports: list[Report]) -> None:
    """Compare what is saved with what was shown a second before the end."""
    with contextlib.closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    with History(file) as history:
        messages: dict[int, Message] = {}
        for chat in history.list_chats():
            messages |= {message.id: message for message in history.tree(chat.id)}
    assert {message.state for message in messages.values()} <= {"complete", "interrupted"}
    last_s = reports[-1][0]
    before = [shown for at_s, shown in reports if at_s <= last_s - 1.0]
    for store_id, (num_tokens, has_ended) in (before[-1] if before else {}).items():
        saved = messages[int(store_id)]
        assert len(saved.token_ids) >= num_tokens
        if has_ended:
            assert (saved.state, len(saved.token_ids)) == ("complete", num_tokens)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_a_random_moment(long_llama: Path, tmp_path: Path, seed: int) -> None:
    assert SAVE_INTERVAL_S < 1
    file = tmp_path / "history.db"
    check(file, kill_while_streaming(long_llama, file, tmp_path / "report", seed))


async def test_the_next_start_shows_what_was_saved(long_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    kill_while_streaming(long_llama, file, tmp_path / "report", 8)
    async with started(long_llama, history=file, hold=True) as driver:
        chats = driver.app.main_screen.workspace.chats
        assert len(chats) == streaming_app.TABS
        assert all(chat.path[-1].output is not None for chat in chats)
        endless = chats[0].path[-1]
        assert endless.is_interrupted
        assert endless.can_continue
        await driver.press("ctrl+g", "1")
        await driver.until_seen("interrupted")


def kill_again_and_again(model: Path, folder: Path, seeds: Iterable[int]) -> None:
    """A start takes over the tabs of the one before."""
    for seed in seeds:
        file = folder / "history.db"
        check(file, kill_while_streaming(model, file, folder / f"report-{seed}", seed))


@pytest.mark.slow
@pytest.mark.parametrize("first", [100, 110])
def test_killed_again_and_again(long_llama: Path, tmp_path: Path, first: int) -> None:
    kill_again_and_again(long_llama, tmp_path, range(first, first + 4))


@pytest.mark.long
@pytest.mark.parametrize("first", range(100, 150, 5))
def test_killed_at_fifty_random_moments(long_llama: Path, tmp_path: Path, first: int) -> None:
    kill_again_and_again(long_llama, tmp_path, range(first, first + 5))
