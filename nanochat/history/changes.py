"""Every way in which rows change, as functions on a connection. They run inside the writer's transaction.

Knows nothing of threads and files. Values arrive encoded (see :mod:`nanochat.history.records`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence, Set

from nanochat.errors import HistoryError
from nanochat.history.records import State, encode_token_ids
from nanochat.history.rows import ChatRow, MessageRow
from nanochat.history.writer import Growth

Connection = sqlite3.Connection


def _insert(table: str, columns: Sequence[str]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


def insert_chat(connection: Connection, chat: ChatRow) -> None:
    connection.execute(_insert("chats", ChatRow._fields), chat)


def rename_chat(connection: Connection, chat_id: int, title: str) -> None:
    _require(connection.execute("UPDATE chats SET title = ? WHERE id = ?", (title, chat_id)), "chat")


def configure_chat(
    connection: Connection,
    chat_id: int,
    system: str | None,
    model: str,
    sampling: str,
    left_out_id: int | None,
) -> None:
    cursor = connection.execute(
        "UPDATE chats SET system = ?, model = ?, sampling = ?, left_out_id = ? WHERE id = ?",
        (system, model, sampling, left_out_id, chat_id),
    )
    _require(cursor, "chat")


def delete_chat(connection: Connection, chat_id: int, others_alive: Iterable[int]) -> None:
    """Delete a chat with its messages, unless one of these other sessions has it open."""
    row = connection.execute("SELECT tab_session FROM chats WHERE id = ?", (chat_id,)).fetchone()
    if row is not None and row[0] in set(others_alive):
        raise HistoryError("This chat is open in another nanochat; close it there, then delete it.")
    connection.execute("DELETE FROM chats WHERE id = ?", (chat_id,))


def clear_chat(connection: Connection, chat_id: int, now: float) -> None:
    """Delete all messages of a chat."""
    connection.execute("DELETE FROM messages WHERE chat_id = ?", (chat_id,))
    cursor = connection.execute(
        "UPDATE chats SET active_child_id = NULL, left_out_id = NULL, updated_at = ? WHERE id = ?",
        (now, chat_id),
    )
    _require(cursor, "chat")


def fork_chat(
    connection: Connection,
    chat_id: int,
    copy_id: int,
    title: str,
    copies: Sequence[tuple[int, int]],
    now: float,
) -> None:
    """Copy a chat and a path of its messages. ``copies`` are (message, its copy), oldest first."""
    left_out = connection.execute("SELECT left_out_id FROM chats WHERE id = ?", (chat_id,)).fetchone()
    cursor = connection.execute(
        "INSERT INTO chats (id, title, system, model, sampling, left_out_id, created_at, updated_at, "
        "active_child_id) SELECT ?, ?, system, model, sampling, ?, ?, ?, ? FROM chats WHERE id = ?",
        (
            copy_id,
            title,
            dict(copies).get(left_out[0]) if left_out is not None else None,
            now,
            now,
            copies[0][1] if copies else None,
            chat_id,
        ),
    )
    _require(cursor, "chat")
    parent_id: int | None = None
    for message_id, message_copy_id in copies:
        cursor = connection.execute(
            "INSERT INTO messages (id, chat_id, parent_id, role, state, text, token_ids, model, "
            "finish_reason, error, metrics, created_at, finished_at) "
            "SELECT ?, ?, ?, role, CASE state WHEN 'streaming' THEN 'interrupted' ELSE state END, text, "
            "token_ids, model, finish_reason, error, metrics, created_at, finished_at "
            "FROM messages WHERE id = ? AND chat_id = ?",
            (message_copy_id, copy_id, parent_id, message_id, chat_id),
        )
        _require(cursor, "message")
        parent_id = message_copy_id


def save_tabs(connection: Connection, session_id: int, chat_ids: Iterable[int], in_view: int | None) -> None:
    """These chats are the session's open tabs, in this order, and one of them is in view."""
    connection.execute(
        "UPDATE chats SET tab_session = NULL, tab_position = NULL, tab_in_view = 0 WHERE tab_session = ?",
        (session_id,),
    )
    connection.executemany(
        "UPDATE chats SET tab_session = ?, tab_position = ?, tab_in_view = ? WHERE id = ?",
        [(session_id, position, chat_id == in_view, chat_id) for position, chat_id in enumerate(chat_ids)],
    )


def claim_tabs(connection: Connection, session_id: int) -> list[int]:
    """Take over the tabs of sessions that have ended; returns all of the session's tabs in their order.

    Last come chats in which such a session has left a draft, and that no tab has.
    """
    rows = connection.execute(
        "SELECT id, tab_in_view FROM chats WHERE "
        "CASE WHEN tab_position IS NOT NULL THEN "
        "tab_session = ?1 OR tab_session NOT IN (SELECT id FROM sessions) "
        "ELSE id IN (SELECT chat_id FROM drafts WHERE session_id NOT IN (SELECT id FROM sessions)) END "
        "ORDER BY tab_position IS NULL, tab_session <> ?1, tab_session, tab_position",
        (session_id,),
    ).fetchall()
    chat_ids = [chat_id for chat_id, _ in rows]
    in_view = next((chat_id for chat_id, is_in_view in reversed(rows) if is_in_view), None)
    save_tabs(connection, session_id, chat_ids, in_view)
    return chat_ids


def insert_message(connection: Connection, message: MessageRow) -> None:
    """Add a message and make the active path go through it."""
    insert_messages(connection, [message])
    _choose(connection, [(message.id, message.parent_id, message.chat_id)])
    _touch(connection, message.id, message.created_at)


def insert_messages(connection: Connection, messages: Iterable[MessageRow]) -> None:
    """Add messages, parents first; the active path stays."""
    connection.executemany(_insert("messages", MessageRow._fields), messages)


def import_chat(
    connection: Connection, chat: ChatRow, messages: Sequence[MessageRow], active: Set[int]
) -> None:
    """Add a chat with its messages, parents first; its paths go through those named as active."""
    insert_chat(connection, chat)
    insert_messages(connection, messages)
    _choose(connection, ((row.id, row.parent_id, row.chat_id) for row in messages if row.id in active))


def grow_answer(connection: Connection, growth: Growth) -> None:
    """Append to an answer that is still streaming; its end brings the whole text."""
    connection.execute(
        "UPDATE messages SET text = text || ?, token_ids = CAST(token_ids || ? AS BLOB) "
        "WHERE id = ? AND state = 'streaming'",
        ("".join(growth.texts), encode_token_ids(growth.token_ids), growth.message_id),
    )


def resume_answer(connection: Connection, message_id: int, session_id: int, model: str) -> None:
    """An answer that had ended goes on; or one that streams is now known to be by this model."""
    cursor = connection.execute(
        "UPDATE messages SET state = 'streaming', session_id = ?, model = ?, finish_reason = NULL, error = NULL, "
        "finished_at = NULL WHERE id = ? AND role = 'assistant'",
        (session_id, model, message_id),
    )
    _require(cursor, "answer")


def finish_answer(
    connection: Connection,
    message_id: int,
    *,
    state: State,
    text: str,
    token_ids: bytes,
    finish_reason: str,
    error: str | None,
    metrics: str,
    now: float,
) -> None:
    cursor = connection.execute(
        "UPDATE messages SET state = ?, text = ?, token_ids = ?, finish_reason = ?, error = ?, metrics = ?, "
        "finished_at = ?, session_id = NULL WHERE id = ?",
        (state, text, token_ids, finish_reason, error, metrics, now, message_id),
    )
    _require(cursor, "answer")
    _touch(connection, message_id, now)


def delete_message(connection: Connection, message_id: int) -> None:
    """Delete a message and all that follow it, in one statement: see the tables' foreign key."""
    connection.execute(
        "WITH RECURSIVE below (id, chat_id) AS ("
        " SELECT id, chat_id FROM messages WHERE id = ?"
        " UNION SELECT child.id, child.chat_id FROM messages AS child"
        " JOIN below ON child.chat_id = below.chat_id AND child.parent_id = below.id) "
        "DELETE FROM messages WHERE id IN (SELECT id FROM below)",
        (message_id,),
    )


def activate(connection: Connection, message_id: int) -> None:
    """Make the active path go through a message; below it, the path stays as it was."""
    above = connection.execute(
        "WITH RECURSIVE above (id, parent_id, chat_id) AS ("
        " SELECT id, parent_id, chat_id FROM messages WHERE id = ?"
        " UNION SELECT parent.id, parent.parent_id, parent.chat_id FROM messages AS parent"
        " JOIN above ON parent.id = above.parent_id) SELECT id, parent_id, chat_id FROM above",
        (message_id,),
    ).fetchall()
    if not above:
        raise _gone("message")
    _choose(connection, above)


def _choose(connection: Connection, steps: Iterable[tuple[int, int | None, int]]) -> None:
    """Make paths go through messages, each given as (message, its parent, its chat)."""
    for message_id, parent_id, chat_id in steps:
        table, owner = ("chats", chat_id) if parent_id is None else ("messages", parent_id)
        connection.execute(
            f"UPDATE {table} SET active_child_id = ?1 WHERE id = ?2 AND active_child_id IS NOT ?1",
            (message_id, owner),
        )


def _touch(connection: Connection, message_id: int, now: float) -> None:
    connection.execute(
        "UPDATE chats SET updated_at = ? WHERE id = (SELECT chat_id FROM messages WHERE id = ?)",
        (now, message_id),
    )


def _require(cursor: sqlite3.Cursor, what: str) -> None:
    if cursor.rowcount == 0:
        raise _gone(what)


def _gone(what: str) -> HistoryError:
    return HistoryError(f"A change could not be saved: its {what} was deleted in another window.")
