"""The meter of a chat's context counts it as it would be sent, also where no answer tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanochat.ui import chat_screen
from nanochat.ui.stats_panel import Snapshot
from tests.ui.driver import ENDLESS, LONG, Driver, started
from tests.ui.test_search import import_chat


async def until_counted(driver: Driver) -> int:
    """What the panel shows of the chat in view, once it is known."""

    def shown() -> int:
        snapshot = driver.app.main_screen._panel._snapshot
        return snapshot.context_tokens if isinstance(snapshot, Snapshot) else 0

    await driver.until(lambda: shown() and shown() == driver.chat.context_tokens)
    await driver.until_seen(f"{shown():,} / ")
    return shown()


async def test_an_answer_that_was_cut_off_counts_once_it_is_back(long_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    async with started(long_llama, history=file, sampling=ENDLESS, **LONG) as driver:
        await driver.say("Go")
        await driver.until(lambda: driver.chat.live and len(driver.chat.live.answer.text) > 30)
        await driver.press("ctrl+q")
        await driver.until(lambda: not driver.app.is_running)
    sampling = ENDLESS | {"max_tokens": 20}
    async with started(long_llama, history=file, sampling=sampling, **LONG) as driver:
        answer = driver.chat.path[-1]
        assert answer.is_interrupted
        used = await until_counted(driver)
        await driver.say("/continue")
        await driver.until(lambda: answer.output is not None and not answer.is_interrupted)
        metrics = answer.output.metrics
        assert used == metrics.prompt_tokens + metrics.completion_tokens - 20


async def test_an_imported_chat_counts_and_turns_left_out_count_no_more(
    tiny_llama: Path, tmp_path: Path
) -> None:
    file = tmp_path / "history.db"
    import_chat(file, "Long", ["One question", "Its answer", "Another question", "Its answer"], as_tab=True)
    async with started(tiny_llama, history=file) as driver:
        before = await until_counted(driver)
        await driver.say("/drop 1")
        await driver.until(lambda: driver.chat.left_out is not None)
        await driver.until(lambda: 0 < driver.chat.context_tokens < before)
        after = await until_counted(driver)
        await driver.ask("More")
        metrics = driver.chat.path[-1].output.metrics
        assert after < metrics.prompt_tokens < before + metrics.prompt_tokens - after
        assert driver.chat.context_tokens == metrics.prompt_tokens + metrics.completion_tokens


async def test_a_chat_that_cannot_be_counted_is_not_asked_for_again(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_screen, "COUNT_AFTER_S", 0.01)
    file = tmp_path / "history.db"
    import_chat(file, "Long", ["One question", "Its answer"], as_tab=True)
    async with started(tiny_llama, history=file, hold=True) as driver:
        driver.load()
        await driver.until_ready()
        asked = []
        backend = driver.app.main_screen.bridge.backend
        backend.count = lambda turn: asked.append(turn)  # type: ignore[method-assign]
        driver.chat.counted = None
        driver.app.main_screen.show_stats()
        await driver.until(lambda: asked)
        for _ in range(3):
            driver.app.main_screen.show_stats()
            await driver.pilot.pause(0.05)
        assert len(asked) == 1
        assert driver.chat.context_tokens == 0
