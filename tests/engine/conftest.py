"""Engines over the tiny model, each proven empty and consistent when its test is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanochat.engine.config import EngineConfig
from nanochat.engine.engine import Engine

MakeEngine = Callable[..., Engine]


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for another thread to get somewhere; fails the test if it doesn't."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("it did not happen in time")
        time.sleep(0.002)


def assert_idle_and_consistent(engine: Engine) -> None:
    """No block is in use once no request is left, and every invariant holds."""
    wait_until(lambda: not engine.stats().requests)
    assert engine.stats().blocks_used == 0
    engine._scheduler.check_invariants()


@pytest.fixture
def make_engine(tiny_llama: Path) -> Iterator[MakeEngine]:
    """``make_engine(**options)``: a float32 CPU engine that checks its invariants whenever idle."""
    engines: list[Engine] = []

    def make(model: Path = tiny_llama, *, max_steps_ahead: int | None = None, **options: Any) -> Engine:
        defaults = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 64}
        config = EngineConfig(**{**defaults, **options, "model": str(model)})
        engine = Engine(config, debug=True, max_steps_ahead=max_steps_ahead)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
        assert_idle_and_consistent(engine)
