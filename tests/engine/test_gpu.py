"""The engine on a GPU: the same tokens as on the CPU. Skipped where there is none."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.engine import step_graphs
from nanochat.engine.config import SamplingParams
from nanochat.engine.engine import Engine
from nanochat.engine.handle import RequestHandle
from nanochat.engine.request import Request
from nanochat.engine.step_plan import ScheduledChunk, StepPlan
from tests.engine.conftest import MakeEngine
from tests.engine.models.random_models import CASES, write_random_model
from tests.engine.test_pipeline import KINDS
from tests.engine.test_pipeline import answers as token_answers
from tests.tiny_model import write_tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


PROMPTS = [
    torch.randint(3, 259, (20 + 9 * i,), generator=torch.Generator().manual_seed(i)).tolist()
    for i in range(8)
]

INT8_TOLERANCE = 0.02
"""Of the logits' norm. The INT8 cache itself moves this model's logits by up to twice as much."""


def answers(engine: Engine) -> list[list[int]]:
    handles = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    return [handle.result(300).token_ids for handle in handles]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"num_kv_blocks": 20, "block_size": 8},
        {"prefix_caching": False, "block_size": 32},
    ],
    ids=["plain", "chunked", "preempted", "no prefix cache"],
)
def test_greedy_tokens_equal_the_cpus(make_engine: MakeEngine, options: dict[str, Any]) -> None:
    expected = answers(make_engine(**options))
    engine = make_engine(device="cuda", **options)
    assert engine.device_name == "cuda"
    assert answers(engine) == expected


def logits(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """``[2, vocab]``: after a prompt's last token but one, prefilled, and after its last, decoded."""
    runner = engine._model.runner
    table = list(range(-(-len(prompt) // engine.config.block_size)))
    request = Request(-1, prompt, GREEDY, block_table=table)
    prefill = ScheduledChunk(request, 0, len(prompt) - 1, samples=True)
    decode = ScheduledChunk(request, len(prompt) - 1, 1, samples=True)
    with torch.inference_mode():
        prefilled = runner.hidden_states(StepPlan(0, (), (prefill,), ()))[-1:]
        decoded = runner.hidden_states(StepPlan(1, (decode,), (), ()))
        return runner.decoder.compute_logits(torch.cat([prefilled, decoded])).cpu()


def test_int8_logits_are_near_the_cpus(make_engine: MakeEngine) -> None:
    """Near, not equal: on a GPU the prefill's softmax weights meet INT8 values as BF16 numbers."""
    on_cpu, on_gpu = make_engine(kv_dtype="int8"), make_engine(kv_dtype="int8", device="cuda")
    for prompt in PROMPTS:
        expected, actual = logits(on_cpu, prompt), logits(on_gpu, prompt)
        error = (actual - expected).norm() / expected.norm()
        assert error < INT8_TOLERANCE, len(prompt)


def mixed_answers(engine: Engine, count: int) -> list[list[int]]:
    """Of ``count`` requests at once: greedy, with every filter, and untouched sampling, of uneven lengths."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
        {"temperature": 1.2},
        {"temperature": 0.9, "min_p": 0.05},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "repetition_penalty": 0.8, "top_p": 0.95},
    ]
    params = [
        SamplingParams(**kinds[i % len(kinds)], seed=i, max_tokens=12 + i % 3, ignore_eos=True)
        for i in range(count)
    ]
    handles = [engine.submit(PROMPTS[i % 8][:60], each) for i, each in enumerate(params)]
    return [handle.result(300).token_ids for handle in handles]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_blocks": 20, "block_size": 8}, {"kv_dtype": "int8"}, {"max_num_seqs": 7}],
    ids=["plain", "preempted", "int8", "fewer rows than requests"],
)
def test_graphs_change_no_token(make_engine: MakeEngine, options: dict[str, Any]) -> None:
    eager = make_engine(device="cuda", cuda_graphs=False, **options)
    replaying = make_engine(device="cuda", **options)
    assert eager._model.runner._graphs is None
    for count in range(1, 10):
        assert mixed_answers(replaying, count) == mixed_answers(eager, count), count
    graphs = replaying._model.runner._graphs
    replaying.close()  # until then it records what came once
    assert graphs is not None
    assert {shape.prefill_rows > 0 for shape in graphs._recordings} == {True, False}


def test_a_penalty_is_part_of_a_recording(make_engine: MakeEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, repetition_penalty=1.3)
    results = []
    for device in ("cpu", "cuda"):
        engine = make_engine(device=device)
        handles = [engine.submit(prompt, params) for prompt in PROMPTS[:3]]
        results.append([handle.result(300).token_ids for handle in handles])
    assert results[0] == results[1]
    graphs = engine._model.runner._graphs
    assert graphs is not None
    assert any(shape.prefill_rows == 0 for shape in graphs._recordings)


def test_few_recordings_will_do(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MAX_RECORDINGS", 2)
    engine = make_engine(device="cuda")
    eager = make_engine(device="cuda", cuda_graphs=False)
    for count in (1, 5, 3, 9):
        assert mixed_answers(engine, count) == mixed_answers(eager, count)
    graphs = engine._model.runner._graphs
    engine.close()  # until then it records what came once
    assert graphs is not None
    assert len(graphs._recordings) == 2


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize(
    "options", [{}, {"num_kv_blocks": 12, "max_num_seqs": 4}, {"kv_dtype": "int8"}], ids=str
)
def test_running_ahead_changes_no_token(
    make_engine: MakeEngine, depth: int, cuda_graphs: bool, options: dict[str, Any]
) -> None:
    options = {**options, "device": "cuda", "cuda_graphs": cuda_graphs}
    kinds = [*KINDS, {"repetition_penalty": 1.3}]
    expected = token_answers(make_engine(max_steps_ahead=0, **options), kinds)
    assert token_answers(make_engine(max_steps_ahead=depth, **options), kinds) == expected


@pytest.mark.parametrize("depth", [0, 4])
def test_random_events_lose_and_repeat_nothing(make_engine: MakeEngine, depth: int) -> None:
    """Submissions and cancels at random moments: what is shown is always the beginning of the right answer."""
    engine = make_engine(device="cuda", max_steps_ahead=depth, num_kv_blocks=60, max_num_seqs=8)
    expected = [
        engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
        .result(300)
        .token_ids
        for prompt in PROMPTS
    ]
    rng = random.Random(depth)
    running: list[tuple[int, int, RequestHandle]] = []
    for _ in range(1000):
        event = rng.random()
        if event < 0.4 and len(running) < 12:
            index, length = rng.randrange(len(PROMPTS)), rng.randint(1, 200)
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            running.append((index, length, engine.submit(PROMPTS[index], params)))
        elif event < 0.6 and running:
            rng.choice(running)[2].cancel()
        elif event < 0.7:
            time.sleep(0.001)
        for entry in [entry for entry in running if entry[2].done]:
            running.remove(entry)
            check_answer(entry, expected)
    for entry in running:
        check_answer(entry, expected)


def check_answer(entry: tuple[int, int, RequestHandle], expected: list[list[int]]) -> None:
    index, length, handle = entry
    output = handle.result(300)
    if output.finish_reason == "length":
        assert output.token_ids == expected[index][:length]
    else:
        assert output.finish_reason == "cancelled"
        assert output.token_ids == expected[index][: len(output.token_ids)]
    assert [token for event in handle.poll() for token in event.token_ids] == output.token_ids


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("params", [{}, {"logprobs": 2, "repetition_penalty": 1.2, "top_p": 0.9}], ids=str)
def test_no_step_waits_for_the_device(
    make_engine: MakeEngine, cuda_graphs: bool, params: dict[str, Any]
) -> None:
    runner = make_engine(device="cuda", cuda_graphs=cuda_graphs)._model.runner
    sampling = SamplingParams(temperature=0.8, **params)
    requests = [Request(-1, PROMPTS[n][:17], sampling, block_table=[4 * n, 4 * n + 1]) for n in range(3)]
    prefills = [ScheduledChunk(request, 0, 16, samples=True) for request in requests]
    decodes = [ScheduledChunk(request, 16, 1, samples=True) for request in requests]
    plans = {
        "prefill": StepPlan(0, (), tuple(prefills), ()),
        "mixed": StepPlan(1, tuple(decodes[:2]), tuple(prefills[2:]), ()),
        "decode": StepPlan(2, tuple(decodes), (), ()),
    }
    with torch.inference_mode():
        for plan in (*plans.values(), *plans.values()):
            runner.run(plan)  # compiles, and the second time records
        for kind, plan in plans.items():
            torch.cuda.set_sync_debug_mode("error")
            try:
                with torch.profiler.profile() as profile:
                    launched = [runner.launch(plan) for _ in range(3)]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            names = [event.key for event in profile.key_averages()]
            assert "aten::_local_scalar_dense" not in names, kind
            assert len(names) > 1, kind
            assert len({tuple(step.collect().token_ids) for step in launched}) == 1, kind


def test_steps_that_no_graph_covers_come_between_replays(make_engine: MakeEngine) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    unlike = SamplingParams(
        temperature=0.0, max_tokens=6, ignore_eos=True, repetition_penalty=1.3, logprobs=2
    )
    results = []
    for cuda_graphs in (True, False):
        engine = make_engine(device="cuda", cuda_graphs=cuda_graphs)
        handles = [engine.submit(prompt, plain) for prompt in PROMPTS[:3]]
        handles += [engine.submit(PROMPTS[3], unlike)]
        results.append([handle.result(300).token_ids for handle in handles])
    assert results[0] == results[1]


def test_a_mixture_of_experts_runs_without_graphs(make_engine: MakeEngine, tmp_path: Path) -> None:
    write_random_model(tmp_path, CASES["qwen3-moe"])
    write_tokenizer(tmp_path)
    engine = make_engine(model=tmp_path, device="cuda")
    assert engine._model.runner._graphs is None
    assert len(engine.submit([40] * 9, GREEDY).result(300).token_ids) == GREEDY.max_tokens


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
class TestTwoGpus:
    """A divided model; `test_divided_engine.py` and `test_ranks.py` have what needs no GPU."""

    @pytest.mark.parametrize("cuda_graphs", [True, False])
    @pytest.mark.parametrize(
        "options",
        [{}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 20, "block_size": 8}, {"kv_dtype": "int8"}],
        ids=["plain", "chunked", "preempted", "int8"],
    )
    def test_tokens_equal_one_card_s(
        self, make_engine: MakeEngine, options: dict[str, Any], cuda_graphs: bool
    ) -> None:
        one = make_engine(device="cuda", cuda_graphs=cuda_graphs, **options)
        two = make_engine(device="cuda", cuda_graphs=cuda_graphs, tensor_parallel_size=2, **options)
        assert (two._model.runner._graphs is not None) == cuda_graphs
        for _ in range(2):
            assert answers(two) == answers(one)
        for count in (1, 4, 9):
            assert mixed_answers(two, count) == mixed_answers(one, count)

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
    def test_a_rank_that_is_gone_ends_every_request(
        self, make_engine: MakeEngine, how: signal.Signals
    ) -> None:
        engine = make_engine(device="cuda", tensor_parallel_size=2)
        endless = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)
        handles = [engine.submit(prompt, endless) for prompt in PROMPTS[:3]]
        next(iter(handles[0]))
        os.kill(engine._model.ranks._processes[0]._popen.pid, how)  # type: ignore[union-attr]
        outputs = [handle.result(10) for handle in handles]
        assert all("Process 2 of the 2" in str(output.error) for output in outputs)
        started_s = time.monotonic()
        engine.close()
        assert time.monotonic() - started_s < 10
