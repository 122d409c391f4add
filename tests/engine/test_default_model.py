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

pytestmark = pytest.mark.slow

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
    """Model folder, prompts and ``transformers``' greedy answers to them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with Engine(EngineConfig(device="cpu", dtype="float32", num_kv_blocks=8)) as engine:
        folder = engine.model_dir
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts, answers = [], []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        output = model.generate(torch.tensor([prompt]), max_new_tokens=GREEDY.max_tokens, do_sample=False)
        prompts.append(prompt)
        answers.append(output[0, len(prompt) :].tolist())
    return {"folder": folder, "prompts": prompts, "answers": answers}


def run_all(reference: dict[str, Any], at_once: int, length: int = 16, **options: Any) -> Engine:
    """All prompts, so many at a time; the engine is returned closed, for its counters."""
    params = replace(GREEDY, max_tokens=length)
    config = EngineConfig(device="cpu", dtype="float32", **{"num_kv_blocks": 512, **options})
    with Engine(config, debug=True) as engine:
        answers: list[list[int]] = []
        for first in range(0, len(QUESTIONS), at_once):
            batch = reference["prompts"][first : first + at_once]
            handles = [engine.submit(prompt, params) for prompt in batch]
            answers += [handle.result(300).token_ids for handle in handles]
    assert_idle_and_consistent(engine)
    assert answers == [answer[:length] for answer in reference["answers"]]
    return engine


class TestGreedyTokensEqualTransformers:
    def test_each_alone(self, reference: dict[str, Any]) -> None:
        run_all(reference, at_once=1, length=8)

    def test_eight_at_once(self, reference: dict[str, Any]) -> None:
        run_all(reference, at_once=8)

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
