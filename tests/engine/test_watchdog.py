"""A step that takes very long is told of, in the statistics and in the log, and goes on."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from nanochat.engine import watchdog as watchdog_module
from nanochat.engine.config import SamplingParams
from nanochat.engine.watchdog import LIMIT_S, Watchdog
from tests.engine.conftest import MakeEngine, wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_only_a_long_step_is_slow_and_only_while_it_lasts() -> None:
    clock = Clock()
    dog = Watchdog(lambda: "step 7, 3 answers", clock)
    assert dog.slow() is None
    with dog.step():
        clock.now_s += LIMIT_S
        assert dog.slow() is None
        clock.now_s += 1
        slow = dog.slow()
        assert slow is not None
        assert (slow.seconds, slow.what) == (LIMIT_S + 1, "step 7, 3 answers")
    assert dog.slow() is None
    clock.now_s += 100
    assert dog.slow() is None


def test_a_failing_step_is_over_too() -> None:
    dog = Watchdog(lambda: "", clock := Clock())
    with pytest.raises(ZeroDivisionError), dog.step():
        raise ZeroDivisionError
    clock.now_s += 100
    assert dog.slow() is None


def test_the_log_is_told_rarely_and_where_the_thread_is(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    dog = Watchdog(lambda: "step 7, 3 answers", clock)
    with caplog.at_level(logging.WARNING), dog.step():
        for _ in range(100):
            clock.now_s += 5
            dog.check(threading.get_ident())
    assert len(caplog.records) == 4  # after 35, 75, 155 and 315 of 500 seconds
    text = caplog.records[0].getMessage()
    assert "a step has taken 35 s so far: step 7, 3 answers" in text
    assert "test_the_log_is_told_rarely" in text


def test_an_engine_that_hangs_says_what_it_does_and_answers_in_the_end(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog_module, "CHECK_S", 0.01)
    engine = make_engine()
    engine._watchdog._clock = clock = Clock()
    go_on = threading.Event()
    launch = type(engine._model.runner).launch

    def wait(runner: Any, plan: Any) -> Any:
        go_on.wait(30)
        return launch(runner, plan)

    monkeypatch.setattr(type(engine._model.runner), "launch", wait)
    with caplog.at_level(logging.WARNING):
        handle = engine.submit([40, 41, 42], GREEDY)
        wait_until(lambda: engine._watchdog._begun_s is not None)
        assert engine.stats().slow_step is None
        clock.now_s += 45
        wait_until(lambda: caplog.records)
        slow = engine.stats().slow_step
        assert slow is not None
        assert "3 prompt tokens of 1" in slow.what
        assert not handle.done
        go_on.set()
        assert len(handle.result(60).token_ids) == 3
    assert engine.stats().slow_step is None
    assert "in wait" in caplog.text  # where the step's thread was
