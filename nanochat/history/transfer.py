"""A chat as Markdown to read and as JSON to keep, and back from JSON. Knows no database.

A JSON file may come from anywhere, so everything in it is checked before any of it is used.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn, get_args

from nanochat.errors import HistoryError, has_long_number
from nanochat.history.records import MAX_TIME, Chat, Message, Role, State, storable_text, usable_time
from nanochat.sanitize import sanitize

FORMAT = "nanochat chat"
VERSION = 1

MAX_FILE_BYTES = 256 * 2**20
MAX_MESSAGES = 100_000
MAX_TEXT_LENGTH = 16 * 2**20
MAX_TITLE_LENGTH = 1_000
MAX_NAME_LENGTH = 10_000
"""Of a model's name, a finish reason or an error."""
MAX_TOKEN_IDS = 4 * 2**20
MAX_OPTIONS = 100
"""Entries of the sampling settings and of the metrics, and texts in one of them."""

_JSON_CONTROLS = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


def to_markdown(chat: Chat, path: Sequence[Message]) -> str:
    """The path's messages under headings, with what each answer cost."""
    created = datetime.fromtimestamp(chat.created_at).astimezone().isoformat(" ", "minutes")
    parts = [f"# {' '.join(chat.title.split())}", f"*{' · '.join(filter(None, (chat.model, created)))}*"]
    if chat.system:
        parts.append("\n".join(f"> {line}".rstrip() for line in chat.system.split("\n")))
    for message in path:
        parts += [f"## {'You' if message.role == 'user' else 'Assistant'}", _close_fence(message.text)]
        if footer := _footer(message):
            parts.append(f"*{footer}*")
    return sanitize("\n\n".join(parts)) + "\n"


def _footer(message: Message) -> str:
    metrics = message.metrics
    notes = [message.model] if message.model else []
    for key, pattern in (
        ("ttft_s", "TTFT {:.3f} s"),
        ("decode_tok_s", "{:.0f} tok/s"),
        ("prompt_tokens", "prompt {:,}"),
        ("cached_tokens", "cached {:,}"),
        ("completion_tokens", "answer {:,} tokens"),
        ("preemptions", "preempted ×{}"),
    ):
        value = metrics.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            notes.append(pattern.format(value))
    if message.state != "complete":
        notes.append(f"{message.state}: {message.error}" if message.error else message.state)
    elif message.finish_reason not in (None, "stop"):
        notes.append(str(message.finish_reason))
    return " · ".join(" ".join(note.split()) for note in notes)


def _close_fence(text: str) -> str:
    """The text with a code block that was cut off ended, lest it swallow the messages that follow."""
    fence = ""
    for line in text.split("\n"):
        match = _FENCE.fullmatch(line)
        if match is None:
            continue
        marks, rest = match.groups()
        if not fence:
            fence = "" if marks[0] == "`" and "`" in rest else marks
        elif marks[0] == fence[0] and len(marks) >= len(fence) and not rest.strip():
            fence = ""
    return f"{text}\n{fence}" if fence else text


def to_json(chat: Chat, messages: Sequence[Message]) -> str:
    """The chat with all its branches; ``messages`` as a tree is given, parents first."""
    numbers = {message.id: number for number, message in enumerate(messages, start=1)}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "title": chat.title,
        "system": chat.system,
        "model": chat.model,
        "sampling": chat.sampling,
        "left_out": numbers.get(chat.left_out_id or 0),
        "created_at": chat.created_at,
        "updated_at": usable_time(chat.updated_at),
        "messages": [
            {
                "id": numbers[message.id],
                "parent": None if message.parent_id is None else numbers[message.parent_id],
                "active": message.is_active,
                "role": message.role,
                "state": "interrupted" if message.state == "streaming" else message.state,
                "text": message.text,
                "token_ids": list(message.token_ids),
                "model": message.model,
                "finish_reason": message.finish_reason,
                "error": message.error,
                "metrics": message.metrics,
                "created_at": message.created_at,
                "finished_at": message.finished_at,
            }
            for message in messages
        ],
    }
    # Only strings can hold such characters, and there the escape means the same.
    return json.dumps(content, ensure_ascii=False, allow_nan=False).translate(_JSON_CONTROLS) + "\n"


def parse_json(data: str | bytes) -> tuple[Chat, list[Message]]:
    """Read what :func:`to_json` wrote. Ids count from 1 within the chat; parents come first.

    Raises:
        HistoryError: it isn't such a file, or holds something that it mustn't.
    """
    if len(data) > MAX_FILE_BYTES:
        raise HistoryError(f"The file is too large to import: the limit is {MAX_FILE_BYTES // 2**20} MiB.")
    try:
        content = json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise HistoryError("The file can't be imported: it is nested too deeply.") from None
    except ValueError as error:  # also text that isn't UTF-8 and numbers with thousands of digits
        reason = "a number in it has too many digits" if has_long_number(error) else str(error)
        raise HistoryError(f"The file can't be imported: it isn't valid JSON ({reason}).") from None
    fields = _Fields(content, "the chat")
    if fields.get("format") != FORMAT:
        raise HistoryError("The file can't be imported: it isn't a chat that nanochat exported as JSON.")
    if fields.get("version") != VERSION:
        raise HistoryError(
            f"The file can't be imported: it has format version {str(fields.get('version'))[:20]}, and this "
            f"nanochat reads version {VERSION}."
        )
    entries = fields.get("messages")
    if not isinstance(entries, list) or len(entries) > MAX_MESSAGES:
        fields.refuse("messages", f"a list of at most {MAX_MESSAGES:,}")
    messages, numbers = _parse_messages(entries)
    chat = Chat(
        id=0,
        title=fields.text("title", MAX_TITLE_LENGTH),
        system=fields.text_or_none("system", MAX_TEXT_LENGTH),
        model=fields.text("model", MAX_NAME_LENGTH, ""),
        sampling=fields.options("sampling"),
        left_out_id=_left_out(fields, messages, numbers),
        created_at=fields.time("created_at"),
        updated_at=fields.time("updated_at"),
    )
    return chat, messages


def _left_out(fields: _Fields, messages: Sequence[Message], numbers: Mapping[int, int]) -> int | None:
    """The last message that isn't sent. Earlier versions wrote how many turns of the active path weren't."""
    own = fields.get("left_out")
    if own is not None:
        if type(own) is not int or own not in numbers:
            fields.refuse("left_out", "the id of a message, or null")
        return numbers[own]
    dropped, turn, end, before = fields.count("dropped_turns"), 0, None, None
    active = {message.parent_id: message for message in messages if message.is_active}
    while dropped and (message := active.get(end)) is not None:
        if message.role == "user" and turn <= dropped:  # the last turn is always sent
            turn, before = turn + 1, message.parent_id
        end = message.id
    return before


def _parse_messages(entries: list[Any]) -> tuple[list[Message], dict[int, int]]:
    """The messages, and their ids by those in the file."""
    numbers: dict[int, int] = {}
    messages = []
    for number, entry in enumerate(entries, start=1):
        fields = _Fields(entry, f"message {number}")
        own, parent = fields.get("id"), fields.get("parent")
        if type(own) is not int or own in numbers:
            fields.refuse("id", "a whole number that no other message has")
        if parent is not None and (type(parent) is not int or parent not in numbers):
            fields.refuse("parent", "the id of an earlier message, or null")
        numbers[own] = number
        state = fields.choice("state", get_args(State), "complete")
        messages.append(
            Message(
                id=number,
                chat_id=0,
                parent_id=None if parent is None else numbers[parent],
                role=fields.choice("role", get_args(Role)),
                state="interrupted" if state == "streaming" else state,
                text=fields.text("text", MAX_TEXT_LENGTH),
                token_ids=fields.token_ids("token_ids"),
                model=fields.text("model", MAX_NAME_LENGTH, ""),
                finish_reason=fields.text_or_none("finish_reason", MAX_NAME_LENGTH),
                error=fields.text_or_none("error", MAX_NAME_LENGTH),
                metrics=fields.options("metrics"),
                created_at=fields.time("created_at"),
                finished_at=None if fields.get("finished_at") is None else fields.time("finished_at"),
                is_active=fields.get("active") is True,
            )
        )
    return messages, numbers


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


@dataclass(frozen=True, slots=True)
class _Fields:
    """A JSON object whose values are taken one by one, each checked."""

    content: Any
    where: str

    def get(self, key: str) -> Any:
        if not isinstance(self.content, dict):
            raise HistoryError(f"The file can't be imported: {self.where} must be a JSON object.")
        return self.content.get(key)

    def refuse(self, key: str, wanted: str) -> NoReturn:
        raise HistoryError(f'The file can\'t be imported: "{key}" of {self.where} must be {wanted}.')

    def text(self, key: str, limit: int, default: str | None = None) -> str:
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, str) or len(value) > limit:
            self.refuse(key, f"text of at most {limit:,} characters")
        return storable_text(value)

    def text_or_none(self, key: str, limit: int) -> str | None:
        return None if self.get(key) is None else self.text(key, limit)

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> Any:
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, str) or value not in choices:
            self.refuse(key, f"one of {', '.join(choices)}")
        return value

    def count(self, key: str) -> int:
        value = self.get(key)
        if value is None:
            return 0
        if type(value) is not int or not 0 <= value <= MAX_MESSAGES:
            self.refuse(key, f"a whole number from 0 to {MAX_MESSAGES}")
        return value

    def time(self, key: str) -> float:
        value = self.get(key)
        if type(value) not in (int, float) or not 0 <= value <= MAX_TIME:
            self.refuse(key, "a time in seconds since 1970")
        return float(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        if value is None:
            return ()
        is_list = isinstance(value, list) and len(value) <= MAX_TOKEN_IDS
        if not is_list or not all(type(item) is int and 0 <= item < 2**32 for item in value):
            self.refuse(key, f"a list of at most {MAX_TOKEN_IDS:,} token ids")
        return tuple(value)

    def options(self, key: str) -> dict[str, Any]:
        value = self.get(key)
        if value is None:
            return {}
        if (
            not isinstance(value, dict)
            or len(value) > MAX_OPTIONS
            or not all(len(name) <= MAX_NAME_LENGTH and _is_plain(item) for name, item in value.items())
        ):
            self.refuse(key, "an object of numbers, texts and lists of texts")
        return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= MAX_OPTIONS and all(isinstance(item, str) and _is_plain(item) for item in value)
    if isinstance(value, str):
        return len(value) <= MAX_NAME_LENGTH
    if isinstance(value, float):
        return math.isfinite(value)  # 1e999 is read as infinity
    return value is None or (isinstance(value, int) and abs(value) < 2**63)
