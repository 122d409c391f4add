"""The history as its users meet it: plain values in, plain values out, from any thread.

Changes return at once; a thread saves them (see :mod:`nanochat.history.writer`). Reading waits until
earlier changes are saved, then reads on a connection of its own: call it from a worker thread where a slow
disk must not be felt.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nanochat.errors import HistoryError
from nanochat.history import changes, queries, transfer
from nanochat.history.database import Database, claim_file, explain, explaining, require_sqlite
from nanochat.history.drafts import Drafts, claim_drafts
from nanochat.history.records import (
    Chat,
    Message,
    SearchHit,
    encode_mapping,
    encode_token_ids,
    storable_or_none,
    storable_text,
)
from nanochat.history.rows import ChatRow, MessageRow, imported_rows
from nanochat.history.sessions import Sessions
from nanochat.history.writer import Report, Writer

SAVE_INTERVAL_S = 0.5
"""How long the text of a growing answer may wait before it is saved."""
WAIT_S = 10.0
"""How long a call that needs an answer waits for the disk."""

_IDS_PER_SESSION = 2**24


def _ignore(_: HistoryError | None) -> None:
    """The listener for those who only care for the error of :meth:`History.close`."""


class History:
    """All chats of a user; many processes may have the same file open.

    A chat's messages form a tree: answering again or editing a question adds a sibling. Each message
    remembers which of its children the active path goes through, so that walking to another branch and
    back finds everything as it was.

    Args:
        path: the database; it and its folder are made if they aren't there. None: keep everything in
            memory only.
        report: called on another thread with an error when saving begins to fail (what isn't saved stays
            queued and is saved once that works again) or one change is refused for good, and with None when
            saving works again. It must not call the history.
        save_interval_s: how long the text of a growing answer may wait before it is saved.

    Every method raises :class:`HistoryError` after :meth:`close`.

    Raises:
        HistoryError: the file can't be opened, is damaged, or was written by a newer version.
    """

    def __init__(
        self, path: Path | None, *, report: Report = _ignore, save_interval_s: float = SAVE_INTERVAL_S
    ) -> None:
        self._path = path
        self._sessions = Sessions(path)
        with explaining(path):
            self._database = self._open()
        first_id = self._sessions.own_id * _IDS_PER_SESSION
        self._ids = itertools.count(first_id)
        self._id_limit = first_id + _IDS_PER_SESSION
        self._is_closed = False
        self._writer = Writer(
            self._database,
            functools.partial(explain, path=path),
            changes.grow_answer,
            report,
            save_interval_s,
        )
        self.drafts = Drafts(self._writer, self._sessions.own_id)
        """What stands in the prompts of this session's tabs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_failing(self) -> bool:
        """Whether changes wait, because the file can't be written."""
        return self._writer.is_failing

    def flush(self, timeout_s: float = WAIT_S) -> None:
        """Wait until everything so far is saved.

        Raises:
            HistoryError: it can't be saved now, or not in time; it stays queued.
        """
        self._writer.call(lambda connection: None, timeout_s)

    def close(self, timeout_s: float = WAIT_S) -> None:
        """Save everything, mark answers that still stream as interrupted, and let the file go. Idempotent.

        Raises:
            HistoryError: something could not be saved, and is lost.
        """
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + timeout_s
        problem: HistoryError | str = "The disk didn't answer in time."
        try:
            self._writer.call(functools.partial(self._sessions.end_dead, and_own=True), timeout_s)
        except HistoryError as error:
            # If all else can be saved after all, the next start marks what streamed just as well.
            problem = error
        unsaved = self._writer.stop(max(0.0, deadline - time.monotonic()))
        self._sessions.release()
        if not self._writer.is_running:
            self._database.close()
        if unsaved:
            what = "1 change" if unsaved == 1 else f"{unsaved} changes"
            raise HistoryError(f"{what} to your chats could not be saved. {problem}")

    # Chats

    def create_chat(
        self,
        title: str,
        *,
        system: str | None = None,
        model: str = "",
        sampling: Mapping[str, Any] | None = None,
    ) -> int:
        """A new chat without messages; returns its id."""
        now = time.time()
        row = ChatRow(
            id=self._next_id(),
            title=storable_text(title),
            system=storable_or_none(system),
            model=storable_text(model),
            sampling=encode_mapping(sampling or {}),
            left_out_id=None,
            created_at=now,
            updated_at=now,
        )
        self._submit(changes.insert_chat, row)
        return row.id

    def rename_chat(self, chat_id: int, title: str) -> None:
        self._submit(changes.rename_chat, chat_id, storable_text(title))

    def configure_chat(
        self,
        chat_id: int,
        *,
        system: str | None,
        model: str,
        sampling: Mapping[str, Any],
        left_out_id: int | None = None,
    ) -> None:
        """Replace a chat's settings."""
        self._submit(
            changes.configure_chat,
            chat_id,
            storable_or_none(system),
            storable_text(model),
            encode_mapping(sampling),
            left_out_id,
        )

    def delete_chat(self, chat_id: int, *, wait: bool = True) -> None:
        """Delete a chat with all its messages.

        Raises:
            HistoryError: another process has it open, or it can't be deleted now. Not if it needn't ``wait``.
        """

        def delete(connection: sqlite3.Connection) -> None:
            alive = filter(self._sessions.is_alive, self._sessions.others(connection))
            changes.delete_chat(connection, chat_id, alive)

        if wait:
            self._writer.call(delete, WAIT_S)
        else:
            self._writer.submit(delete)

    def clear_chat(self, chat_id: int) -> None:
        """Delete all messages of a chat and keep the chat."""
        self._submit(changes.clear_chat, chat_id, time.time())

    def fork_chat(self, chat_id: int, message_ids: Sequence[int], title: str) -> tuple[int, list[int]]:
        """A new chat with the settings of another and copies of a path of its messages, oldest first.

        An answer that still streams is copied as interrupted.

        Returns:
            The new chat's id, and the copies' ids in the order of ``message_ids``.
        """
        copy_id = self._next_id()
        copies = [(message_id, self._next_id()) for message_id in message_ids]
        self._submit(changes.fork_chat, chat_id, copy_id, storable_text(title), copies, time.time())
        return copy_id, [message_copy_id for _, message_copy_id in copies]

    def chat(self, chat_id: int) -> Chat:
        """One chat.

        Raises:
            HistoryError: it isn't there, or can't be read.
        """
        with self._reading() as connection:
            return queries.chat(connection, chat_id)

    def list_chats(self, limit: int = 100, after: Chat | None = None) -> list[Chat]:
        """Chats, last used first. For the next page, name the last chat of this one."""
        with self._reading() as connection:
            return queries.list_chats(connection, limit, after)

    # Tabs

    def save_tabs(self, chat_ids: Iterable[int], in_view: int | None = None) -> None:
        """These chats are open in tabs, in this order, one of them in view; all others are closed."""
        self._submit(changes.save_tabs, self._sessions.own_id, tuple(chat_ids), in_view)

    def restore_tabs(self) -> list[Chat]:
        """Take over the tabs of sessions that have ended, in their order and with drafts; now they are this session's.

        Tabs of other running processes stay theirs. Call it once, before :meth:`save_tabs`; waits for the
        disk.
        """

        def claim(connection: sqlite3.Connection) -> list[Chat]:
            self._sessions.end_dead(connection)
            chat_ids = changes.claim_tabs(connection, self._sessions.own_id)
            drafts = claim_drafts(connection, self._sessions.own_id, chat_ids)
            chats = [queries.chat(connection, chat_id) for chat_id in chat_ids]
            return [dataclasses.replace(chat, draft=drafts.get(chat.id, "")) for chat in chats]

        return self._writer.call(claim, WAIT_S)

    # Messages

    def add_message(self, chat_id: int, parent_id: int | None, text: str) -> int:
        """Add a user's message and choose its branch; returns its id.

        Args:
            parent_id: the answer that it follows; None if it begins the chat.
        """
        row = MessageRow(
            self._next_id(), chat_id, parent_id, "user", "complete", storable_text(text), time.time()
        )
        return self._add(row)

    def begin_answer(self, chat_id: int, parent_id: int | None, model: str = "") -> int:
        """Add an answer that streams from now on and choose its branch; returns its id."""
        row = MessageRow(self._next_id(), chat_id, parent_id, "assistant", "streaming", "", time.time())
        return self._add(row._replace(model=storable_text(model), session_id=self._sessions.own_id))

    def grow_answer(self, message_id: int, text: str, token_ids: Sequence[int] = ()) -> None:
        """Add text and ids to an answer that streams. Cheap: many calls make one write."""
        self._writer.grow(message_id, storable_text(text), token_ids)

    def finish_answer(
        self,
        message_id: int,
        *,
        text: str,
        token_ids: Sequence[int],
        finish_reason: str,
        error: str | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """An answer has ended; this is the whole of it. With ``error``, a sentence, it has failed."""
        finish = functools.partial(
            changes.finish_answer,
            message_id=message_id,
            state="complete" if error is None else "error",
            text=storable_text(text),
            token_ids=encode_token_ids(token_ids),
            finish_reason=storable_text(finish_reason),
            error=storable_or_none(error),
            metrics=encode_mapping(metrics or {}),
            now=time.time(),
        )
        self._writer.submit(finish)

    def resume_answer(self, message_id: int, model: str) -> None:
        """An answer that was interrupted, or that waited for its model, streams after the text that it has."""
        self._submit(changes.resume_answer, message_id, self._sessions.own_id, storable_text(model))

    def delete_message(self, message_id: int) -> None:
        """Delete a message and all that follow it."""
        self._submit(changes.delete_message, message_id)

    def activate(self, message_id: int) -> None:
        """Make the chat's active path go through a message: another branch, or one found by a search."""
        self._submit(changes.activate, message_id)

    def path(self, chat_id: int) -> list[Message]:
        """The active path of a chat, oldest first.

        Raises:
            HistoryError: the chat isn't there, or can't be read.
        """
        return queries.active_path(self.tree(chat_id))

    def tree(self, chat_id: int) -> list[Message]:
        """All messages of a chat: parents before children, siblings from oldest to newest.

        Raises:
            HistoryError: the chat isn't there, or can't be read.
        """
        with self._reading() as connection:
            return queries.tree(connection, chat_id, self._sessions.is_alive)

    def siblings(self, message_id: int) -> list[int]:
        """Ids of a message and its siblings, oldest first; empty if it isn't there."""
        with self._reading() as connection:
            return queries.siblings(connection, message_id)

    def search(self, query: str, limit: int = 50) -> list[SearchHit]:
        """Titles, then messages from newest to oldest, that have words beginning with all of the query's."""
        with self._reading() as connection:
            return queries.search(connection, storable_text(query), limit)

    # Files

    def export_markdown(self, chat_id: int) -> str:
        """The active path, to read. Control characters are replaced by visible ones, and invisible ones left out."""
        return transfer.to_markdown(self.chat(chat_id), self.path(chat_id))

    def export_json(self, chat_id: int) -> str:
        """The whole chat with all branches, to keep or to import elsewhere."""
        return transfer.to_json(self.chat(chat_id), self.tree(chat_id))

    def import_json(self, data: str | bytes) -> int:
        """Add an exported chat as a new one; returns its id. Waits for the disk.

        Raises:
            HistoryError: the data isn't an exported chat, or it can't be saved now; nothing was added.
        """
        chat, messages = transfer.parse_json(data)
        chat_row, rows, active = imported_rows(chat, messages, self._next_id)
        self._writer.call(lambda connection: changes.import_chat(connection, chat_row, rows, active), WAIT_S)
        return chat_row.id

    def _open(self) -> Database:
        require_sqlite()
        if self._path is not None:
            claim_file(self._path)
        with self._sessions.opening():
            database = Database(self._path)
            try:
                database.prepare(self._sessions.any_other_alive)
                with database.writing() as connection:
                    self._sessions.begin(connection)
            except BaseException:
                database.close()
                self._sessions.release()
                raise
        return database

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        if self._is_closed:
            raise HistoryError("The chat history has been closed.")
        # If earlier changes can't be saved, what is on the disk is still worth showing; the listener
        # is told of the failure.
        with suppress(HistoryError):
            self._writer.settle(WAIT_S)
        with explaining(self._path), self._database.reading() as connection:
            yield connection

    def _add(self, message: MessageRow) -> int:
        self._submit(changes.insert_message, message)
        return message.id

    def _submit(self, change: Callable[..., object], *values: object) -> None:
        self._writer.submit(lambda connection: change(connection, *values))

    def _next_id(self) -> int:
        new_id = next(self._ids)
        if new_id >= self._id_limit:
            raise HistoryError("This session has made too many messages; close nanochat and start it again.")
        return new_id
