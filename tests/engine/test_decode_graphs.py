"""What can be shown of graphs without a GPU: their sizes, which plans they take, and the step they hold."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from nanochat.engine.config import EngineConfig, SamplingParams
from nanochat.engine.decode_graphs import DecodeInputs, decode, graph_sizes, is_replayable
from nanochat.engine.loading import load_model
from nanochat.engine.memory import allocate_caches
from nanochat.engine.request import Request
from nanochat.engine.runner import Runner
from nanochat.engine.step_plan import ScheduledChunk, StepPlan
from tests.engine.conftest import MakeEngine

BLOCK_SIZE = 4
MAX_MODEL_LEN = 100
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40),
    SamplingParams(temperature=1.5, min_p=0.05),
]


def prefilled(count: int) -> tuple[StepPlan, StepPlan]:
    """The plan that prefills ``count`` requests of mixed lengths, and the one that decodes a token of each."""
    generator = torch.Generator().manual_seed(count)
    requests = []
    for index in range(count):
        tokens = torch.randint(3, 259, (2 + 5 * index,), generator=generator).tolist()
        width = -(-len(tokens) // BLOCK_SIZE)
        table = list(range(16 * index, 16 * index + width))
        requests.append(
            Request(index, tokens, PARAMS[index % len(PARAMS)], sampling_seed=-7 * index, block_table=table)
        )
    prefills = tuple(ScheduledChunk(r, 0, r.num_tokens - 1, samples=False) for r in requests)
    decodes = tuple(ScheduledChunk(r, r.num_tokens - 1, 1, samples=True) for r in requests)
    return StepPlan(0, (), prefills, ()), StepPlan(1, decodes, (), ())


class TestGraphSizes:
    @pytest.mark.parametrize(
        ("max_num_seqs", "sizes"),
        [
            (1, [1]),
            (2, [1, 2]),
            (7, [1, 2, 4, 7]),
            (8, [1, 2, 4, 8]),
            (33, [1, 2, 4, 8, 16, 24, 32, 33]),
            (64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        ],
    )
    def test_end_with_the_largest_step(self, max_num_seqs: int, sizes: list[int]) -> None:
        assert graph_sizes(max_num_seqs) == sizes

    @pytest.mark.parametrize("max_num_seqs", [100, 256, 1000, 65536])
    def test_pad_by_at_most_an_eighth_and_are_few(self, max_num_seqs: int) -> None:
        sizes = graph_sizes(max_num_seqs)
        assert len(sizes) < 100
        assert sizes[-1] == max_num_seqs
        for smaller, larger in pairwise(sizes):
            assert smaller < larger <= max(smaller * 9 / 8, smaller + 8)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_padding_changes_no_token_and_no_cache(tiny_llama: Path, kv_dtype: torch.dtype) -> None:
    config = EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", num_kv_blocks=1)
    model = load_model(config, lambda progress: None)
    device = torch.device("cpu")
    with torch.inference_mode():
        for count in range(1, 10):
            prefill, decodes = prefilled(count)
            caches = allocate_caches(model.config, 160, BLOCK_SIZE, kv_dtype, device)
            for cache in caches:
                cache.k.zero_()  # what memory holds by chance may be NaN, which equals nothing
            runner = Runner(model.runner.decoder, caches)
            runner.run(prefill)
            expected = runner.run(decodes).token_ids
            before = [cache.k.clone() for cache in caches]
            size = next(size for size in graph_sizes(64) if size >= count)
            inputs = DecodeInputs(size, -(-MAX_MODEL_LEN // BLOCK_SIZE), MAX_MODEL_LEN, device)
            # A larger step first: nothing of it may stay.
            inputs.fill(prefilled(size)[1], BLOCK_SIZE)
            inputs.fill(decodes, BLOCK_SIZE)
            assert decode(runner.decoder, caches, inputs)[:count].tolist() == expected
            for cache, k in zip(caches, before, strict=True):
                # The step's own keys were written again, by products of another shape.
                torch.testing.assert_close(cache.k, k, atol=1 if kv_dtype == torch.int8 else 1e-5, rtol=0)


def test_only_decodes_without_penalty_and_logprobs_are_replayable() -> None:
    prefill, decodes = prefilled(3)
    assert is_replayable(decodes)
    assert not is_replayable(prefill)
    assert not is_replayable(StepPlan(2, decodes.decodes[:1], prefill.prefills[1:], ()))
    for params in (SamplingParams(logprobs=0), SamplingParams(repetition_penalty=1.1)):
        decodes.decodes[1].request.params = params
        assert not is_replayable(decodes)


def test_the_option_has_no_effect_on_a_cpu(make_engine: MakeEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    engines = [make_engine(cuda_graphs=cuda_graphs) for cuda_graphs in (True, False)]
    first, second = (engine.submit([40] * 9, params).result(60).token_ids for engine in engines)
    assert first == second
