"""Which processes have the history open, so that one doesn't take another's answers for abandoned.

Each holds a locked file of its own beside the database; the system lets the lock go when the process
ends, however it ends. Unlike a process id, a lock is never reused, and it is seen from other containers.
Knows SQLite only to list the sessions.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from nanochat.errors import HistoryError

OPENING_TIMEOUT_S = 10.0
"""How long to wait while another process opens, and perhaps upgrades, the same database."""

PROBE_S = 0.02
"""How long to try a session's lock before it counts as held."""


class Sessions:
    """Sessions of one database. Without a path it is in memory, and ours is the only one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._own_lock: FileLock | None = None
        self.own_id = 0
        """Set by :meth:`begin`."""

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Held while a database is opened, so that two processes don't create or upgrade it at once.

        Raises:
            HistoryError: another process is taking long.
        """
        if self._path is None:
            yield
            return
        lock = _lock(self._path.with_name(f"{self._path.name}-lock"), OPENING_TIMEOUT_S)
        try:
            lock.acquire()
        except Timeout:
            raise HistoryError(
                f"Another nanochat is still opening {self._path}; try again in a moment."
            ) from None
        try:
            yield
        finally:
            lock.release()

    def begin(self, connection: sqlite3.Connection) -> None:
        """Make our session and forget dead ones. Others see ours only once its lock is held."""
        connection.execute("BEGIN IMMEDIATE")
        cursor = connection.execute("INSERT INTO sessions (started_at) VALUES (?)", (time.time(),))
        self.own_id = cursor.lastrowid or 0
        if self._path is not None:
            self._own_lock = _lock(self._lock_file(self.own_id), 0)
            self._own_lock.acquire()
        self.end_dead(connection)
        connection.execute("COMMIT")

    def release(self) -> None:
        """Let our lock go: from now on our session counts as ended."""
        if self._own_lock is not None:
            self._own_lock.release(force=True)
            self._own_lock = None
            _remove(self._lock_file(self.own_id))

    def is_alive(self, session_id: int | None) -> bool:
        """Whether that session's process still runs."""
        if session_id == self.own_id:
            return True
        if session_id is None or self._path is None:
            return False
        file = self._lock_file(session_id)
        if not file.exists():
            return False
        try:
            # Not at once: another process may be asking the same just now, and hold it for a moment.
            with _lock(file, PROBE_S):
                pass
        except Timeout:
            return True
        _remove(file)
        return False

    def others(self, connection: sqlite3.Connection) -> list[int]:
        """Ids of all other sessions on record, alive or not."""
        rows = connection.execute("SELECT id FROM sessions WHERE id <> ?", (self.own_id,)).fetchall()
        return [session_id for (session_id,) in rows]

    def any_other_alive(self, connection: sqlite3.Connection) -> bool:
        """Whether another process has the database open."""
        return any(map(self.is_alive, self.others(connection)))

    def end_dead(self, connection: sqlite3.Connection, *, and_own: bool = False) -> None:
        """Forget sessions whose process is gone; their unfinished answers become interrupted."""
        gone = [(session,) for session in self.others(connection) if not self.is_alive(session)]
        if and_own:
            gone.append((self.own_id,))
        connection.executemany("DELETE FROM sessions WHERE id = ?", gone)
        connection.execute(
            "UPDATE messages SET state = 'interrupted' WHERE state = 'streaming' "
            "AND session_id NOT IN (SELECT id FROM sessions)"
        )

    def _lock_file(self, session_id: int) -> Path:
        if self._path is None:
            raise ValueError("a database in memory has no lock files")
        return self._path.with_name(f"{self._path.name}-session-{session_id}")


def _lock(file: Path, timeout_s: float) -> FileLock:
    # Not tied to the thread that takes it: the app closes its history from another one.
    return FileLock(file, timeout=timeout_s, mode=0o600, thread_local=False, poll_interval=0.01)


def _remove(file: Path) -> None:
    # Its lock is what counts: an empty file that can't be removed does no harm.
    with contextlib.suppress(OSError):
        file.unlink(missing_ok=True)
