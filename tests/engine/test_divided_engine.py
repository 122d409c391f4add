"""An engine over a divided model answers as one over the whole model does, whatever the steps look like."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanochat.engine import loading
from nanochat.engine.config import SamplingParams
from nanochat.engine.pipeline import GPU_STEPS_AHEAD
from tests.engine.conftest import MakeEngine, assert_idle_and_consistent
from tests.engine.gloo import ThreadRanks
from tests.engine.test_pipeline import KINDS, answers
from tests.engine.test_step_graphs import PlayedGraphs

MIXED = [*KINDS, {"repetition_penalty": 1.3}]
OPTIONS = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 7},
    "preempted": {"num_kv_blocks": 12, "max_num_seqs": 4},
    "int8": {"kv_dtype": "int8", "block_size": 3, "num_kv_blocks": 300},
}


@pytest.fixture(autouse=True)
def ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "Ranks", ThreadRanks)
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", OPTIONS)
def test_kernel_by_kernel(make_engine: MakeEngine, name: str) -> None:
    options: dict[str, Any] = OPTIONS[name]
    whole = make_engine(**options)
    divided = make_engine(**options, tensor_parallel_size=2)
    for _ in range(2):  # the second time from the prefix cache
        assert answers(divided, MIXED) == answers(whole, MIXED)
        assert_idle_and_consistent(divided)
    mine, its = divided.stats(), whole.stats()
    assert mine.prefix_hit_tokens == its.prefix_hit_tokens
    assert mine.preemptions == its.preemptions
    assert (mine.preemptions > 0) == (name == "preempted")
    assert mine.prefix_hit_tokens > 0 or name == "preempted"


@pytest.mark.parametrize(("name", "depth"), [("plain", 0), *((name, GPU_STEPS_AHEAD) for name in OPTIONS)])
def test_recorded_steps_some_ahead(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, name: str, depth: int
) -> None:
    options: dict[str, Any] = OPTIONS[name]
    whole = make_engine(**options)
    expected = [answers(whole, kinds) for kinds in (KINDS, MIXED)]
    monkeypatch.setattr(loading, "_has_graphs", lambda *_: True)
    monkeypatch.setattr(loading, "StepGraphs", PlayedGraphs)
    monkeypatch.setattr(PlayedGraphs, "record_common", lambda *_: None)
    engine = make_engine(**options, tensor_parallel_size=2, max_steps_ahead=depth)
    assert [answers(engine, kinds) for kinds in (KINDS, MIXED)] == expected


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
