"""What has been written into a tab's prompt and not been sent. It is found by no search, and in no list.

Each session has drafts of its own: two that have the same chat open don't mix theirs.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping

from nanochat.history.records import storable_text
from nanochat.history.transfer import MAX_TEXT_LENGTH
from nanochat.history.writer import Writer

Connection = sqlite3.Connection

IS_EMPTY = "NOT EXISTS (SELECT 1 FROM messages WHERE chat_id = chats.id)"
IS_DRAFT_ONLY = f"({IS_EMPTY} AND EXISTS (SELECT 1 FROM drafts WHERE chat_id = chats.id))"
"""Of a row of chats: it is there for what is to be sent first, and no chat yet that one would look for."""


class Drafts:
    """The drafts of one session."""

    def __init__(self, writer: Writer, session_id: int) -> None:
        self._writer = writer
        self._session_id = session_id
        self._latest: dict[int, str] = {}
        """By chat. What is queued looks here: while the disk is full, a chat's newest draft waits, not each before."""

    def keep(self, chat_id: int, text: str) -> None:
        """Save a chat's draft in place of the one before: of a very long one, as much as a message may have.

        Never waits. A chat that is gone keeps none.

        Raises:
            HistoryError: the history has been closed.
        """
        self._latest[chat_id] = storable_text(text[:MAX_TEXT_LENGTH])
        self._writer.submit(
            lambda connection: save_draft(connection, chat_id, self._session_id, self._latest[chat_id])
        )

    def forget(self, chat_id: int) -> None:
        """The draft was sent, emptied, or its tab closed. A chat without messages goes with it. Never waits.

        Raises:
            HistoryError: the history has been closed.
        """
        self._writer.submit(lambda connection: forget_draft(connection, chat_id, self._session_id))


def save_draft(connection: Connection, chat_id: int, session_id: int, text: str) -> None:
    """Save a session's draft of a chat, if the chat is still there."""
    connection.execute(
        "INSERT INTO drafts (chat_id, session_id, text) SELECT id, ?2, ?3 FROM chats WHERE id = ?1 "
        "ON CONFLICT DO UPDATE SET text = excluded.text WHERE text <> excluded.text",
        (chat_id, session_id, text),
    )


def forget_draft(connection: Connection, chat_id: int, session_id: int) -> None:
    """Delete a session's draft of a chat; also the chat, if it has no messages and no other session uses it."""
    connection.execute("DELETE FROM drafts WHERE chat_id = ? AND session_id = ?", (chat_id, session_id))
    connection.execute(
        f"DELETE FROM chats WHERE id = ?1 AND {IS_EMPTY} AND coalesce(tab_session, ?2) = ?2 "
        "AND NOT EXISTS (SELECT 1 FROM drafts WHERE chat_id = ?1)",
        (chat_id, session_id),
    )


def claim_drafts(connection: Connection, session_id: int, chat_ids: Iterable[int]) -> Mapping[int, str]:
    """Take over these chats' drafts of sessions that have ended; returns the session's drafts by chat.

    Several sessions' drafts of one chat become one, the older first.
    """
    drafts: dict[int, str] = {}
    for chat_id in chat_ids:
        rows = connection.execute(
            "DELETE FROM drafts WHERE chat_id = ? AND (session_id = ? OR session_id NOT IN (SELECT id FROM sessions)) "
            "RETURNING session_id, text",
            (chat_id, session_id),
        ).fetchall()
        if rows:
            drafts[chat_id] = "\n".join(text for _, text in sorted(rows))[:MAX_TEXT_LENGTH]
            save_draft(connection, chat_id, session_id, drafts[chat_id])
    return drafts
