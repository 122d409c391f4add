"""The panel over a real engine: it moves while something runs, rests when nothing does, and shows who shares."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from nanochat.settings import AppSettings
from nanochat.ui.stats_panel import FLASH
from tests.ui.driver import ENDLESS, LONG, started


async def test_the_panel_is_live_while_an_answer_comes_and_still_when_idle(
    long_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(long_llama, sampling=ENDLESS, **LONG) as driver:
        screen = driver.app.main_screen
        shown: list[object] = []
        show = screen._panel.show
        monkeypatch.setattr(screen._panel, "show", lambda snapshot: (shown.append(snapshot), show(snapshot)))
        await driver.say("Go")
        await driver.until(lambda: driver.chat.live and driver.chat.live.answer.text)
        await driver.until(lambda: len({len(snapshot.stats.ttft_s) for snapshot in shown}) > 1)
        before, start_s = len(shown), time.monotonic()
        await driver.until(lambda: len(shown) - before >= 8)
        assert len(shown) - before <= 10 * (time.monotonic() - start_s) + 1
        await driver.press("escape")
        await driver.until_idle()
        await driver.until(lambda: not screen.bridge.is_active)
        await driver.pilot.pause(0.3)  # what was on its way is shown
        before = len(shown)
        await driver.pilot.pause(1.0)
        assert len(shown) == before


async def test_a_fork_shows_its_shared_blocks_on_the_map(long_llama: Path) -> None:
    async with started(long_llama, sampling=ENDLESS, num_kv_blocks=128, max_model_len=2048) as driver:
        await driver.say("/set max_tokens 60")
        await driver.ask("A question long enough to fill several blocks of the cache with its letters")
        await driver.press("ctrl+f")
        await driver.say("/set max_tokens 1000")
        await driver.say("More")
        await driver.press("alt+1")
        await driver.say("/set max_tokens 1000")
        await driver.say("Else")
        # One of the marks belongs to the legend.
        await driver.until(lambda: driver.screen_text().count("▣") > 3)
        await driver.press("escape", "f3", "escape")
        await driver.until_idle()


async def test_a_preemption_flashes_on_the_map_unless_motion_is_reduced(tiny_llama: Path) -> None:
    sampling = ENDLESS | {"max_tokens": 300}
    for reduced in (False, True):
        options = {"num_kv_blocks": 32, "max_model_len": 512}
        look = AppSettings(reduced_motion=reduced)
        async with started(tiny_llama, sampling=sampling, look=look, **options) as driver:
            history = driver.app.main_screen._history
            flashed = []
            for number in range(4):
                if number:
                    await driver.press("ctrl+n")
                driver.app.main_screen.ask(driver.chat, "The same question for all of us")

            def watch(history=history, flashed=flashed) -> bool:
                flashed.append(history.flash)
                return history.preemptions > 0

            await driver.until(watch)
            await driver.until_idle()
            assert history.flash <= FLASH
            assert history.is_still is reduced
            if reduced:
                assert set(flashed) == {0}


@pytest.mark.parametrize("size", [(40, 10), (80, 24), (96, 18), (200, 60)])
async def test_every_size_shows_the_context_meter_and_a_prompt(
    tiny_llama: Path, size: tuple[int, int]
) -> None:
    async with started(tiny_llama, size=size) as driver:
        await driver.ask("Hello")
        text = driver.screen_text()
        assert "Ask something" in text
        if size[0] >= 80:
            assert re.search(r"context \d+ %|\d+ / 2,048", text)
        assert driver.prompt.region.bottom <= size[1] - 1
