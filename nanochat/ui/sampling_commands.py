"""A chat's sampling settings as text: of ``/set``, of the settings dialog, of ``/compare``. Pure functions."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Collection, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from nanochat.engine.config import SamplingParams
from nanochat.errors import InvalidOption

HIDDEN = frozenset({"logprobs", "ignore_eos"})
"""Parameters that make no sense in a chat."""
BETWEEN_STOPS = " | "
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}
_WRITTEN = {meant: written for written, meant in _ESCAPES.items()}
_ESCAPED = re.compile(r"\\[nt\\]")


def setting_names() -> list[str]:
    """What can be set."""
    return [field.name for field in dataclasses.fields(SamplingParams) if field.name not in HIDDEN]


def parse_setting(text: str) -> tuple[str, Any]:
    """``temperature 0.2`` as a name and a value; ``default`` as value gives None.

    Raises:
        InvalidOption: there is no such setting, or the value isn't of its type.
    """
    name, written = re.fullmatch(r"([^\s=]*)\s*=?(.*)", text.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
    name, written = name.lower().replace("-", "_"), written.strip()
    if name not in setting_names():
        raise InvalidOption(
            f'There is no setting "{shortened(name)}"; there are {", ".join(setting_names())}.'
        )
    if not written:
        raise InvalidOption(f"Give {name} a value, such as /set {name} {example(name)}; default resets it.")
    return name, parse_value(name, written)


def parse_value(name: str, written: str) -> Any:
    """A setting's value as written by :func:`show_value`; None for ``default``.

    Raises:
        InvalidOption: it isn't of the setting's type.
    """
    if written == "default":
        return None
    if name == "stop":
        return tuple(_unescaped(text) for text in written.split(BETWEEN_STOPS) if text)
    kind = _base_type(get_type_hints(SamplingParams)[name])
    try:
        return kind(written)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise InvalidOption(f"{name} must be {what}, not {shortened(written)!r}.") from None


def parse_settings(text: str) -> dict[str, Any]:
    """Several at once, as ``temperature=0 top_p=0.9``; a stop text with blanks takes :func:`parse_setting`.

    Raises:
        InvalidOption: as :func:`parse_setting`.
    """
    settings = dict(parse_setting(part) for part in text.split())
    return {name: value for name, value in settings.items() if value is not None}


def show_value(name: str, value: Any) -> str:
    """A value as it can be written."""
    if name == "stop":
        return BETWEEN_STOPS.join(map(_escaped, value)) or "none"
    return "none" if value is None else f"{value:.10g}"


def describe(
    params: SamplingParams,
    overrides: Mapping[str, Any],
    known: Collection[str] | None = None,
    rest: str = "the server",
) -> str:
    """All settings on one line, this chat's own marked.

    Args:
        known: those whose value is known; None: all.
        rest: who has the others' values.
    """
    parts = [
        f"{name} {show_value(name, getattr(params, name))}{' (this chat)' if name in overrides else ''}"
        for name in setting_names()
        if known is None or name in known
    ]
    return " · ".join(parts if known is None else [*parts, f"the rest as {rest} has it"])


def shortened(text: str) -> str:
    """Short enough for a message."""
    return text if len(text) <= 40 else text[:39] + "…"


def example(name: str) -> str:
    """What one could write for a setting."""
    return {"stop": "END", "seed": "1", "max_tokens": "256", "top_k": "40"}.get(name, "0.9")


def _base_type(hint: Any) -> type:
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    return hint if isinstance(hint, type) else str


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: _ESCAPES[match.group()], text)


def _escaped(text: str) -> str:
    return "".join(_WRITTEN.get(character, character) for character in text)
