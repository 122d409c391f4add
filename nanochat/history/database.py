"""One SQLite file: opening, upgrading, connections, and errors as sentences. Knows no chats.

Write-ahead logging lets readers go on while the one writer writes, and ``synchronous=NORMAL`` waits for
the disk only at checkpoints: a killed process loses nothing that was committed, a power cut at most the
last transactions, and neither damages the file. Where the system can't have such a log, every transaction
waits for the disk instead (``synchronous=FULL``), for the same.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nanochat.errors import HistoryError
from nanochat.history.schema import APPLICATION_ID, MIGRATIONS, Migration
from nanochat.history.search import segmented

BUSY_TIMEOUT_S = 5.0
"""How long to wait for another process's transaction."""

_HEADER_BYTES = 100
"""Of a database file; the application's id is at 68."""

MIN_SQLITE = (3, 37, 0)
"""The first release with STRICT tables."""


def default_history_file() -> Path:
    """Where chats are saved: the user's data folder, or the one that ``NANOCHAT_DATA_DIR`` names."""
    if folder := os.environ.get("NANOCHAT_DATA_DIR"):
        return Path(os.path.expanduser(folder)) / "history.db"
    from platformdirs import user_data_path

    return user_data_path("nanochat") / "history.db"


class Database:
    """A connection for the writer and a pool of connections for readers.

    Without a path, everything lies in memory, in one connection that all share.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._write_lock = threading.Lock()
        self._pool_lock = threading.Lock()
        self._idle_readers: list[sqlite3.Connection] = []
        self._closed = False
        self._writer = self._connect()

    def prepare(
        self, is_in_use: Callable[[sqlite3.Connection], bool], migrations: Sequence[Migration] = MIGRATIONS
    ) -> None:
        """Bring the tables up to date. ``is_in_use`` tells whether another process has the file open.

        Raises:
            HistoryError: the file is another program's or a newer version's, or can't be upgraded now.
            sqlite3.Error: the file can't be read or written.
        """
        version = _look(self._writer, self._path, migrations)
        if self._path is not None:
            mode = self._writer.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            self._writer.execute(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")
        _migrate(self._writer, self._path, version, is_in_use, migrations)
        self._writer.execute("PRAGMA foreign_keys = ON")

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The writer's connection. In autocommit mode: begin and commit yourself."""
        with self._write_lock:
            yield self._writer

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection of one's own; in memory, the writer's."""
        if self._path is None:
            with self.writing() as connection:
                yield connection
            return
        with self._pool_lock:
            idle = self._idle_readers.pop() if self._idle_readers else None
        connection = idle if idle is not None else self._connect()
        if idle is None:
            connection.execute("PRAGMA query_only = ON")
        try:
            yield connection
        finally:
            with self._pool_lock:
                if self._closed:
                    connection.close()
                else:
                    self._idle_readers.append(connection)

    def close(self) -> None:
        """Close all connections but those being read from, which close when they are given back."""
        with self._pool_lock:
            self._closed = True
            readers, self._idle_readers = self._idle_readers, []
        for connection in readers:
            connection.close()
        # Last: closing the last connection of all folds the log into the file.
        self._writer.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path if self._path is not None else ":memory:",
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,  # each is used by one thread at a time
        )
        _add_functions(connection)
        return connection


def _add_functions(connection: sqlite3.Connection) -> None:
    """What the tables' triggers call."""
    connection.create_function("segmented", 1, segmented, deterministic=True)


def claim_file(path: Path) -> None:
    """Make the file for the user alone if it is none yet or ours, and leave any other as it is.

    Raises:
        HistoryError: it is another program's database.
        sqlite3.Error: it is no database, or can't be read.
        OSError: it can't be read or made.
    """
    _refuse_foreign_file(path)
    create_private(path)


def _refuse_foreign_file(path: Path) -> None:
    """See whether a file is ours, or none yet, without a trace on it or beside it."""
    if not path.is_file():  # none yet, or something that no database can be made of
        return
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if not header or int.from_bytes(header[68:72]) == APPLICATION_ID:
        return
    # What it is may stand in its log only. Without a log, none is to be made; and a transaction that was cut
    # short can only be seen by who may take it back.
    if path.with_name(f"{path.name}-journal").exists():
        how = "mode=rw"
    else:
        how = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    uri = f"{path.absolute().as_uri()}?{how}"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S)) as connection:
        _look(connection, path, MIGRATIONS)


def create_private(path: Path) -> None:
    """Make the file and its folder, for the user alone; SQLite gives its other files the same mode.

    A folder that is there already keeps its mode.

    Raises:
        OSError: it can't be made.
    """
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    if path.stat().st_mode & 0o077:
        path.chmod(0o600)


def _migrate(
    connection: sqlite3.Connection,
    path: Path | None,
    version: int,
    is_in_use: Callable[[sqlite3.Connection], bool],
    migrations: Sequence[Migration],
) -> None:
    if version == len(migrations):
        return
    if version and path is not None:
        if is_in_use(connection):
            raise HistoryError(
                f"The chat history {path} must be upgraded, but another nanochat has it open; "
                "close that one, then start again."
            )
        _back_up(connection, path.with_name(f"{path.name}.v{version}.backup"))
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statements in migrations[version:]:
            for statement in statements:
                connection.execute(statement)
        if connection.execute("PRAGMA foreign_key_check").fetchone() is not None:
            raise sqlite3.IntegrityError("the upgrade left a message without its chat")
        connection.execute(f"PRAGMA user_version = {len(migrations)}")
        connection.execute("COMMIT")
    except BaseException:
        roll_back(connection)
        raise


def _look(connection: sqlite3.Connection, path: Path | None, migrations: Sequence[Migration]) -> int:
    """The version of tables that are ours, and as we made them; changes nothing."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    _refuse_foreign(connection, path, version, len(migrations))
    _refuse_altered(connection, path, migrations[:version])
    return version


def _refuse_foreign(connection: sqlite3.Connection, path: Path | None, version: int, known: int) -> None:
    if version > known:
        raise HistoryError(
            f"The chat history {path} was written by a newer nanochat (its format is {version}, this one "
            f"knows {known}). Update nanochat, or set NANOCHAT_DATA_DIR to another folder."
        )
    is_ours = connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID
    is_empty = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    if not (is_ours if version else is_empty):
        raise HistoryError(
            f"{path} is a database of another program. Move it away, or set NANOCHAT_DATA_DIR to "
            "another folder."
        )


def _refuse_altered(
    connection: sqlite3.Connection, path: Path | None, migrations: Sequence[Migration]
) -> None:
    """Tables, views and triggers must be those that nanochat made: any other could run without end, or change
    what is saved.
    """
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as fresh:
        _add_functions(fresh)
        for statement in itertools.chain.from_iterable(migrations):
            fresh.execute(statement)
        expected = _schema(fresh)
    if _schema(connection) != expected:
        raise HistoryError(
            f"The chat history {path} has been altered by another program. Move it away, or set "
            "NANOCHAT_DATA_DIR to another folder."
        )


def _schema(connection: sqlite3.Connection) -> set[tuple[str, str, str, str]]:
    """Every table, index, view and trigger with its definition; only the names of those that SQLite makes."""
    rows = connection.execute("SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_schema").fetchall()
    return {
        (kind, name, table, "" if name.startswith("message_index_") else " ".join(sql.split()))
        for kind, name, table, sql in rows
        if not name.startswith("sqlite_")
    }


def _back_up(connection: sqlite3.Connection, target: Path) -> None:
    """Copy the whole database; the copy has its name only once it is complete."""
    unfinished = target.with_name(f"{target.name}.part")
    unfinished.unlink(missing_ok=True)
    create_private(unfinished)
    with contextlib.closing(sqlite3.connect(unfinished)) as copy:
        connection.backup(copy)
    unfinished.replace(target)


def roll_back(connection: sqlite3.Connection) -> None:
    """Undo the open transaction, if SQLite hasn't done so itself after an error."""
    # If even this fails, the next BEGIN does too, with the reason that the caller is about to report.
    with contextlib.suppress(sqlite3.Error):
        if connection.in_transaction:
            connection.execute("ROLLBACK")


_UNAVAILABLE = {
    sqlite3.SQLITE_FULL: "the disk is full. Make room on the disk that holds {path}",
    sqlite3.SQLITE_READONLY: "{path} is read-only. Allow writing to it and to its folder",
    sqlite3.SQLITE_PERM: "{path} may not be opened. Allow reading and writing it and its folder",
    sqlite3.SQLITE_CANTOPEN: "{path} can't be opened. Allow reading and writing it and its folder",
    sqlite3.SQLITE_BUSY: "another program has locked {path}. Close it",
    sqlite3.SQLITE_LOCKED: "another program has locked {path}. Close it",
    sqlite3.SQLITE_PROTOCOL: "another program has locked {path}. Close it",
    sqlite3.SQLITE_IOERR: "the disk that holds {path} reports an error. Check the disk and the space left on it",
    sqlite3.SQLITE_NOMEM: "there is no memory left. Close other programs",
    sqlite3.SQLITE_CORRUPT: "{path} is damaged. Move it away to begin a new one",
    sqlite3.SQLITE_NOTADB: "{path} is damaged or no database. Move it away to begin a new one",
}


def is_unavailable(error: BaseException) -> bool:
    """Whether the file can't be used now, rather than that the statement was wrong."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF in _UNAVAILABLE


def explain(error: Exception, path: Path | None) -> HistoryError:
    """The error as a sentence that says what to do."""
    if isinstance(error, HistoryError):
        return error
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    if code in _UNAVAILABLE:
        return HistoryError(f"The chat history can't be used: {_UNAVAILABLE[code].format(path=path)}.")
    if code == sqlite3.SQLITE_CONSTRAINT:
        return HistoryError(
            "A change to a chat could not be saved: the chat, or the message that it follows, was deleted "
            "in another window. /copy all still takes what this window shows."
        )
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return HistoryError(
            f"The chat history {path} can't be used: {reason}. Set NANOCHAT_DATA_DIR to a folder that "
            "can be written."
        )
    return HistoryError(f"The chat history {path} can't be used: {error}.")


@contextlib.contextmanager
def explaining(path: Path | None) -> Iterator[None]:
    """Turn errors of SQLite and of the file system into :class:`HistoryError`."""
    try:
        yield
    except (sqlite3.Error, OSError, ValueError) as error:
        raise explain(error, path) from error


def require_sqlite() -> None:
    """Refuse a SQLite that lacks what the tables need.

    Raises:
        HistoryError: it is too old.
    """
    if sqlite3.sqlite_version_info < MIN_SQLITE:
        needed = ".".join(map(str, MIN_SQLITE))
        raise HistoryError(
            f"Saving chats needs SQLite {needed} or newer, and this Python has {sqlite3.sqlite_version}. "
            "Use a newer Python."
        )
