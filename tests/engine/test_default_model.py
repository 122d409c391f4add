"""The default model, as its users get it: the same tokens as ``transformers``, whatever the scheduler does."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.conversation import Conversation
from nanochat.engine.config import EngineConfig, SamplingParams
from nanochat.engine.engine import Engine
from tests.engine.conftest import assert_idle_and_consistent

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("default-model")]

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about the sea.",
    "What is 17 + 25?",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "List the planets of the solar system in order.",
    "Who wrote Romeo and Juliet?",
    "Explain photosynthesis in one sentence.",
    "Give me a recipe for pancakes.",
    "What does HTTP stand for?",
    "Write a Python function that adds two numbers.",
    "In 1969, what happened on July 20?",
    "Describe a cat to someone who has never seen one.",
    "What is the boiling point of water at sea level?",
    "Suggest a name for a bakery.",
    "What's the difference between a list and a tuple?",
    "Tell me a joke about penguins. 🐧",
    "Wie heißt die Hauptstadt von Österreich?",
    "请用一句话介绍你自己。",
]


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """Model folder, prompts and ``transformers``' greedy answers to them.

    The answers are the engine's, each token of which ``transformers`` finds the likeliest after those before
    it: what its own loop would give, in one pass instead of sixteen.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with Engine(EngineConfig(device="cpu", dtype="float32", num_kv_blocks=512), debug=True) as engine:
        folder = engine.model_dir
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
            for question in QUESTIONS
        ]
        answers = answers_of(engine, prompts, 8, GREEDY)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == answer
        assert len(answer) == GREEDY.max_tokens or answer[-1] == tokenizer.eos_token_id
    return {"folder": folder, "prompts": prompts, "answers": answers}


def answers_of(
    engine: Engine, prompts: list[list[int]], at_once: int, params: SamplingParams
) -> list[list[int]]:
    """Ids of the answers to all prompts, so many at a time."""
    answers: list[list[int]] = []
    for first in range(0, len(prompts), at_once):
        handles = [engine.submit(prompt, params) for prompt in prompts[first : first + at_once]]
        answers += [handle.result(300).token_ids for handle in handles]
    return answers


def run_all(reference: dict[str, Any], at_once: int, length: int = 16, **options: Any) -> Engine:
    """All prompts, so many at a time; the engine is returned closed, for its counters."""
    config = EngineConfig(device="cpu", dtype="float32", **{"num_kv_blocks": 512, **options})
    with Engine(config, debug=True) as engine:
        answers = answers_of(engine, reference["prompts"], at_once, replace(GREEDY, max_tokens=length))
    assert_idle_and_consistent(engine)
    assert answers == [answer[:length] for answer in reference["answers"]]
    return engine


class TestGreedyTokensEqualTransformers:
    def test_each_alone(self, reference: dict[str, Any]) -> None:
        run_all(reference, at_once=1, length=8)

    def test_eight_at_once(self, reference: dict[str, Any]) -> None:
        """And again, from the blocks that the first time has left in the prefix cache."""
        engine = run_all(
            {key: value * 2 for key, value in reference.items() if key != "folder"}, at_once=8, length=8
        )
        assert engine.stats().prefix_hit_tokens > 0

    def test_with_so_few_blocks_that_preemption_happens(self, reference: dict[str, Any]) -> None:
        engine = run_all(reference, at_once=8, num_kv_blocks=20)
        assert engine.stats().preemptions > 0

    def test_chunked_to_a_budget_of_32(self, reference: dict[str, Any]) -> None:
        run_all(reference, at_once=8, max_num_batched_tokens=32)

    def test_without_the_prefix_cache(self, reference: dict[str, Any]) -> None:
        engine = run_all(reference, at_once=8, prefix_caching=False)
        assert engine.stats().prefix_hit_tokens == 0


def test_the_next_turn_computes_only_what_is_new(reference: dict[str, Any]) -> None:
    with Engine(EngineConfig(device="cpu", num_kv_blocks=512), debug=True) as engine:
        chat = Conversation(engine.tokenizer)
        known = 0
        for turn, question in enumerate(QUESTIONS[:6]):
            chat.add_user(question)
            prompt = chat.prompt_ids()
            output = engine.submit(prompt, SamplingParams(max_tokens=60, seed=turn)).result(300)
            if turn:
                computed = output.metrics.prompt_tokens - output.metrics.cached_tokens
                assert computed <= len(prompt) - known + 16
            known = len(prompt) + len(output.token_ids)
            chat.add_assistant(output)


def test_ask_names_paris() -> None:
    command = [sys.executable, "-m", "nanochat", "ask", "What is the capital of France?"]
    finished = subprocess.run(
        [*command, "--temperature", "0", "--json"], capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 0, finished.stderr
    answer = json.loads(finished.stdout)
    assert "Paris" in answer["text"]
    assert set(answer) == {
        "text",
        "token_ids",
        "finish_reason",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "ttft_ms",
        "decode_tok_s",
        "preemptions",
    }


def test_transformers_loads_the_same_folder(reference: dict[str, Any]) -> None:
    folder: Path = reference["folder"]
    assert (folder / "config.json").is_file()
    assert list(folder.glob("*.safetensors"))
