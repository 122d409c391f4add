"""Reasoning as the model's own template has it: its tags, whether the prompt opens it, on and off, kept or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanochat.backend.context import Contexts
from nanochat.backend.interface import Turn
from nanochat.ui.chat import Chat
from nanochat.ui.reasoning import AnswerText
from tests.answers import TOKENIZERS, answer, as_text, say
from tests.tiny_model import write_tiny_llama
from tests.ui.driver import started

THINKING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'].split('</reason>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is not defined or enable_thinking %}<reason>\n{% endif %}{% endif %}"
)


def model_with(folder: Path, template: str | None) -> Path:
    write_tiny_llama(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["chat_template"] = template
    file.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
    return folder


def prompt_of(chat: Chat) -> Turn:
    return Turn(
        chat.id,
        None,
        chat.started,
        tuple(message for message in chat.context if message is not chat.live),
        {},
        enable_thinking=chat.enable_thinking,
        keep_reasoning=chat.keep_reasoning,
        partial=chat.live.partial if chat.live is not None else None,
    )


def test_an_answer_that_begins_inside_its_reasoning_is_reasoning_from_the_start() -> None:
    text = AnswerText()
    text.tags, text.is_opened = ("<reason>", "</reason>"), True
    text.append("so", 1)
    assert (text.is_reasoning, text.reasoning, text.answer, text.reasoning_tokens) == (True, "so", "", 1)
    text.append("</reason>\n\nYes", 2)
    assert (text.is_reasoning, text.reasoning, text.answer) == (False, "so", "Yes")


class TestPrompts:
    """With the real template of Qwen3 on a small tokenizer."""

    tokenizer: Any = TOKENIZERS["qwen3"]

    def chat(self, *turns: tuple[str, str], **options: Any) -> Chat:
        chat = Chat(**options)
        for question, text in turns:
            chat.ask(question)
            chat.end_answer(answer(self.tokenizer, say("qwen3", text)))
        chat.ask("next")
        return chat

    def text(self, chat: Chat) -> str:
        return as_text("qwen3", Contexts(self.tokenizer).prompt_ids(prompt_of(chat)))

    def test_thinking_can_be_switched_off(self) -> None:
        assert self.text(self.chat(enable_thinking=False)).endswith("<think>\n\n</think>\n\n")
        assert not self.text(self.chat(enable_thinking=True)).endswith("</think>\n\n")

    def test_a_switch_in_the_middle_leaves_earlier_answers_as_they_were(self) -> None:
        chat = self.chat(("q", "plain"), enable_thinking=False)
        before = self.text(chat)
        chat.enable_thinking = None
        after = self.text(chat)
        assert before.removesuffix("<think>\n\n</think>\n\n") == after

    def test_earlier_reasoning_is_dropped_or_kept(self) -> None:
        turns = (("q", "<think>\nhidden\n</think>\n\nshown"), ("r", "x"))
        assert "hidden" not in self.text(self.chat(*turns))
        assert "hidden" in self.text(self.chat(*turns, keep_reasoning=True))

    def test_a_continued_answer_follows_the_prompt_without_a_half_character(self) -> None:
        chat = self.chat()
        whole = say("qwen3", "caf\u00e9 \N{SNOWMAN}", end=False)
        chat.end_answer(answer(self.tokenizer, whole[:-1], "cancelled"))
        last = chat.path[-1]
        chat.continue_answer(last)
        prepared = Contexts(self.tokenizer).prepare(prompt_of(chat))
        assert prepared.partial is not None
        assert "\ufffd" not in prepared.partial.text
        assert "caf\u00e9 \N{SNOWMAN}".startswith(prepared.partial.text)
        assert prepared.token_ids[-len(prepared.partial.token_ids) :] == prepared.partial.token_ids

    def test_a_continued_answer_of_another_model_is_encoded_anew(self) -> None:
        chat = self.chat()
        chat.end_answer(answer(self.tokenizer, [1, 2, 3], "cancelled", "quite other words"))
        chat.continue_answer(chat.path[-1])
        prepared = Contexts(self.tokenizer).prepare(prompt_of(chat))
        assert as_text("qwen3", prepared.token_ids).endswith("quite other words")


async def test_a_template_with_tags_of_its_own_is_followed(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", THINKING_TEMPLATE.replace("reason>", "think>"))
    async with started(model) as driver:
        await driver.ask("Hello")
        assert driver.chat.path[1].answer.tags == ("<think>", "</think>")
        assert driver.chat.path[1].answer.is_opened
        await driver.until_seen("Thinking")
        await driver.say("/think off")
        assert "reasoning off" in driver.notices()[-1]
        await driver.ask("And now?")
        assert not driver.chat.path[3].answer.is_opened
        await driver.say("/think keep")
        assert "stays in the context" in driver.notices()[-1]
        await driver.say("/think maybe")
        await driver.until_told("/think takes on, off")


async def test_reasoning_and_its_switch_are_back_on_the_next_start(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", THINKING_TEMPLATE.replace("reason>", "think>"))
    file = tmp_path / "history.db"
    async with started(model, history=file) as driver:
        await driver.say("/think on")
        await driver.say("/think keep")
        await driver.ask("Hello")
        tokens = driver.chat.path[1].answer.reasoning_tokens
        assert tokens > 0
    async with started(model, history=file) as driver:
        assert (driver.chat.enable_thinking, driver.chat.keep_reasoning) == (True, True)
        restored = driver.chat.path[1]
        assert (restored.answer.is_opened, restored.answer.reasoning_tokens) == (True, tokens)
        assert restored.enable_thinking is True


async def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    async with started(model_with(tmp_path / "model", None)) as driver:
        await driver.until_told("no chat template")
        assert await driver.ask("Once upon a time")


@pytest.mark.parametrize("command", ["/think on", "/think keep"])
async def test_a_model_that_cannot_reason_says_so(tiny_llama: Path, command: str) -> None:
    async with started(tiny_llama) as driver:
        await driver.say(command)
        assert "no reasoning of its own" in driver.notices()[-1]
