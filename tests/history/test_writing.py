"""Changes that can't be saved: a sentence each, nothing lost, and nobody waits."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nanochat.errors import HistoryError
from nanochat.history import History
from nanochat.history import store as store_module
from nanochat.history.database import explain


class TestCannotWrite:
    def test_locked_meanwhile_nobody_waits_and_nothing_is_lost(self, saved: Path, impatient: None) -> None:
        problems: list[HistoryError | None] = []
        recovered = threading.Event()

        def report(problem: HistoryError | None) -> None:
            problems.append(problem)
            if problem is None:
                recovered.set()

        with History(saved, report=report) as history:
            with contextlib.closing(sqlite3.connect(saved)) as other:
                other.execute("BEGIN IMMEDIATE")
                chat_id = history.create_chat("Second")
                message_id = history.begin_answer(chat_id, None)
                for number in range(50):
                    history.grow_answer(message_id, f"{number} ", [number])
                with pytest.raises(HistoryError, match="another program has locked"):
                    history.flush()
                with pytest.raises(HistoryError, match="another program has locked"):
                    history.delete_chat(chat_id)
                history.grow_answer(message_id, "end")
                assert [chat.title for chat in history.list_chats()] == ["Chat"]
                other.rollback()
            assert recovered.wait(20)
            assert history.path(chat_id)[0].text == "".join(f"{number} " for number in range(50)) + "end"
        assert len(problems) == 2
        assert "another program has locked" in str(problems[0])

    def test_a_change_that_fails_half_way_leaves_nothing_and_its_neighbours_are_saved(
        self, saved: Path
    ) -> None:
        """They may be saved in one transaction."""
        problems: list[HistoryError | None] = []
        half_way, go_on = threading.Event(), threading.Event()

        def hold(connection: sqlite3.Connection) -> None:
            half_way.set()
            go_on.wait(20)  # what follows gathers into one batch

        def fail(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE chats SET title = 'half done'")
            raise ValueError("no such thing")

        with History(saved, report=problems.append) as history:
            history._writer.submit(hold)
            assert half_way.wait(20)
            history.create_chat("Before")
            history._writer.submit(fail)
            history.create_chat("After")
            go_on.set()
            history.flush()
            assert sorted(chat.title for chat in history.list_chats()) == ["After", "Before", "Chat"]
        (problem,) = problems
        assert "no such thing" in str(problem)

    def test_what_a_caller_gave_up_waiting_for_is_not_done_later(
        self, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with History(saved) as history:
            (chat,) = history.list_chats()
            monkeypatch.setattr(store_module, "WAIT_S", 0.05)
            with contextlib.closing(sqlite3.connect(saved)) as other:
                other.execute("BEGIN IMMEDIATE")
                with pytest.raises(HistoryError, match=r"didn't answer within 0\.05 s"):
                    history.delete_chat(chat.id)
                other.rollback()
            monkeypatch.undo()
            history.flush()
            assert history.list_chats() == [chat]

    def test_closing_says_what_is_lost(self, saved: Path, impatient: None) -> None:
        history = History(saved)
        with contextlib.closing(sqlite3.connect(saved)) as other:
            other.execute("BEGIN IMMEDIATE")
            history.create_chat("lost")
            with pytest.raises(HistoryError, match=r"^1 change to your chats .* another program has locked"):
                history.close()
            other.rollback()
        history.close()
        with History(saved) as reopened:
            assert [chat.title for chat in reopened.list_chats()] == ["Chat"]

    def test_a_full_disk(self, file: Path) -> None:
        """A limit on file sizes acts like a full disk, and can be lifted again."""
        code = f"""
import json, resource, sys, threading
from pathlib import Path
from nanochat.errors import HistoryError
from nanochat.history import History, writer
writer.RETRY_S = 0.05
problems, recovered = [], threading.Event()
def report(problem):
    problems.append(problem and str(problem))
    if problem is None:
        recovered.set()
path = Path({str(file)!r})
history = History(path, report=report, save_interval_s=0.01)
chat_id = history.create_chat("Chat")
history.flush()
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
size = path.with_name("history.db-wal").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10_000, hard))
last = None
for number in range(40):
    last = history.add_message(chat_id, last, f"{{number}} " * 500)
answer = history.begin_answer(chat_id, last)
history.grow_answer(answer, "partial", [1])
try:
    history.flush()
except HistoryError as error:
    flushed = str(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
recovered.wait(20)
print(json.dumps([flushed, problems, len(history.path(chat_id)), history.path(chat_id)[-1].text]))
history.close()
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        flushed, problems, count, text = json.loads(done.stdout)
        assert "disk" in flushed
        assert problems == [flushed, None]
        assert (count, text) == (41, "partial")
        with contextlib.closing(sqlite3.connect(file)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]

    def test_a_full_disk_is_named(self, file: Path) -> None:
        with contextlib.closing(sqlite3.connect(":memory:")) as connection:
            connection.execute("CREATE TABLE t (a)")
            connection.execute("PRAGMA max_page_count = 3")
            with pytest.raises(sqlite3.OperationalError) as caught:
                connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
        assert "the disk is full. Make room on the disk that holds" in str(explain(caught.value, file))

    def test_a_faulty_listener_doesnt_stop_saving(self, saved: Path) -> None:
        def report(problem: HistoryError | None) -> None:
            raise RuntimeError("the app has a bug")

        with History(saved, report=report) as history:
            history.rename_chat(123, "not there")
            chat_id = history.create_chat("Second")
            assert history.chat(chat_id).title == "Second"

    def test_one_refused_change_leaves_the_others(self, saved: Path) -> None:
        problems: list[HistoryError | None] = []
        with History(saved, report=problems.append) as history:
            history.create_chat("before")
            for refused in (123, 124):
                history.resume_answer(refused, "m")
            history.create_chat("after")
            assert [chat.title for chat in history.list_chats()] == ["after", "before", "Chat"]
        assert [str(problem) for problem in problems] == [
            "A change could not be saved: its answer was deleted in another window."
        ] * 2

    def test_after_closing(self, saved: Path) -> None:
        history = History(saved)
        history.close()
        for use in (
            lambda: history.create_chat("x"),
            lambda: history.grow_answer(1, "x"),
            history.list_chats,
            history.restore_tabs,
            history.flush,
        ):
            with pytest.raises(HistoryError, match="has been closed"):
                use()
