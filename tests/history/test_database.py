"""Files that can't be opened, upgraded or read: a sentence each, and nothing lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanochat.errors import HistoryError
from nanochat.history import History
from nanochat.history import sessions as sessions_module
from nanochat.history.database import Database
from nanochat.history.schema import MIGRATIONS
from nanochat.history.search import segmented

VERSION = len(MIGRATIONS)
UPGRADE = (*MIGRATIONS, ("ALTER TABLE chats ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0",))


def upgrade(file: Path, migrations: tuple[tuple[str, ...], ...], *, is_in_use: bool = False) -> None:
    database = Database(file)
    try:
        database.prepare(lambda connection: is_in_use, migrations)
    finally:
        database.close()


def user_version(file: Path) -> int:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        return connection.execute("PRAGMA user_version").fetchone()[0]


def traces(folder: Path) -> dict[str, bytes]:
    """Every file but the log's index, in which readers note where they are."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith("-shm")}


class TestPermissions:
    def test_only_the_user_may_read(self, file: Path) -> None:
        old = os.umask(0)
        try:
            with History(file) as history:
                history.create_chat("Chat")
                history.flush()
                modes = {path.name: path.stat().st_mode & 0o777 for path in file.parent.iterdir()}
        finally:
            os.umask(old)
        assert file.parent.stat().st_mode & 0o777 == 0o700
        assert {"history.db", "history.db-wal", "history.db-shm"} <= set(modes)
        assert set(modes.values()) == {0o600}

    def test_an_open_file_is_closed_to_others_and_a_users_folder_is_left_alone(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o755)
        (tmp_path / "history.db").touch(0o644)
        History(tmp_path / "history.db").close()
        assert (tmp_path / "history.db").stat().st_mode & 0o777 == 0o600
        assert tmp_path.stat().st_mode & 0o777 == 0o755

    def test_closing_leaves_no_files_but_the_database(self, saved: Path) -> None:
        assert sorted(path.name for path in saved.parent.iterdir()) in (
            ["history.db"],
            ["history.db", "history.db-lock"],
        )


class TestUpgrade:
    def test_a_copy_is_made_first(self, saved: Path) -> None:
        upgrade(saved, UPGRADE)
        assert user_version(saved) == VERSION + 1
        copy = saved.with_name(f"history.db.v{VERSION}.backup")
        assert copy.stat().st_mode & 0o777 == 0o600
        assert not list(saved.parent.glob("*.part"))
        assert user_version(copy) == VERSION
        with History(copy) as history:
            (chat,) = history.list_chats()
            assert [message.text for message in history.path(chat.id)] == ["Hello"]

    def test_words_saved_by_the_first_version_are_found_after_the_upgrade(self, file: Path) -> None:
        file.parent.mkdir()
        upgrade(file, MIGRATIONS[:1])
        with contextlib.closing(sqlite3.connect(file)) as connection:
            connection.create_function("segmented", 1, segmented)
            connection.execute(
                "INSERT INTO chats (id, title, model, sampling, created_at, updated_at) VALUES (1, 'a', '', '{}', 1, 1)"
            )
            for number, (state, text) in enumerate(
                [("complete", "Vulkane \u706b\u5c71"), ("streaming", "Vesuv")]
            ):
                connection.execute(
                    "INSERT INTO messages (id, chat_id, role, state, text, token_ids, model, metrics, created_at) "
                    "VALUES (?, 1, 'assistant', ?, ?, x'', '', '{}', 1)",
                    (number + 1, state, text),
                )
            connection.commit()
        with History(file) as history:
            assert user_version(file) == VERSION
            assert [hit.message_id for hit in history.search("v")] == [1]
            assert [hit.message_id for hit in history.search("\u706b")] == [1]
            history.delete_chat(1)
            assert history.search("v") == []

    def test_a_file_from_before_drafts_can_keep_them_after_the_upgrade(self, file: Path) -> None:
        file.parent.mkdir()
        upgrade(file, MIGRATIONS[:2])
        with History(file) as history:
            chat_id = history.create_chat("Chat")
            history.drafts.keep(chat_id, "draft")
            history.save_tabs([chat_id])
            assert [chat.draft for chat in history.restore_tabs()] == ["draft"]
        assert user_version(file.with_name("history.db.v2.backup")) == 2

    @pytest.mark.parametrize(("dropped", "left_out"), [(0, None), (1, 12), (2, 16), (9, 16)])
    def test_turns_left_out_by_number_are_those_of_the_active_path(
        self, file: Path, dropped: int, left_out: int | None
    ) -> None:
        file.parent.mkdir()
        upgrade(file, MIGRATIONS[:3])
        # Of the second question, the older branch is the active one; of the third, none is known to be.
        parents = {11: None, 12: 11, 13: 12, 14: 12, 15: 14, 16: 13, 17: 16, 18: 16}
        users, active = {11, 13, 14, 17, 18}, {11: 12, 12: 13, 13: 16, 16: 99}
        with contextlib.closing(sqlite3.connect(file)) as connection:
            connection.create_function("segmented", 1, segmented)
            connection.execute(
                "INSERT INTO chats (id, title, model, sampling, dropped_turns, created_at, updated_at, active_child_id) "
                "VALUES (1, 'a', '', '{}', ?, 1, 1, 11)",
                (dropped,),
            )
            connection.executemany(
                "INSERT INTO messages (id, chat_id, parent_id, active_child_id, role, state, text, token_ids, model, "
                "metrics, created_at) VALUES (?, 1, ?, ?, ?, 'complete', '', x'', '', '{}', 1)",
                [
                    (number, parent, active.get(number), "user" if number in users else "assistant")
                    for number, parent in parents.items()
                ],
            )
            connection.commit()
        with History(file) as history:
            assert [message.id for message in history.path(1)] == [11, 12, 13, 16, 18]
            assert history.chat(1).left_out_id == left_out
            copy_id, copies = history.fork_chat(1, [11, 12], "Fork")
            assert history.chat(copy_id).left_out_id == (copies[1] if left_out == 12 else None)
        assert user_version(file.with_name("history.db.v3.backup")) == 3

    def test_what_is_only_in_the_log_is_copied_too(self, file: Path) -> None:
        history = History(file)
        history.create_chat("in the log")
        history.flush()
        upgrade(file, UPGRADE)
        with contextlib.closing(sqlite3.connect(file.with_name(f"history.db.v{VERSION}.backup"))) as copy:
            assert copy.execute("SELECT title FROM chats").fetchall() == [("in the log",)]
        history.close()

    def test_a_newer_file_is_refused_and_untouched(self, saved: Path) -> None:
        upgrade(saved, UPGRADE)
        before = saved.read_bytes()
        told = rf"its format is {VERSION + 1}, this one knows {VERSION}\)\. Update nanochat"
        with pytest.raises(HistoryError, match=told):
            History(saved)
        assert saved.read_bytes() == before

    @pytest.mark.parametrize(
        "statement",
        ["CREATE TABLE chats (id)", "UPDATE messages SET chat_id = 99"],
        ids=["a statement fails", "a message loses its chat"],
    )
    def test_a_failed_upgrade_changes_nothing(self, saved: Path, statement: str) -> None:
        with pytest.raises(sqlite3.Error):
            upgrade(saved, (*UPGRADE, (statement,)))
        assert user_version(saved) == VERSION
        with History(saved) as history:
            assert len(history.search("Hello")) == 1

    def test_not_while_another_process_has_it_open(self, saved: Path) -> None:
        with pytest.raises(HistoryError, match="another nanochat has it open"):
            upgrade(saved, UPGRADE, is_in_use=True)
        assert user_version(saved) == VERSION

    def test_another_programs_database_is_refused(self, tmp_path: Path) -> None:
        for version in (0, 1):
            path = tmp_path / f"{version}.db"
            with contextlib.closing(sqlite3.connect(path)) as connection:
                connection.execute("CREATE TABLE theirs (a)")
                connection.execute(f"PRAGMA user_version = {version}")
            with pytest.raises(HistoryError, match="a database of another program"):
                History(path)

    @pytest.mark.parametrize("mode", ["delete", "wal"])
    @pytest.mark.parametrize("is_open", [False, True])
    def test_and_left_as_it_is(self, tmp_path: Path, mode: str, is_open: bool) -> None:
        path = tmp_path / "history.db"
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA journal_mode = {mode}")
            connection.execute("CREATE TABLE theirs (a)")
            path.chmod(0o664)
            if not is_open:
                connection.close()
            before = traces(tmp_path)
            with pytest.raises(HistoryError, match="a database of another program"):
                History(path)
            assert traces(tmp_path) == before
            assert path.stat().st_mode & 0o777 == 0o664

    def test_a_first_start_that_was_cut_short_is_taken_up(self, file: Path) -> None:
        """Its tables are not made yet, or stand in the log alone."""
        file.parent.mkdir()
        with contextlib.closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
        copies = [file.with_name(name) for name in ("copy.db", "copy.db-wal")]
        with History(file) as history:
            history.create_chat("Chat")
            history.flush()
            for original, copy in zip((file, file.with_name("history.db-wal")), copies, strict=True):
                shutil.copy(original, copy)
        assert copies[0].read_bytes()[68:72] == bytes(4)
        with History(copies[0]) as history:
            assert [chat.title for chat in history.list_chats()] == ["Chat"]

    def test_where_there_can_be_no_log_every_transaction_waits_for_the_disk(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file.parent.mkdir()
        connect = sqlite3.connect

        def connect_without(path: Path, **options: object) -> sqlite3.Connection:
            return connect(f"file:{path}?vfs=unix-dotfile", uri=True, **options)  # type: ignore[call-overload]

        for connection_of, modes in ((connect, ("wal", 1)), (connect_without, ("delete", 2))):
            monkeypatch.setattr(sqlite3, "connect", connection_of)
            database = Database(file.with_name(modes[0]))
            monkeypatch.setattr(sqlite3, "connect", connect)
            database.prepare(lambda connection: False)
            with database.writing() as connection:
                found = [
                    connection.execute(f"PRAGMA {name}").fetchone()[0]
                    for name in ("journal_mode", "synchronous")
                ]
            assert tuple(found) == modes
            database.close()

    def test_an_old_sqlite_is_refused(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
        with pytest.raises(HistoryError, match=r"needs SQLite 3\.37\.0 or newer"):
            History(file)
        assert not file.exists()


class TestCannotOpen:
    @pytest.mark.parametrize("size", [1, 100, 5000, 100_000])
    def test_garbage(self, file: Path, size: int) -> None:
        file.parent.mkdir()
        file.write_bytes(b"garbage!" * size)
        with pytest.raises(HistoryError, match=r"history\.db is damaged or no database\. Move it away"):
            History(file)
        assert file.read_bytes() == b"garbage!" * size

    def test_damaged_pages(self, saved: Path) -> None:
        content = bytearray(saved.read_bytes())
        content[4096:] = b"\xff" * (len(content) - 4096)
        saved.write_bytes(content)
        with pytest.raises(HistoryError, match="is damaged"):
            History(saved)

    def test_a_damaged_page_found_while_reading(self, file: Path) -> None:
        with History(file) as history:
            chat_id = history.create_chat("Chat")
            for number in range(200):
                history.add_message(chat_id, None, f"marker{number} " * 100)
        content = bytearray(file.read_bytes())
        for page in range(4096, len(content), 4096):
            if b"marker100 marker100" in content[page : page + 4096]:
                content[page : page + 4096] = b"\xff" * 4096
        file.write_bytes(content)
        with History(file) as history, pytest.raises(HistoryError, match="is damaged"):
            history.tree(chat_id)

    def test_values_that_are_no_json(self, saved: Path) -> None:
        with contextlib.closing(sqlite3.connect(saved)) as connection:
            connection.execute("UPDATE chats SET sampling = '[]'")
            connection.commit()
        with History(saved) as history, pytest.raises(HistoryError, match="can't be used: no JSON object"):
            history.list_chats()

    def test_a_folder_in_its_place(self, file: Path) -> None:
        file.mkdir(parents=True)
        with pytest.raises(HistoryError, match="Set NANOCHAT_DATA_DIR"):
            History(file)

    def test_a_file_in_its_folders_place(self, file: Path) -> None:
        file.parent.write_text("")
        with pytest.raises(HistoryError, match="Set NANOCHAT_DATA_DIR"):
            History(file)

    def test_locked(self, saved: Path, impatient: None) -> None:
        with contextlib.closing(sqlite3.connect(saved)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(HistoryError, match="another program has locked"):
                History(saved)
            other.rollback()
        History(saved).close()

    def test_another_process_is_opening(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sessions_module, "OPENING_TIMEOUT_S", 0.05)
        with (
            sessions_module.Sessions(saved).opening(),
            pytest.raises(HistoryError, match="still opening"),
        ):
            History(saved)

    @pytest.mark.parametrize("folder_mode", [0o555, 0o755])
    def test_read_only(self, saved: Path, folder_mode: int) -> None:
        with readable_by_all() as folder:
            path = folder / "history.db"
            shutil.copy(saved, path)
            path.chmod(0o444)
            folder.chmod(folder_mode)
            sentence = run_without_privileges(
                f"History(Path({str(path)!r}))", f"History(Path({str(folder / 'new' / 'history.db')!r}))"
            )
            folder.chmod(0o755)
        assert len(sentence) == 2
        assert all("can't be used: Permission denied. Set NANOCHAT_DATA_DIR" in line for line in sentence)


@contextlib.contextmanager
def readable_by_all() -> Iterator[Path]:
    """pytest's own folders may be entered only by their owner."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def run_without_privileges(*expressions: str) -> list[str]:
    """The error of each expression, in a process that isn't root's."""
    code = (
        "import os\nfrom pathlib import Path\nfrom nanochat.errors import HistoryError\n"
        "from nanochat.history import History\nif os.getuid() == 0: os.setuid(65534)\n"
    )
    for expression in expressions:
        code += f"try: {expression}\nexcept HistoryError as error: print(error)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
