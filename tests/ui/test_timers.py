"""Timers that fire once are never lost, however long the machine lets the app wait."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from textual import _time
from textual.app import App
from textual.timer import Timer

from nanochat.ui import textual_private


async def fired(monkeypatch: pytest.MonkeyPatch, **options: object) -> int:
    """How often a timer fires whose thread waits for a second between any two of its lines."""
    ticks = itertools.count(0.0, 1.0)
    count = 0

    def fire() -> None:
        nonlocal count
        count += 1

    async with App[None]().run_test() as pilot:
        monkeypatch.setattr(_time, "get_time", lambda: next(ticks))
        timer = Timer(pilot.app, 0.01, callback=fire, **options)  # type: ignore[arg-type]
        timer._start()
        if timer._task is not None:
            await asyncio.wait([timer._task], timeout=5)
        monkeypatch.undo()
    return count


async def test_a_timer_that_fires_once_fires_on_a_starved_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    textual_private.let_single_timers_come()
    assert await fired(monkeypatch, repeat=0) == 1


async def test_this_version_of_textual_would_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, ``let_single_timers_come`` has become needless."""
    monkeypatch.setattr(Timer, "__init__", textual_private._INIT_TIMER)
    assert await fired(monkeypatch, repeat=0) == 0
