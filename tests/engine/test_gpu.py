"""The engine on a GPU: the same tokens as on the CPU. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanochat.engine.config import SamplingParams
from tests.engine.conftest import MakeEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def answers(engine: Any) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 259, (20 + 9 * i,), generator=generator).tolist() for i in range(8)]
    handles = [engine.submit(prompt, GREEDY) for prompt in prompts]
    return [handle.result(300).token_ids for handle in handles]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"num_kv_blocks": 20, "block_size": 8},
        {"prefix_caching": False, "block_size": 32},
        {"kv_dtype": "int8"},
    ],
    ids=["plain", "chunked", "preempted", "no prefix cache", "int8"],
)
def test_greedy_tokens_equal_the_cpus(make_engine: MakeEngine, options: dict[str, Any]) -> None:
    expected = answers(make_engine(**options))
    engine = make_engine(device="cuda", **options)
    assert engine.device_name == "cuda"
    assert answers(engine) == expected


def test_sampled_tokens_equal_the_cpus(make_engine: MakeEngine) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=5, max_tokens=24, ignore_eos=True)
    on_cpu = make_engine().submit([40] * 20, params).result(300)
    on_gpu = make_engine(device="cuda").submit([40] * 20, params).result(300)
    assert on_gpu.token_ids == on_cpu.token_ids


def test_the_cache_is_sized_from_free_memory(make_engine: MakeEngine) -> None:
    engine = make_engine(device="cuda", dtype="auto", num_kv_blocks=None, gpu_memory_utilization=0.5)
    total = torch.cuda.get_device_properties(0).total_memory
    cache_bytes = engine.stats().blocks_total * engine.config.block_size * engine.kv_bytes_per_token
    assert 0.3 * total < cache_bytes < 0.5 * total
    assert engine.submit([40] * 20, GREEDY).result(300).finish_reason == "length"
