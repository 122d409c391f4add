"""The text of ``/set`` as sampling settings. Pure functions."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from nanochat.engine.config import SamplingParams
from nanochat.errors import InvalidOption

HIDDEN = frozenset({"logprobs", "ignore_eos"})
"""Parameters that make no sense in a chat."""


def setting_names() -> list[str]:
    """What can be set."""
    return [field.name for field in dataclasses.fields(SamplingParams) if field.name not in HIDDEN]


def parse_setting(text: str) -> tuple[str, Any]:
    """``temperature 0.2`` as a name and a value; ``default`` as value gives None.

    Raises:
        InvalidOption: there is no such setting, or the value isn't of its type.
    """
    name, _, written = text.replace("=", " ").strip().partition(" ")
    name, written = name.lower().replace("-", "_"), written.strip()
    if name not in setting_names():
        raise InvalidOption(f'There is no setting "{name}"; there are {", ".join(setting_names())}.')
    if not written:
        raise InvalidOption(f"Give {name} a value, such as /set {name} {_example(name)}; default resets it.")
    if written == "default":
        return name, None
    kind = _base_type(get_type_hints(SamplingParams)[name])
    if name == "stop":
        return name, (written.encode().decode("unicode_escape") if "\\" in written else written,)
    try:
        return name, kind(written)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise InvalidOption(f"{name} must be {what}, not {sanitized(written)!r}.") from None


def describe(params: SamplingParams, overrides: Mapping[str, Any]) -> str:
    """All settings on one line, this chat's own marked."""
    parts = []
    for name in setting_names():
        value = getattr(params, name)
        shown = (
            ", ".join(map(repr, value)) or "none"
            if name == "stop"
            else "none"
            if value is None
            else f"{value:g}"
        )
        parts.append(f"{name} {shown}{' (this chat)' if name in overrides else ''}")
    return " · ".join(parts)


def sanitized(text: str) -> str:
    """Short enough for a message."""
    return text if len(text) <= 40 else text[:39] + "…"


def _base_type(hint: Any) -> type:
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    return hint if isinstance(hint, type) else str


def _example(name: str) -> str:
    return {"temperature": "0.7", "stop": "END", "seed": "1", "max_tokens": "256"}.get(name, "0.9")
