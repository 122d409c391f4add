"""New rows of the tables, from plain values. Knows no SQL.

Field names are column names, so a row binds as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from nanochat.history.records import Chat, Message, Role, State, encode_mapping, encode_token_ids


class ChatRow(NamedTuple):
    """Column values of a new chat."""

    id: int
    title: str
    system: str | None
    model: str
    sampling: str
    left_out_id: int | None
    created_at: float
    updated_at: float


class MessageRow(NamedTuple):
    """Column values of a new message."""

    id: int
    chat_id: int
    parent_id: int | None
    role: Role
    state: State
    text: str
    created_at: float
    token_ids: bytes = b""
    model: str = ""
    finish_reason: str | None = None
    error: str | None = None
    metrics: str = "{}"
    finished_at: float | None = None
    session_id: int | None = None


def imported_rows(
    chat: Chat, messages: Sequence[Message], new_id: Callable[[], int]
) -> tuple[ChatRow, list[MessageRow], set[int]]:
    """Rows of a chat from a file under new ids, and the ids of its active messages."""
    chat_id = new_id()
    ids = {message.id: new_id() for message in messages}
    chat_row = ChatRow(
        id=chat_id,
        title=chat.title,
        system=chat.system,
        model=chat.model,
        sampling=encode_mapping(chat.sampling),
        left_out_id=None if chat.left_out_id is None else ids[chat.left_out_id],
        created_at=chat.created_at,
        updated_at=chat.updated_at,
    )
    rows = [
        MessageRow(
            id=ids[message.id],
            chat_id=chat_id,
            parent_id=None if message.parent_id is None else ids[message.parent_id],
            role=message.role,
            state=message.state,
            text=message.text,
            created_at=message.created_at,
            token_ids=encode_token_ids(message.token_ids),
            model=message.model,
            finish_reason=message.finish_reason,
            error=message.error,
            metrics=encode_mapping(message.metrics),
            finished_at=message.finished_at,
        )
        for message in messages
    ]
    return chat_row, rows, {ids[message.id] for message in messages if message.is_active}
