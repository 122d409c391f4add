"""The app over ``nanochat serve``: the real client against the real server, over a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanochat.backend.remote import backend as remote
from nanochat.backend.remote.config import RemoteConfig
from nanochat.ui.message import AnswerMessage
from tests.server.conftest import Running, start_server
from tests.ui.driver import ENDLESS, LONG, Driver, plain, started

Served = Callable[..., tuple[Running, Callable[[], None]]]


@pytest.fixture
def serve(long_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Starts a server; those still running are ended, and must be idle then."""
    monkeypatch.setattr(remote, "METRICS_INTERVAL_S", 0.1)
    ends: list[Callable[[], None]] = []

    def start(**options: Any) -> tuple[Running, Callable[[], None]]:
        running, end = start_server(long_llama, **{**LONG, **options})
        ends.append(end)

        def end_now() -> None:
            ends.remove(end)
            end()

        return running, end_now

    yield start
    for end in ends:
        end()


def at(running: Running, **options: Any) -> RemoteConfig:
    return RemoteConfig(url=running.url, **options)


def footer(driver: Driver) -> str:
    return plain(list(driver.pane.query(AnswerMessage))[-1].query_one(".answer-footer"))


async def test_tabs_stop_and_the_servers_figures(serve: Served) -> None:
    running, _ = serve()
    async with started(at(running), sampling=ENDLESS) as driver:
        await driver.until_seen(f"long-llama · 127.0.0.1:{running.port}")
        await driver.say("first")
        first = driver.chat
        await driver.press("ctrl+n")
        await driver.say("second")
        chats = driver.app.main_screen.workspace.chats
        await driver.until(lambda: all(chat.live and len(chat.live.answer.text) > 30 for chat in chats))
        await driver.until_seen("2 running")
        await driver.until_seen("/ 4,096")  # blocks, from the page of metrics
        assert running.engine.stats().running == 2
        await driver.press("escape")
        await driver.until(lambda: not driver.chat.is_busy)
        assert "stopped" in footer(driver)
        await driver.until(lambda: running.engine.stats().running == 1)  # its blocks are free there
        assert first.is_busy
        await driver.press("alt+1", "escape")
        await driver.until_idle()
        await driver.until(lambda: running.engine.stats().blocks_used == 0)


async def test_a_chat_of_several_turns_reuses_its_prefix_there(serve: Served) -> None:
    running, _ = serve()
    async with started(
        at(running), sampling={"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    ) as driver:
        await driver.ask("A question long enough to fill several blocks of the cache")
        assert "24 tokens" in footer(driver)
        assert "cut off at its length limit" in footer(driver)
        await driver.ask("And another one after it")
        output = driver.chat.path[-1].output
        assert output is not None
        assert output.metrics.prompt_tokens > 100
        assert output.metrics.cached_tokens >= 64
        await driver.until_seen("/ 65,536")
        await driver.until_seen("Prefix hits")
        await driver.press("ctrl+r")
        await driver.until_idle()
        assert driver.chat.path[-1].branch == (2, 2)
        assert driver.answer_text() == output.text  # greedy


async def test_a_server_that_restarts_in_mid_answer(serve: Served) -> None:
    running, end = serve()
    async with started(at(running), sampling=ENDLESS) as driver:
        await driver.say("Tell me")
        await driver.until(lambda: driver.chat.live and len(driver.chat.live.answer.text) > 30)
        end()
        await driver.until_idle()
        kept = driver.chat.path[-1].answer.text
        assert len(kept) > 30
        assert "interrupted · answer again" in footer(driver)
        again, _ = serve(port=running.port)
        await driver.say("/set max_tokens 8")
        await driver.press("ctrl+r")
        await driver.until_idle()
        assert driver.answer_text()
        assert driver.chat.path[-1].branch == (2, 2)
        await driver.until(lambda: again.engine.stats().blocks_used == 0)
        await driver.press("alt+left")
        assert driver.chat.path[-1].answer.text == kept


async def test_errors_of_the_server_are_told_in_its_chat(
    serve: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOCHAT_TEST_KEY", "right")
    running, _ = serve(max_model_len=256, api_key="right")
    async with started(at(running), sampling={}, hold=True) as driver:
        driver.load()
        await driver.until_seen("--api-key-env")
    async with started(at(running, api_key_env="NANOCHAT_TEST_KEY"), sampling={"max_tokens": 8}) as driver:
        await driver.ask("Short")
        await driver.ask("Short too")
        await driver.say("long " * 60)
        await driver.until(lambda: any("finds the prompt too long" in told for told in driver.notices()))
        assert driver.prompt.text.startswith("long long")
        driver.prompt.text = ""
        await driver.say("/set top_k 0")
        assert await driver.ask("All of them")
