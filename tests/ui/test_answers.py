"""Asking, stopping, answering again, forking: over a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual import events

from nanochat.ui.chat import Phase
from nanochat.ui.dialogs import Confirm
from nanochat.ui.message import AnswerMessage
from tests.ui.driver import ENDLESS, LONG, plain, started


async def test_an_answer_streams_and_ends_with_its_footer(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        text = await driver.ask("Hello")
        (answer,) = driver.pane.query(AnswerMessage)
        footer = plain(answer.query_one(".answer-footer"))
        assert "TTFT" in footer
        assert "12 tokens" in footer
        assert "cut off at its length limit" in footer
        assert driver.chat.title == "Hello"
        assert len(text) > 0


async def test_a_prompt_sent_before_the_model_is_loaded_waits_for_it(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.say("Early")
        await driver.until_seen("will be sent when the model is ready")
        assert driver.chat.phase is Phase.LOADING
        driver.load()
        await driver.until_ready()
        await driver.until_idle()
        assert driver.answer_text()


async def test_enter_after_fast_typing_sends_all_of_it(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        for key, character in [*((letter, letter) for letter in "quick"), ("enter", "\r")]:
            driver.app.post_message(events.Key(key, character))
        await driver.until(lambda: driver.chat.root.children)
        assert driver.chat.path[0].text == "quick"
        await driver.until_idle()


async def test_tabs_answer_at_once_and_a_hidden_one_is_drawn_when_shown(long_llama: Path) -> None:
    async with started(long_llama, sampling=ENDLESS, **LONG) as driver:
        await driver.say("first")
        first = driver.chat
        await driver.press("ctrl+n")
        await driver.say("second")
        await driver.until(
            lambda: all(
                chat.live and len(chat.live.answer.text) > 30
                for chat in driver.app.main_screen.workspace.chats
            )
        )
        assert driver.chat.title == "second"
        await driver.press("alt+1")
        assert driver.chat is first
        (answer,) = driver.pane.query(AnswerMessage)
        await driver.until(lambda: answer._text.source)
        assert first.live is not None
        assert first.live.answer.text.startswith(answer._text.source)


async def test_escape_stops_and_the_partial_answer_stays_in_the_context(long_llama: Path) -> None:
    async with started(long_llama, sampling=ENDLESS, **LONG) as driver:
        await driver.say("Tell me")
        await driver.until(lambda: driver.chat.live and driver.chat.live.answer.text)
        await driver.press("escape")
        await driver.until_idle()
        answer = driver.chat.last_answer
        assert answer is not None
        assert answer.output is not None
        assert answer.output.finish_reason == "cancelled"
        await driver.until_seen("stopped")
        partial = len(answer.output.token_ids)
        assert partial > 0
        await driver.say("/set max_tokens 4")
        await driver.ask("Go on")
        last = driver.chat.last_answer
        assert last is not None
        assert last.output is not None
        assert last.output.metrics.prompt_tokens > partial
        assert last.output.metrics.cached_tokens >= answer.output.metrics.prompt_tokens // 16 * 16


async def test_answering_again_keeps_the_old_answer_as_a_branch(tiny_llama: Path) -> None:
    async with started(
        tiny_llama, sampling={"max_tokens": 8, "temperature": 2.0, "ignore_eos": True}
    ) as driver:
        first = await driver.ask("Question")
        await driver.press("ctrl+r")
        await driver.until_idle()
        second = driver.answer_text()
        await driver.until_seen("‹ 2/2 ›")
        await driver.press("alt+left")
        assert driver.answer_text() == first
        await driver.until_seen("‹ 1/2 ›")
        await driver.press("alt+left")
        assert driver.answer_text() == first
        await driver.ask("And then?")
        await driver.press("alt+right")
        assert driver.answer_text() == second
        assert len(driver.chat.path) == 2
        await driver.press("alt+left")
        assert [message.text for message in driver.chat.path if message.role == "user"] == [
            "Question",
            "And then?",
        ]


async def test_a_fork_shares_blocks_with_its_original(tiny_llama: Path) -> None:
    async with started(tiny_llama, sampling=ENDLESS | {"max_tokens": 60}) as driver:
        await driver.ask("A question long enough to fill several blocks of the cache")
        await driver.press("ctrl+f")
        assert driver.chat.title.startswith("Fork of A question long enough")
        assert len(driver.pane.query(AnswerMessage)) == 1
        await driver.ask("More")
        answer = driver.chat.last_answer
        assert answer is not None
        assert answer.output is not None
        assert answer.output.metrics.cached_tokens >= 64


async def test_a_fork_while_answering_takes_the_question_as_draft(long_llama: Path) -> None:
    async with started(long_llama, sampling=ENDLESS, **LONG) as driver:
        await driver.say("Tell me a lot")
        await driver.until(lambda: driver.chat.live and driver.chat.live.answer.text)
        await driver.press("ctrl+f")
        assert driver.chat.path == []
        await driver.press("!")
        assert driver.prompt.text == "Tell me a lot!"


async def test_closing_asks_only_while_answering(long_llama: Path) -> None:
    async with started(long_llama, sampling=ENDLESS, **LONG) as driver:
        workspace = driver.app.main_screen.workspace
        await driver.press("ctrl+n")
        await driver.press("ctrl+w")
        await driver.until(lambda: len(workspace.chats) == 1)
        await driver.say("Tell me")
        await driver.until(lambda: driver.chat.live and driver.chat.live.answer.text)
        busy = driver.chat
        await driver.press("ctrl+w")
        await driver.press("escape")
        assert workspace.chats == [busy]
        await driver.press("ctrl+w")
        await driver.press("y")
        await driver.until(lambda: busy not in workspace.chats)
        assert len(workspace.chats) == 1
        engine = driver.app.main_screen.bridge.backend.engine
        await driver.until(lambda: engine.stats().blocks_used == 0)


@pytest.mark.slow
async def test_chats_survive_a_cache_too_small_for_all_of_them(tiny_llama: Path) -> None:
    sampling = ENDLESS | {"max_tokens": 300}
    async with started(tiny_llama, sampling=sampling, num_kv_blocks=32, max_model_len=512) as driver:
        for number in range(4):
            if number:
                await driver.press("ctrl+n")
            driver.app.main_screen.ask(driver.chat, "The same question for all of us")
        await driver.until_idle()
        outputs = [chat.path[-1].output for chat in driver.app.main_screen.workspace.chats]
        assert len({output.text for output in outputs}) == 1
        assert sum(output.metrics.preemptions for output in outputs) > 0
        await driver.until_seen("Preempted")


async def test_a_prompt_over_the_limit_is_refused_with_numbers_and_an_offer(tiny_llama: Path) -> None:
    async with started(tiny_llama, max_model_len=160, num_kv_blocks=32) as driver:
        await driver.ask("a" * 40)
        await driver.ask("b" * 30)
        await driver.say("c" * 60)
        await driver.until(lambda: isinstance(driver.app.screen, Confirm))
        refusal = driver.notices()[-1]
        assert "159" in refusal
        assert "Leave out and send" in refusal
        await driver.press("escape")
        assert driver.prompt.text == "c" * 60
        assert len(driver.chat.path) == 4
        await driver.press("enter")
        await driver.until(lambda: isinstance(driver.app.screen, Confirm))
        await driver.press("y")
        await driver.until_idle()
        assert driver.chat.left_out is not None
        assert driver.chat.path[-2].text == "c" * 60
        assert driver.answer_text()
        assert driver.prompt.text == ""
        assert [text for text in driver.notices() if "of the context" not in text or "above" in text] == [
            "The turns above are left out of the context."
        ]


async def test_an_offer_ends_with_the_messages_it_was_about(tiny_llama: Path) -> None:
    async with started(tiny_llama, max_model_len=160, num_kv_blocks=32) as driver:
        await driver.ask("a" * 40)
        await driver.ask("b" * 30)
        await driver.say("c" * 60)
        await driver.until(lambda: isinstance(driver.app.screen, Confirm))
        await driver.press("escape")
        driver.pane.take_prompt()
        await driver.say("/clear")
        await driver.press("y")
        await driver.until(lambda: not driver.chat.path)
        await driver.say("/drop")
        await driver.until_told("The last turn always stays")
        assert (driver.chat.left_out, driver.chat.path) == (None, [])


@pytest.mark.parametrize("way", ["another question", "another branch", "an edit", "another model"])
async def test_an_offer_ends_when_something_else_is_to_be_sent(tiny_llama: Path, way: str) -> None:
    async with started(tiny_llama, max_model_len=160, num_kv_blocks=32) as driver:
        main = driver.app.main_screen
        await driver.ask("a" * 40)
        await driver.ask("b" * 30)
        await driver.press("ctrl+r")
        await driver.until(lambda: driver.chat.path[-1].branch[1] == 2)
        await driver.until_idle()
        await driver.say("c" * 60)
        await driver.until(lambda: isinstance(driver.app.screen, Confirm))
        await driver.press("escape")
        assert any("Leave out and send" in notice for notice in driver.notices())
        driver.chat.warned_context = True
        if way == "another question":
            driver.pane.take_prompt()
            await driver.ask("d")
        elif way == "another branch":
            main.action_previous_branch()
        elif way == "an edit":
            main.action_edit()
        else:
            main.release()
            assert not driver.chat.warned_context
        questions = [message.text for message in driver.chat.path if message.role == "user"]
        await driver.until(lambda: not any("Leave out and send" in notice for notice in driver.notices()))
        main.action_drop_oldest()
        await driver.until_told("/drop 1 leaves out the oldest turn")
        assert [message.text for message in driver.chat.path if message.role == "user"] == questions
        assert len(driver.chat.context) == len(driver.chat.path)


async def test_an_answer_that_could_not_go_on_goes_on_once_turns_are_left_out(tiny_llama: Path) -> None:
    async with started(tiny_llama, max_model_len=160, num_kv_blocks=32) as driver:
        await driver.ask("a" * 40)
        await driver.say("/set max_tokens 500")
        begun = await driver.ask("b" * 10)
        await driver.say("/set max_tokens 5")
        await driver.say("/continue")
        await driver.until(lambda: isinstance(driver.app.screen, Confirm))
        await driver.press("y")
        await driver.until(lambda: driver.chat.left_out is not None)
        await driver.until_idle()
        assert driver.chat.path[-1].branch == (1, 1)
        output = driver.chat.path[-1].output
        assert output is not None
        assert output.text.startswith(begun.removesuffix("\ufffd"))
        assert len(output.text) > len(begun)


async def test_a_question_on_its_way_is_not_cleared_from_under_its_answer(long_llama: Path) -> None:
    async with started(long_llama, sampling=ENDLESS, **LONG) as driver:
        main = driver.app.main_screen
        main.ask(driver.chat, "Hello")
        await driver.until(lambda: driver.chat.live and driver.chat.live.answer.text)
        await driver.press("escape")
        await driver.until_idle()
        main.action_clear_chat()
        main.ask(driver.chat, "On its way")
        await driver.until(lambda: isinstance(driver.app.screen, Confirm))
        await driver.press("y")
        await driver.until_told("Stop the answer first")
        assert [message.text for message in driver.chat.path if message.role == "user"] == [
            "Hello",
            "On its way",
        ]
        await driver.press("escape")
        await driver.until_idle()


async def test_a_message_that_fits_alone_in_no_way_gets_no_offer(tiny_llama: Path) -> None:
    async with started(tiny_llama, max_model_len=64, num_kv_blocks=16) as driver:
        await driver.say("x" * 300)
        await driver.until(driver.notices)
        assert len(driver.notices()) == 1
        assert driver.prompt.text == "x" * 300
        assert driver.chat.path == []


async def test_a_nearly_full_context_is_announced_once(tiny_llama: Path) -> None:
    async with started(tiny_llama, max_model_len=128, num_kv_blocks=32) as driver:
        await driver.ask("x" * 76)
        (warning,) = driver.notices()
        assert "of the context" in warning
        await driver.say("y")
        await driver.until_idle()
        assert len([text for text in driver.notices() if "of the context" in text]) == 1
