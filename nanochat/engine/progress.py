"""How far a slow start has come: one small value handed to whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """One stage of loading. ``total`` 0 means that the length isn't known."""

    stage: str
    """What is happening, in a user's words: "Downloading SmolLM2-135M-Instruct"."""
    done: int = 0
    total: int = 0
    unit: str = ""
    """"B" for bytes; empty for a bare count."""


ProgressCallback = Callable[[Progress], None]


def ignore_progress(_: Progress) -> None:
    """The callback for those who don't show progress."""
