"""A cache for what is made again and again with few changes: it holds what was used of late, and nothing else."""

from __future__ import annotations

from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """Results by what they were made from, as long as they are asked for."""

    def __init__(self) -> None:
        self._new: dict[Key, Value] = {}
        self._old: dict[Key, Value] = {}

    def get(self, key: Key) -> Value | None:
        """What was kept for this key."""
        value = self._new.get(key)
        if value is None and (value := self._old.get(key)) is not None:
            self._new[key] = value
        return value

    def keep(self, key: Key, value: Value) -> Value:
        """Keep this; returns it."""
        self._new[key] = value
        return value

    def forget_unused(self) -> None:
        """Let go of what was neither kept nor asked for since the last call."""
        self._old, self._new = self._new, {}

    def clear(self) -> None:
        """Let go of everything."""
        self._old, self._new = {}, {}
