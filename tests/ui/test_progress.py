"""What takes long says how far it is: loading a model, reading a long prompt."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from nanochat.engine.progress import Progress
from nanochat.engine.runner import Runner
from nanochat.ui.loader import LoadProgressed
from tests.ui.driver import started


async def test_loading_says_how_far_it_is_and_takes_typing_meanwhile(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        driver.app.post_message(LoadProgressed(Progress("Downloading Model", 41_200_000, 98_300_000, "B")))
        await driver.until_seen("41.2 MB of 98.3 MB")
        await driver.until_seen("Downloading Model 42 %")
        await driver.press("a", "b")
        await driver.until_seen("ab")
        driver.app.post_message(LoadProgressed(Progress("Converting", 3, 30, "tensors")))
        await driver.until_seen("3 of 30")
        driver.load()
        await driver.until_ready()
        assert driver.prompt.text == "ab"


async def test_a_long_prompt_says_how_much_of_it_is_read(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, gate = Runner.launch, threading.Semaphore(4)

    def wait(runner: Runner, plan: Any) -> Any:
        gate.acquire(timeout=60)
        return launch(runner, plan)

    async with started(tiny_llama, max_num_batched_tokens=64) as driver:
        monkeypatch.setattr(Runner, "launch", wait)
        await driver.say("long " * 120)
        engine = driver.app.main_screen.bridge.backend.engine  # type: ignore[union-attr]
        await driver.until(lambda: engine.stats().steps == 4)
        (row,) = engine.stats().requests
        assert 0 < row.prefill_done < row.prefill_total
        await driver.until_seen(f"reading the prompt: {row.prefill_done} / {row.prefill_total} tokens")
        await driver.until_seen(f"{100 * row.prefill_done / row.prefill_total:.0f} %")
        gate.release(1000)
        await driver.until_idle()
        assert driver.answer_text()
