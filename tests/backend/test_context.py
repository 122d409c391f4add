"""Chats into prompts: token-exact along branches, and what to leave out when there are too many tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanochat.backend.context import Contexts
from nanochat.backend.interface import Turn
from nanochat.conversation import Conversation
from nanochat.engine.outputs import RequestMetrics, RequestOutput
from nanochat.engine.tokenizer import load_tokenizer
from nanochat.ui.chat import Chat


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    return load_tokenizer(tiny_llama)


def prompt_of(chat: Chat, system: str | None = None) -> Turn:
    messages = tuple(message for message in chat.context if message is not chat.live)
    return Turn(chat.id, system, chat.started, messages, {})


def end(chat: Chat, tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    chat.end_answer(RequestOutput(text, ids, "stop", None, None, RequestMetrics()))


def test_a_turn_extends_the_last_prompt_and_a_branch_replaces_it(tokenizer: Any) -> None:
    contexts, chat = Contexts(tokenizer), Chat()
    chat.ask("one")
    first = contexts.prompt_ids(prompt_of(chat))
    end(chat, tokenizer, "answer")
    chat.ask("two")
    second = contexts.prompt_ids(prompt_of(chat))
    assert second[: len(first)] == first
    end(chat, tokenizer, "second answer")
    chat.begin_answer(chat.path[0])
    assert contexts.prompt_ids(prompt_of(chat)) == first
    end(chat, tokenizer, "other")
    chat.ask("two")
    branch = contexts.prompt_ids(prompt_of(chat))
    assert branch == Contexts(tokenizer).prompt_ids(prompt_of(chat))
    assert branch != second


def test_another_system_prompt_starts_anew(tokenizer: Any) -> None:
    contexts, chat = Contexts(tokenizer), Chat()
    chat.ask("one")
    plain = contexts.prompt_ids(prompt_of(chat))
    told = contexts.prompt_ids(prompt_of(chat, "Be brief."))
    assert len(told) > len(plain)
    assert contexts.prompt_ids(prompt_of(chat)) == plain


def test_an_offer_drops_as_few_turns_as_needed(tokenizer: Any) -> None:
    contexts, chat = Contexts(tokenizer), Chat()
    for _ in range(6):
        chat.ask("q" * 20)
        end(chat, tokenizer, "a" * 20)
    chat.ask("last")
    prompt = prompt_of(chat)
    total = len(contexts.prompt_ids(prompt))
    offer = contexts.drop_offer(prompt, limit=total - 60)
    assert offer is not None
    assert offer.tokens_before == total
    room = offer.limit - offer.limit // 8
    assert offer.tokens_after <= room
    chat.leave_out(offer.turns - 1)
    assert len(contexts.prompt_ids(prompt_of(chat))) > room
    chat.leave_out(1)
    assert len(contexts.prompt_ids(prompt_of(chat))) == offer.tokens_after


def test_no_offer_when_the_message_itself_is_too_long(tokenizer: Any) -> None:
    contexts, chat = Contexts(tokenizer), Chat()
    chat.ask("q")
    assert contexts.drop_offer(prompt_of(chat), limit=10) is None
    end(chat, tokenizer, "a")
    chat.ask("x" * 500)
    assert contexts.drop_offer(prompt_of(chat), limit=100) is None


def test_a_chat_may_be_closed_while_its_prompt_is_made(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts, chat = Contexts(tokenizer), Chat()
    chat.ask("one")
    expected = contexts.prepare(prompt_of(chat)).token_ids
    make = Conversation.prompt_ids

    def closed_meanwhile(conversation: Conversation) -> list[int]:
        contexts.forget(chat.id)
        return make(conversation)

    monkeypatch.setattr(Conversation, "prompt_ids", closed_meanwhile)
    assert contexts.prepare(prompt_of(chat)).token_ids == expected
