"""The thread that writes: changes queue up here, so that no caller waits for the disk.

What is queued is saved in order, in one transaction at a time. While the file can't be written (a full
disk, another program's lock) everything stays queued, is tried again every few seconds, and is saved once
it can be. Knows nothing of chats.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nanochat.errors import HistoryError
from nanochat.history.database import Database, is_unavailable, roll_back

T = TypeVar("T")
Report = Callable[[HistoryError | None], None]

RETRY_S = 2.0
"""Pause after the file couldn't be written."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Change:
    run: Callable[[sqlite3.Connection], Any]
    future: Future[Any] | None = None
    """Set if someone waits for the result; it then fails at once rather than being tried again."""

    def is_wanted(self) -> bool:
        """False if the caller has stopped waiting, and was told that nothing happened."""
        future = self.future
        return future is None or future.running() or future.set_running_or_notify_cancel()


@dataclass(slots=True, eq=False)
class Growth:
    """What an answer has grown by since it was last saved."""

    message_id: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class Writer:
    """Owns the writing connection and its thread, from the first call until :meth:`stop`.

    Args:
        explain: turns an error into a sentence.
        save_growth: writes what an answer has grown by.
        report: called on the writer's thread with an error when saving begins to fail or a change is
            refused for good, and with None when saving works again.
        interval_s: how long growth may wait, so that many small pieces make one write.
    """

    def __init__(
        self,
        database: Database,
        explain: Callable[[Exception], HistoryError],
        save_growth: Callable[[sqlite3.Connection, Growth], None],
        report: Report,
        interval_s: float,
    ) -> None:
        self._database = database
        self._explain = explain
        self._save_growth = save_growth
        self._report = report
        self._interval_s = interval_s
        self._condition = threading.Condition()
        # Guarded by the condition:
        self._queue: deque[_Change] = deque()
        self._growing: dict[int, Growth] = {}
        """Growth in the queue that no later change follows, by message: more can be added to it."""
        self._due = math.inf
        """When the queue is to be saved, on the monotonic clock."""
        self._problem: HistoryError | None = None
        self._is_saving = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="nanochat-history", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread may still use the connection."""
        return self._thread.is_alive()

    @property
    def is_failing(self) -> bool:
        """Whether what was to be saved last waits, because the file can't be written."""
        return self._problem is not None

    def submit(self, run: Callable[[sqlite3.Connection], object]) -> None:
        """Queue a change; never waits."""
        self._enqueue(_Change(run))

    def call(self, run: Callable[[sqlite3.Connection], T], timeout_s: float) -> T:
        """Make a change after all those queued before it, and wait for its result.

        Raises:
            HistoryError: it can't be made now, or not in time.
        """
        future: Future[T] = Future()
        self._enqueue(_Change(run, future))
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise HistoryError(
                f"The chat history didn't answer within {timeout_s:g} s. Check that its disk is well, "
                "and try again."
            ) from None

    def grow(self, message_id: int, text: str, token_ids: Sequence[int]) -> None:
        """Add to an answer; saved within the interval. Costs the caller next to nothing."""
        with self._condition:
            self._require_open()
            growth = self._growing.get(message_id)
            if growth is None:
                growth = self._new_growth(message_id)
            growth.texts.append(text)
            growth.token_ids.extend(token_ids)

    def _new_growth(self, message_id: int) -> Growth:
        growth = self._growing[message_id] = Growth(message_id)
        self._queue.append(_Change(lambda connection: self._save_growth(connection, growth)))
        self._schedule(time.monotonic() + self._interval_s)
        return growth

    def settle(self, timeout_s: float) -> None:
        """Wait until what was queued before is saved, unless saving is failing anyway."""
        with self._condition:
            if self._problem is not None or not (self._queue or self._is_saving):
                return
        self.call(lambda connection: None, timeout_s)

    def stop(self, timeout_s: float) -> int:
        """Save what is queued, end the thread, and return how many changes could not be saved."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join(timeout_s)
        with self._condition:
            return len(self._queue) + self._is_saving

    def _enqueue(self, change: _Change) -> None:
        with self._condition:
            self._require_open()
            self._growing.clear()
            self._queue.append(change)
            self._schedule(time.monotonic(), even_if_failing=change.future is not None)

    def _require_open(self) -> None:
        if self._stopping:
            raise HistoryError("The chat history has been closed.")

    def _schedule(self, when: float, *, even_if_failing: bool = False) -> None:
        if self._problem is not None and not even_if_failing:
            when = time.monotonic() + RETRY_S
        if when < self._due:
            self._due = when
            self._condition.notify()

    def _run(self) -> None:
        while True:
            batch, is_last = self._take()
            if batch:
                self._save(batch)
            if is_last:
                return

    def _take(self) -> tuple[list[_Change], bool]:
        """Wait until there is something to save; returns it, and whether the thread is to end after."""
        with self._condition:
            while not self._stopping and (wait := self._due - time.monotonic()) > 0:
                self._condition.wait(None if wait == math.inf else wait)
            batch = list(self._queue)
            self._queue.clear()
            self._growing.clear()
            self._due = math.inf
            self._is_saving = bool(batch)
            return batch, self._stopping

    def _save(self, batch: list[_Change]) -> None:
        results: list[tuple[_Change, Any, Exception | None]] = []
        with self._database.writing() as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                for change in batch:
                    if change.is_wanted():
                        results.append((change, *_apply(connection, change)))
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                roll_back(connection)
                self._put_back(batch, error)
                return
        with self._condition:
            recovered, self._problem, self._is_saving = self._problem is not None, None, False
        if recovered:
            self._tell(None)
        for change, result, refusal in results:
            self._deliver(change, result, refusal)

    def _put_back(self, batch: list[_Change], error: sqlite3.Error) -> None:
        problem = self._explain(error)
        kept = [change for change in batch if change.future is None]
        with self._condition:
            is_news = str(problem) != str(self._problem)
            self._problem, self._is_saving = problem, False
            self._queue.extendleft(reversed(kept))
            self._due = time.monotonic() + RETRY_S if self._queue else math.inf
            if any(change.future is not None for change in self._queue):
                self._due = time.monotonic()
        for change in batch:
            if change.future is not None and change.is_wanted():
                change.future.set_exception(problem)
        if is_news:
            self._tell(problem)

    def _deliver(self, change: _Change, result: object, error: Exception | None) -> None:
        if change.future is None:
            if error is not None:
                self._tell(self._explain(error))
        elif error is None:
            change.future.set_result(result)
        else:
            change.future.set_exception(self._explain(error))

    def _tell(self, problem: HistoryError | None) -> None:
        try:
            self._report(problem)
        except Exception:
            # The thread must outlive a faulty listener, or nothing would be saved any more.
            _logger.exception("the listener for problems with the chat history failed")


def _apply(connection: sqlite3.Connection, change: _Change) -> tuple[Any, Exception | None]:
    """Run one change; if it is refused, only itself is undone. An unusable file is raised."""
    connection.execute("SAVEPOINT change")
    try:
        result = change.run(connection)
    except Exception as error:
        if is_unavailable(error):
            raise
        connection.execute("ROLLBACK TO change")
        connection.execute("RELEASE change")
        return None, error
    connection.execute("RELEASE change")
    return result, None
