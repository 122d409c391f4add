"""Faults that other chat apps have had, where no other file of these tests has them."""

from __future__ import annotations

from pathlib import Path

from nanochat.ui.message import AnswerMessage
from tests.ui.driver import ENDLESS, LONG, SHORT, Driver, plain, started
from tests.ui.test_search import import_chat


def footers(driver: Driver) -> list[str]:
    return [plain(answer.query_one(".answer-footer")) for answer in driver.pane.query(AnswerMessage)]


async def test_stopping_frees_the_requests_blocks_and_keeps_its_text(long_llama: Path) -> None:
    async with started(long_llama, sampling=ENDLESS, **LONG) as driver:
        await driver.say("Go")
        await driver.until(lambda: driver.chat.live and len(driver.chat.live.answer.text) > 30)
        shown = driver.chat.live.answer.text  # type: ignore[union-attr]
        engine = driver.app.main_screen.bridge.backend.engine  # type: ignore[union-attr]
        assert engine.stats().blocks_used > 0
        await driver.press("escape")
        await driver.until_idle()
        assert engine.stats().blocks_used == 0
        assert driver.chat.path[-1].answer.text.startswith(shown)


async def test_a_runaway_answer_leaves_the_others_their_turn_and_its_rate_is_live(long_llama: Path) -> None:
    async with started(long_llama, sampling=ENDLESS, **LONG) as driver:
        await driver.say("Run away")
        await driver.until(lambda: driver.chat.live and driver.chat.live_rate)
        await driver.until(lambda: "tok/s" in footers(driver)[0])
        await driver.press("ctrl+n")
        driver.chat.sampling = dict(SHORT)
        await driver.say("And I?")
        await driver.until(lambda: not driver.chat.is_busy)
        assert driver.answer_text()
        runaway = driver.app.main_screen.workspace.chats[0]
        assert runaway.is_busy
        assert runaway.live_rate


async def test_switching_tabs_while_they_answer_mixes_nothing_and_answering_again_works(
    long_llama: Path,
) -> None:
    async with started(long_llama, sampling=ENDLESS | {"max_tokens": 400}, **LONG) as driver:
        await driver.say("a")
        await driver.press("ctrl+n")
        await driver.say("b")
        first, second = driver.app.main_screen.workspace.chats
        for _ in range(6):
            await driver.press("f4")
        await driver.until_idle()
        texts = {}
        for chat in (first, second):
            output = chat.path[-1].output
            assert output is not None
            assert output.metrics.completion_tokens == 400
            texts[chat.title] = output.text
        assert texts["a"] != texts["b"]
        await driver.press("alt+1", "ctrl+r")
        await driver.press("f4")
        await driver.until_idle()
        assert first.path[-1].branch == (2, 2)
        assert first.path[-1].output.text == texts["a"]  # type: ignore[union-attr]
        assert second.path[-1].branch == (1, 1)


async def test_a_full_context_ends_the_answer_and_keeps_it(tiny_llama: Path) -> None:
    async with started(tiny_llama, sampling=ENDLESS, max_model_len=128, num_kv_blocks=32) as driver:
        text = await driver.ask("Go")
        output = driver.chat.path[-1].output
        assert output is not None
        assert output.finish_reason == "length"
        assert output.metrics.prompt_tokens + output.metrics.completion_tokens >= 127
        await driver.say("/continue")  # there is no room: refused, and nothing changes
        await driver.until(lambda: not driver.chat.is_busy)
        assert driver.answer_text() == text
        assert len(driver.chat.path) == 2
        assert footers(driver)[0].endswith("cut off at its length limit")


async def test_a_start_reads_only_the_chats_in_tabs(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    for number in range(100):
        import_chat(file, f"Chat {number}", ["q", "a"], as_tab=number == 7)
    async with started(tiny_llama, history=file, hold=True) as driver:
        assert [chat.title for chat in driver.app.main_screen.workspace.chats] == ["Chat 7"]
