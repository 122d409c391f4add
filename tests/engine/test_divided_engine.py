"""An engine over a divided model answers as one over the whole model does, whatever the steps look like."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.engine import loading
from nanochat.engine.config import EngineConfig, SamplingParams
from nanochat.engine.engine import Engine
from nanochat.engine.pipeline import GPU_STEPS_AHEAD
from nanochat.engine.stats import EngineStats
from nanochat.errors import NanochatError
from tests.engine.conftest import MakeEngine
from tests.engine.gloo import ThreadRanks
from tests.engine.test_pipeline import KINDS, answers
from tests.engine.test_step_graphs import PlayedGraphs
from tests.tiny_model import write_tiny_llama

MIXED = [KINDS[0], KINDS[1], KINDS[3], KINDS[4], {"repetition_penalty": 1.3}]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 7},
    "preempted": {"num_kv_blocks": 12, "max_num_seqs": 4},
    "int8": {"kv_dtype": "int8", "block_size": 3, "num_kv_blocks": 300},
}

Expected = tuple[list[list[tuple[Any, ...]]], EngineStats]


@pytest.fixture(autouse=True)
def ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "Ranks", ThreadRanks)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def one_rank(tiny_llama: Path) -> Callable[[str], Expected]:
    """What one rank answers with some options, and how it went; computed once for all tests."""

    @functools.cache
    def expected(name: str) -> Expected:
        options: dict[str, Any] = {"num_kv_blocks": 64} | OPTIONS[name]
        config = EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", **options)
        with Engine(config) as engine:
            return [answers(engine, MIXED) for _ in range(2)], engine.stats()

    return expected


@pytest.mark.parametrize("name", OPTIONS)
def test_kernel_by_kernel(make_engine: MakeEngine, name: str, one_rank: Callable[[str], Expected]) -> None:
    expected, its = one_rank(name)
    divided = make_engine(**OPTIONS[name], tensor_parallel_size=2)
    assert [
        answers(divided, MIXED) for _ in range(2)
    ] == expected  # first computed, then from the prefix cache
    mine = divided.stats()
    assert (mine.prefix_hit_tokens, mine.preemptions) == (its.prefix_hit_tokens, its.preemptions)
    assert (mine.preemptions > 0) == (name == "preempted")
    assert mine.prefix_hit_tokens > 0 or name == "preempted"


@pytest.mark.parametrize("name", OPTIONS)
def test_recorded_steps_some_ahead(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    one_rank: Callable[[str], Expected],
) -> None:
    expected, _ = one_rank(name)
    monkeypatch.setattr(loading, "_has_graphs", lambda *_: True)
    monkeypatch.setattr(loading, "StepGraphs", PlayedGraphs)
    monkeypatch.setattr(PlayedGraphs, "record_common", lambda *_: None)
    engine = make_engine(**OPTIONS[name], tensor_parallel_size=2, max_steps_ahead=GPU_STEPS_AHEAD)
    assert answers(engine, MIXED) == expected[0]


def test_cancels_leave_the_others_alone(make_engine: MakeEngine) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    endless = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)
    whole = make_engine(num_kv_blocks=200).submit([50, 51, 52], greedy).result(60)
    engine = make_engine(num_kv_blocks=200, tensor_parallel_size=2)
    cancelled, kept = engine.submit([40] * 30, endless), engine.submit([50, 51, 52], greedy)
    for _ in range(3):
        next(iter(cancelled))
    cancelled.cancel()
    assert cancelled.result(60).finish_reason == "cancelled"
    assert kept.result(60).token_ids == whole.token_ids


def test_a_wrong_file_costs_no_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of the model's files is refused, no process is left behind."""
    folder = write_tiny_llama(tmp_path / "model")
    (folder / "generation_config.json").write_text("[")
    started: list[object] = []
    monkeypatch.setattr(loading, "_start_ranks", lambda *_: started.append(1))
    with pytest.raises(NanochatError, match="generation_config"):
        Engine(EngineConfig(model=str(folder), device="cpu", tensor_parallel_size=2, num_kv_blocks=16))
    assert not started
