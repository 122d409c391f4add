"""Chats with every kind of tokenizer, over a real engine: the model's own ids stay in the context, whatever a chat does.

The answers are a random model's, so they hold what no text would: half characters, spaces anywhere, odd bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from nanochat.backend.interface import Turn
from nanochat.backend.local import LocalBackend
from nanochat.engine.config import EngineConfig
from nanochat.engine.engine import Engine
from nanochat.engine.outputs import RequestOutput
from nanochat.ui.chat import Chat
from nanochat.ui.restoring import joined_outputs
from tests.tiny_model import write_zoo_llama
from tests.tokenizer_zoo import NAMES

BLOCK = 4


@pytest.fixture(scope="module", params=NAMES)
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalBackend]:
    """A model with a tokenizer of the zoo."""
    folder = write_zoo_llama(tmp_path_factory.mktemp("zoo"), request.param)
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", num_kv_blocks=1024, block_size=BLOCK
    )
    with Engine(config, debug=True) as engine:
        yield LocalBackend(engine)


@dataclass(frozen=True)
class Answered:
    """What an answer cost, and the answer; one that went on is whole."""

    prompt: list[int]
    output: RequestOutput
    computed: int
    """Tokens of the prompt that were not in the cache."""


def answer(backend: LocalBackend, chat: Chat, seed: int, max_tokens: int = 8) -> Answered:
    """Let the model answer as the app does."""
    live = chat.live
    assert live is not None
    sampling = {"temperature": 1.0, "seed": seed, "max_tokens": max_tokens, "ignore_eos": True}
    messages = tuple(message for message in chat.context if message is not live)
    turn = Turn(chat.id, chat.system, chat.started, messages, sampling, partial=live.partial)
    prompt = backend._contexts.prepare(turn).token_ids
    started = backend.start(turn)
    output = started.handle.result(30)
    assert "".join(event.text for event in started.handle.poll()) == output.text
    computed = len(prompt) - output.metrics.cached_tokens
    if started.partial is not None:
        output = joined_outputs(started.partial, output)
    chat.end_answer(output)
    return Answered(prompt, output, computed)


def starts_with(ids: list[int], beginning: list[int]) -> bool:
    return ids[: len(beginning)] == beginning


@pytest.mark.parametrize("seed", range(6))
def test_an_answer_that_goes_on_is_one_answer(backend: LocalBackend, seed: int) -> None:
    decode = backend.engine.tokenizer.decode
    chat = Chat()
    said = chat.ask("The capital of France?")
    first = last = answer(backend, chat, seed)
    for more in (1, 2):
        chat.continue_answer(said)
        going_on = answer(backend, chat, seed + 100 * more, max_tokens=5)
        # All but a character that was cut short, which the model writes anew.
        assert starts_with(going_on.prompt, first.prompt)
        kept = going_on.prompt[len(first.prompt) :]
        assert starts_with(last.output.token_ids, kept)
        dropped = last.output.token_ids[len(kept) :]
        assert len(dropped) < 4 or "\ufffd" in decode(dropped)
        whole = going_on.output
        assert starts_with(whole.token_ids, kept)
        assert len(whole.token_ids) == len(kept) + 5
        assert whole.text == decode(
            whole.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert going_on.computed <= BLOCK
        last = going_on
    chat.ask("And of Japan?")
    following = answer(backend, chat, seed)
    known = first.prompt + last.output.token_ids
    assert starts_with(following.prompt, known)
    assert following.computed <= len(following.prompt) - len(known) + BLOCK


def test_branches_and_forks_share_what_they_have_in_common(backend: LocalBackend) -> None:
    chat = Chat()
    chat.ask("What is the weather like?")
    first = answer(backend, chat, 1)
    shared = first.prompt + first.output.token_ids
    chat.ask("And today?")
    answer(backend, chat, 2)
    for other, seed in ((chat, 3), (chat.fork(), 4)):
        other.editing = other.path[2]
        other.ask("Hello hello")  # the question is written anew
        edited = answer(backend, other, seed)
        assert starts_with(edited.prompt, shared)
        assert edited.computed <= len(edited.prompt) - len(shared) + BLOCK
        other.begin_answer(other.path[2])  # and answered once more
        again = answer(backend, other, seed + 10)
        assert again.prompt == edited.prompt
        assert again.computed <= BLOCK
