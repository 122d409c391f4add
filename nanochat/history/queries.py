"""Reading chats and messages from a connection. Knows nothing of threads and files."""

from __future__ import annotations

import math
import sqlite3
from collections import defaultdict
from collections.abc import Callable

from nanochat.errors import HistoryError
from nanochat.history.drafts import IS_DRAFT_ONLY
from nanochat.history.records import (
    Chat,
    Message,
    SearchHit,
    State,
    decode_mapping,
    decode_token_ids,
    usable_time,
)
from nanochat.history.search import like_pattern, match_expression, query_words, snippet

Connection = sqlite3.Connection

_CHAT_COLUMNS = (
    "id, title, system, model, sampling, left_out_id, created_at, updated_at, tab_position, tab_in_view"
)
_MAX_TITLE_HITS = 10


def chat(connection: Connection, chat_id: int) -> Chat:
    """One chat.

    Raises:
        HistoryError: there is none of that id.
    """
    row = connection.execute(f"SELECT {_CHAT_COLUMNS} FROM chats WHERE id = ?", (chat_id,)).fetchone()
    if row is None:
        raise HistoryError("This chat is no longer in the history.")
    return _chat(row)


def list_chats(connection: Connection, limit: int, after: Chat | None) -> list[Chat]:
    """Chats that follow one in the list, last used first, without those that have only a draft."""
    last = (after.updated_at, after.id) if after is not None else (math.inf, 0)
    rows = connection.execute(
        f"SELECT {_CHAT_COLUMNS} FROM chats WHERE (updated_at, id) < (?, ?) "
        f"AND NOT {IS_DRAFT_ONLY} ORDER BY updated_at DESC, id DESC LIMIT ?",
        (*last, limit),
    )
    return [_chat(row) for row in rows]


def tree(connection: Connection, chat_id: int, is_alive: Callable[[int | None], bool]) -> list[Message]:
    """All messages of a chat, a parent before its children and siblings from oldest to newest.

    An answer that streams in a session that ``is_alive`` denies is given as interrupted.

    Raises:
        HistoryError: there is no such chat.
    """
    chosen = connection.execute("SELECT active_child_id FROM chats WHERE id = ?", (chat_id,)).fetchone()
    if chosen is None:
        raise HistoryError("This chat is no longer in the history.")
    rows = connection.execute(
        "SELECT id, parent_id, active_child_id, role, state, session_id, text, token_ids, model, "
        "finish_reason, error, metrics, created_at, finished_at FROM messages WHERE chat_id = ? ORDER BY id",
        (chat_id,),
    ).fetchall()
    children: defaultdict[int | None, list[tuple]] = defaultdict(list)
    for row in rows:
        children[row[1]].append(row)
    messages: list[Message] = []
    to_visit: list[tuple[int | None, int | None]] = [(None, chosen[0])]
    for parent_id, active_id in to_visit:  # grows as it goes: breadth first
        siblings = children[parent_id]
        if all(row[0] != active_id for row in siblings):
            active_id = siblings[-1][0] if siblings else None
        for number, row in enumerate(siblings, start=1):
            branch = (number, len(siblings))
            messages.append(_message(row, chat_id, branch, row[0] == active_id, is_alive))
            to_visit.append((row[0], row[2]))
    return messages


def active_path(messages: list[Message]) -> list[Message]:
    """The messages of a tree that are shown and sent, oldest first."""
    active = {message.parent_id: message for message in messages if message.is_active}
    path: list[Message] = []
    end: int | None = None
    while (message := active.get(end)) is not None:
        path.append(message)
        end = message.id
    return path


def siblings(connection: Connection, message_id: int) -> list[int]:
    """Ids of a message and its siblings, oldest first; empty if it isn't there."""
    rows = connection.execute(
        "SELECT sibling.id FROM messages AS one JOIN messages AS sibling "
        "ON sibling.chat_id = one.chat_id AND sibling.parent_id IS one.parent_id "
        "WHERE one.id = ? ORDER BY sibling.id",
        (message_id,),
    )
    return [sibling_id for (sibling_id,) in rows]


def search(connection: Connection, query: str, limit: int) -> list[SearchHit]:
    """Chats whose title has the query's words, then messages that have them, newest first."""
    words = query_words(query)
    if not words:
        return []
    hits = _search_titles(connection, words, min(limit, _MAX_TITLE_HITS))
    expression = match_expression(words)
    if expression is not None:
        found = (
            "SELECT rowid AS id FROM message_index WHERE message_index MATCH ? ORDER BY rowid DESC LIMIT ?"
        )
        value = expression
    else:
        # Nothing that is indexed, such as an emoji or an arrow: look through the texts themselves.
        found = "SELECT id FROM messages WHERE text LIKE ? ESCAPE '\\' ORDER BY id DESC LIMIT ?"
        value = like_pattern(words)
    rows = connection.execute(
        "SELECT message.id, chat.id, chat.title, message.role, message.created_at, message.text "
        f"FROM ({found}) AS hit JOIN messages AS message ON message.id = hit.id "
        "JOIN chats AS chat ON chat.id = message.chat_id ORDER BY message.id DESC",
        (value, limit - len(hits)),
    )
    for message_id, chat_id, title, role, created_at, text in rows:
        line, spans = snippet(text, words)
        hits.append(
            SearchHit(
                chat_id=chat_id,
                chat_title=title,
                message_id=message_id,
                role=role,
                created_at=usable_time(created_at),
                snippet=line,
                spans=spans,
            )
        )
    return hits


def _search_titles(connection: Connection, words: list[str], limit: int) -> list[SearchHit]:
    rows = connection.execute(
        "SELECT id, title, created_at FROM chats WHERE title LIKE ? ESCAPE '\\' "
        f"AND NOT {IS_DRAFT_ONLY} ORDER BY updated_at DESC, id DESC LIMIT ?",
        (like_pattern(words), limit),
    )
    hits = []
    for chat_id, title, created_at in rows:
        line, spans = snippet(title, words)
        hits.append(
            SearchHit(
                chat_id=chat_id,
                chat_title=title,
                message_id=None,
                role=None,
                created_at=usable_time(created_at),
                snippet=line,
                spans=spans,
            )
        )
    return hits


def _chat(row: tuple) -> Chat:
    chat_id, title, system, model, sampling, left_out_id, created_at, updated_at, *tab = row
    return Chat(
        id=chat_id,
        title=title,
        system=system,
        model=model,
        sampling=decode_mapping(sampling),
        left_out_id=left_out_id,
        created_at=usable_time(created_at),
        updated_at=updated_at,
        tab_position=tab[0],
        is_in_view=bool(tab[1]),
    )


def _message(
    row: tuple, chat_id: int, branch: tuple[int, int], is_active: bool, is_alive: Callable[[int | None], bool]
) -> Message:
    (message_id, parent_id, _, role, stored_state, session_id, text, token_ids, *rest) = row
    model, finish_reason, error, metrics, created_at, finished_at = rest
    state: State = stored_state
    if state == "streaming" and not is_alive(session_id):
        state = "interrupted"
    return Message(
        id=message_id,
        chat_id=chat_id,
        parent_id=parent_id,
        role=role,
        text=text,
        state=state,
        token_ids=decode_token_ids(token_ids),
        model=model,
        finish_reason=finish_reason,
        error=error,
        metrics=decode_mapping(metrics),
        created_at=usable_time(created_at),
        finished_at=None if finished_at is None else usable_time(finished_at),
        branch=branch,
        is_active=is_active,
    )
