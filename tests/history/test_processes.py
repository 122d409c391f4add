"""Processes that are killed while they stream, and processes that share one file."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nanochat.history import History

STREAMER = Path(__file__).with_name("streamer.py")


def start(file: Path, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(STREAMER), str(file), *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def check_integrity(file: Path) -> None:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def kill_and_check(file: Path, seed: int) -> float:
    """Kill a streaming process at a random moment; returns how many seconds of text were lost."""
    process = start(file, "stream", seed)
    try:
        assert process.stdout is not None
        _, chat_id, long_id = process.stdout.readline().split()
        time.sleep(random.Random(seed).uniform(0.05, 2.5))
    finally:
        process.kill()
        output, _ = process.communicate()
    lines = [line.split() for line in output.splitlines(keepends=True) if line.endswith("\n")]
    pieces = [words[1] for words in lines if words[0] == "piece"]
    finished = {int(words[1]): int(words[2]) for words in lines if words[0] == "finished"}

    check_integrity(file)
    with History(file) as history:
        assert int(chat_id) in [chat.id for chat in history.restore_tabs()]
        messages = {message.id: message for message in history.tree(int(chat_id))}
        for message_id, length in finished.items():
            message = messages[message_id]
            assert (message.state, len(message.text), len(message.token_ids)) == ("complete", length, 1000)
        assert all(message.state in ("complete", "interrupted") for message in messages.values())
        saved = messages[int(long_id)].text.split() if int(long_id) in messages else []
        if saved:
            assert messages[int(long_id)].state == "interrupted"
            assert len(messages[int(long_id)].token_ids) == 3 * len(saved)
    assert saved == (pieces + saved[len(pieces) :])[: len(saved)]
    assert len(saved) <= len(pieces) + 1
    since = float(saved[-1]) if saved else float(pieces[0]) if pieces else 0.0
    return float(pieces[-1]) - since if pieces else 0.0


@pytest.mark.parametrize("seed", [1, 2])
def test_kill_9_while_streaming(file: Path, seed: int) -> None:
    """Finished messages are all there, and of a partial one all but the last second."""
    assert kill_and_check(file, seed) <= 1.0


@pytest.mark.parametrize(
    "times", [pytest.param(3, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.long)]
)
def test_kill_9_up_to_fifty_times(tmp_path: Path, times: int) -> None:
    """So many times each file; five files side by side, because a streaming process mostly waits."""

    def kill(first: int) -> float:
        file = tmp_path / str(first) / "history.db"
        lost = max(kill_and_check(file, seed) for seed in range(first, first + times))
        with History(file) as history:
            assert len(history.list_chats()) == times
            assert len(history.restore_tabs()) == 1  # each process closed the others' tabs
        return lost

    with ThreadPoolExecutor(5) as pool:
        assert max(pool.map(kill, range(0, 50, 10))) <= 1.0


def states_of(history: History, chat_id: int) -> dict[int, str]:
    """The state of each message, once the chat is saved."""
    is_saved = chat_id in [chat.id for chat in history.list_chats()]
    return {message.id: message.state for message in history.tree(chat_id)} if is_saved else {}


def test_a_killed_processes_answer_is_interrupted_for_those_who_live(file: Path) -> None:
    with History(file) as history:
        process = start(file, "stream", 3)
        try:
            assert process.stdout is not None
            _, chat_id, long_id = process.stdout.readline().split()
            while int(long_id) not in (states := states_of(history, int(chat_id))):
                time.sleep(0.01)
            assert states[int(long_id)] == "streaming"
            assert history.restore_tabs() == []
        finally:
            process.kill()
            process.communicate()
        assert states_of(history, int(chat_id))[int(long_id)] == "interrupted"
        assert [chat.id for chat in history.restore_tabs()] == [int(chat_id)]


def test_processes_that_write_at_once_lose_and_mix_nothing(file: Path) -> None:
    """They also create the file at once."""
    names, count = ("a", "b", "c"), 60
    processes = [start(file, "share", 0, "x", 0) for _ in names]
    assert [process.wait(60) for process in processes] == [0] * len(names)
    with History(file) as history:
        shared = history.create_chat("shared")
        history.flush()
        processes = [start(file, "share", shared, name, count) for name in names]
        for number in range(count):
            history.add_message(shared, None, f"own {number}")
            history.flush()
        for process in processes:
            process.communicate()
            assert process.returncode == 0
        found = sorted(message.text for message in history.tree(shared))
        assert found == sorted(f"{name} {number}" for name in (*names, "own") for number in range(count))
        chats = {chat.title: chat.id for chat in history.list_chats()}
        for name in names:
            texts = [message.text for message in history.path(chats[name])]
            assert texts == [f"{name} {kind}{number}" for number in range(count) for kind in "QA"]
    check_integrity(file)
