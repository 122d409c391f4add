"""JSON as it goes over the wire: always valid UTF-8, never a line break inside an event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from nanochat.errors import has_long_number

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_LINE_BREAKS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""Clients that split a stream at what Unicode calls a line break must not find one in a text."""

PIECE = 64
"""Items of a list that are written at a time."""

DONE = b"data: [DONE]\n\n"
"""Ends every stream."""


def to_json(value: Any) -> bytes:
    """UTF-8 without blanks. Half a surrogate pair, which no UTF-8 can hold, becomes ``?``.

    Raises:
        ValueError: there is a number in it that JSON can't hold.
    """
    text = _ENCODER.encode(value)
    if not text.isascii():
        text = text.translate(_LINE_BREAKS)
    return text.encode("utf-8", errors="replace")


def to_json_by_pieces(value: Any) -> bytes:
    """The same as `to_json`, for large values and on a thread: between pieces, other threads have their turn.

    Python's encoder lets nobody else run before it has done, which with many log-probabilities took seconds.
    """
    return b"".join(_pieces(value))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict) and value:
        before = b"{"
        for name, item in value.items():
            yield before + to_json(name) + b":"
            yield from _pieces(item)
            before = b","
        yield b"}"
    elif isinstance(value, list) and len(value) > PIECE:
        for first in range(0, len(value), PIECE):
            yield (b"," if first else b"[") + to_json(value[first : first + PIECE])[1:-1]
        yield b"]"
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield b"," if index else b"["
            yield from _pieces(item)
        yield b"]"
    else:
        yield to_json(value)


def to_event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


def from_json(body: bytes | bytearray) -> Any:
    """What a body holds.

    Raises:
        ValueError: it isn't JSON in UTF-8; the message says why.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start:,} isn't UTF-8") from error
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        if has_long_number(error):
            raise ValueError("a number in it has too many digits") from error
        raise


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
