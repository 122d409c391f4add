"""What the history gives back, and how its values are encoded in a row. Knows no SQL."""

from __future__ import annotations

import json
import math
import re
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["user", "assistant"]
State = Literal["streaming", "complete", "interrupted", "error"]

MAX_TIME = 7_258_118_400.0
"""The year 2200, in seconds since 1970: any later one may be beyond what dates can hold."""

_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A saved chat without its messages. Times are seconds since 1970."""

    id: int
    title: str
    system: str | None = None
    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The chat's own sampling settings, by parameter name. Not checked here: the file may be old."""
    left_out_id: int | None = None
    """The last message that isn't sent, because the user chose so; it counts on the paths that go through it."""
    created_at: float = 0.0
    updated_at: float = 0.0
    """When a message was last added or finished."""
    tab_position: int | None = None
    """Its place among the open tabs; None if it is closed."""
    is_in_view: bool = False
    """Whether it is the tab that the session looked at last."""
    draft: str = ""
    """What stood in the tab's prompt; told only of tabs that are restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A node of a chat's tree. Times are seconds since 1970."""

    id: int
    chat_id: int
    parent_id: int | None
    """None for a message that begins the chat."""
    role: Role
    text: str
    state: State = "complete"
    token_ids: tuple[int, ...] = ()
    """An answer's generated ids, as they lie in the context; empty for a user's message."""
    model: str = ""
    finish_reason: str | None = None
    error: str | None = None
    """The sentence shown when the answer failed."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    created_at: float = 0.0
    finished_at: float | None = None
    branch: tuple[int, int] = (1, 1)
    """(which, of how many) among its siblings, counted from 1."""
    is_active: bool = True
    """Whether its parent's path goes through it rather than through a sibling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHit:
    """A message or a chat's title that matches a search."""

    chat_id: int
    chat_title: str
    message_id: int | None
    """None if it is the title that matches."""
    role: Role | None
    created_at: float
    snippet: str
    """One line around the first match."""
    spans: tuple[tuple[int, int], ...]
    """Where in the snippet the query's words are, as (start, end)."""


def storable_text(text: str) -> str:
    """The text with each lone surrogate, which no UTF-8 can hold, as U+FFFD; anything else unchanged."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def storable_or_none(text: str | None) -> str | None:
    """The same of a text that may be missing."""
    return None if text is None else storable_text(text)


def encode_token_ids(token_ids: Iterable[int]) -> bytes:
    """Four little-endian bytes an id.

    Raises:
        OverflowError: an id isn't within 32 bits without a sign.
    """
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def decode_token_ids(blob: bytes) -> tuple[int, ...]:
    """The inverse of :func:`encode_token_ids`.

    Raises:
        ValueError: the length is no multiple of four bytes.
    """
    packed = array("I")
    packed.frombytes(blob)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def encode_mapping(mapping: Mapping[str, Any]) -> str:
    """JSON. Numbers that JSON doesn't have (infinite, not a number) become null."""
    return json.dumps(_storable(mapping), allow_nan=False)


def decode_mapping(text: str) -> dict[str, Any]:
    """The inverse of :func:`encode_mapping`; also of a text that it would not write.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        value = _storable(json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def usable_time(value: float) -> float:
    """A time as saved, or 1970 if it is none that a date can show: the file may come from anywhere."""
    return value if 0 <= value <= MAX_TIME else 0.0


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return storable_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {storable_text(key): _storable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_storable(item) for item in value]
    return value
