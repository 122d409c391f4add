"""What can be shown of recorded steps without a GPU: their shapes, which plans fit, and the step they hold."""

from __future__ import annotations

import random
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from nanochat.engine import loading, step_graphs
from nanochat.engine.config import EngineConfig, SamplingParams
from nanochat.engine.memory import allocate_caches
from nanochat.engine.request import Request
from nanochat.engine.runner import Runner
from nanochat.engine.seats import Seats
from nanochat.engine.step_graphs import Shapes, StepGraphs, decode_sizes, row_sizes, token_sizes
from nanochat.engine.step_inputs import StepInputs, StepShape, pack_step
from nanochat.engine.step_plan import ScheduledChunk, StepPlan
from nanochat.engine.watchdog import LIMIT_S
from tests.engine.conftest import MakeEngine, wait_until
from tests.engine.test_pipeline import KINDS, answers

BLOCK_SIZE = 4
MAX_MODEL_LEN = 100
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40),
    SamplingParams(temperature=1.5, min_p=0.05),
]


class PlayedGraphs(StepGraphs):
    """Computes each step where the real ones replay it: all of a recorded step but the recording."""

    shapes_run: set[StepShape]

    def choose(self, plan: StepPlan) -> StepShape | None:
        return self.shapes.fit(plan)

    def run(self, shape: StepShape, host: torch.Tensor) -> torch.Tensor:
        self.shapes_run = {*getattr(self, "shapes_run", ()), shape}
        inputs = self.inputs(shape)
        inputs.send(host)
        return self.step(inputs)


class TestSizes:
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
    def test_of_decodes_end_with_the_largest_step(self, max_num_seqs: int, sizes: list[int]) -> None:
        assert decode_sizes(max_num_seqs) == sizes

    @pytest.mark.parametrize("max_num_seqs", [100, 256, 1000, 65536])
    def test_of_decodes_pad_by_at_most_an_eighth_and_are_few(self, max_num_seqs: int) -> None:
        sizes = decode_sizes(max_num_seqs)
        assert len(sizes) < 100
        assert sizes[-1] == max_num_seqs
        for smaller, larger in pairwise(sizes):
            assert smaller < larger <= max(smaller * 9 / 8, smaller + 8)

    @pytest.mark.parametrize("most", [1, 7, 32, 33, 500, 512, 2048, 4096])
    def test_of_prefills_end_with_the_largest_step(self, most: int) -> None:
        for sizes in (row_sizes(most), token_sizes(most)):
            assert sizes[-1] == most
            assert sizes == sorted(set(sizes))
        assert all(b <= 2 * a for a, b in pairwise(token_sizes(most)))


def chunk(length: int, start: int = 0, *, samples: bool = True, **params: Any) -> ScheduledChunk:
    request = Request(0, [5] * (start + length), SamplingParams(**params))
    return ScheduledChunk(request, start, length, samples)


class TestShapes:
    shapes = Shapes(max_num_seqs=40, max_num_tokens=2048, max_model_len=20_000, converted_tokens=50_000)

    def fit(self, decodes: list[ScheduledChunk], prefills: list[ScheduledChunk]) -> StepShape | None:
        return self.shapes.fit(StepPlan(1, tuple(decodes), tuple(prefills), ()))

    def test_are_the_smallest_that_fit(self) -> None:
        decode = chunk(1, 9)
        assert self.fit([decode] * 3, []) == (4, 0, 0, 20_000, 0)
        assert self.fit([], [chunk(33)]) == (0, 8, 64, 4096, 8 * 4096)
        assert self.fit([decode], [chunk(300), chunk(101)]) == (8, 8, 512, 4096, 8 * 4096)
        assert self.fit([], [chunk(700)]) == (0, 8, 768, 4096, 8 * 4096)
        assert self.fit([], [chunk(1025)]) == (0, 8, 1280, 4096, 8 * 4096)
        assert self.fit([decode] * 9, [chunk(9)] * 33) == (32, 40, 384, 4096, 50_000)
        assert self.fit([], [chunk(2048, 3000)]) == (0, 8, 2048, 20_000, 50_000)
        assert self.fit([], [chunk(2049)]) is None

    def test_have_room_for_a_copy_of_all_contexts_while_that_is_small(self) -> None:
        assert self.fit([], [chunk(9, 9_991)] * 5) == (0, 8, 64, 20_000, 50_000)
        assert self.fit([], [chunk(10, 9_991)] * 5) == (0, 8, 64, 20_000, 8 * 20_000)
        without = Shapes(max_num_seqs=40, max_num_tokens=2048, max_model_len=20_000, converted_tokens=0)
        assert without.fit(StepPlan(1, (), (chunk(33),), ())) == (0, 8, 64, 4096, 8 * 4096)

    def test_none_fits_logprobs(self) -> None:
        assert self.fit([chunk(1, 9), chunk(1, 9, logprobs=0)], []) is None
        assert self.fit([], [chunk(9, logprobs=0)]) is None
        assert self.fit([], [chunk(9, samples=False, logprobs=0)]) is not None

    def test_a_penalty_changes_no_shape(self) -> None:
        assert self.fit([chunk(1, 9, repetition_penalty=1.1)], []) == self.fit([chunk(1, 9)], [])

    def test_common_ones_are_few_and_among_those_that_fit(self) -> None:
        common = self.shapes.common()
        assert self.fit([chunk(1, 9)], []) in common
        assert self.fit([], [chunk(100)]) in common
        assert self.fit([], [chunk(500, 5000)]) in common
        assert Shapes(8, 2048, 4096, 0).common()[-1].max_context_len == 4096
        assert len(common) < 30


def random_plans(seed: int) -> list[StepPlan]:
    """Prefills in chunks, then steps that mix decodes and chunks, of requests of mixed kinds."""
    rng = random.Random(seed)
    requests = []
    for index in range(9):
        tokens = [rng.randrange(3, 259) for _ in range(rng.randint(2, 60))]
        width = -(-len(tokens) // BLOCK_SIZE)
        table = [16 * index + block for block in range(width)]
        params = PARAMS[index % len(PARAMS)]
        requests.append(Request(index, tokens, params, sampling_seed=-7 * index, block_table=table))
    done = dict.fromkeys(requests, 0)
    plans = []
    while any(done[request] < request.num_tokens for request in requests):
        decodes, prefills = [], []
        for request in rng.sample(requests, rng.randint(1, 9)):
            start, left = done[request], request.num_tokens - done[request]
            if not left:
                continue
            length = rng.randint(1, min(left, 20))
            done[request] += length
            piece = ScheduledChunk(request, start, length, samples=rng.random() < 0.7 or length == 1)
            (decodes if length == 1 else prefills).append(piece)
        if decodes or prefills:
            plans.append(StepPlan(len(plans), tuple(decodes), tuple(prefills), ()))
    return plans


def test_a_shape_that_prefills_is_recorded_when_it_comes_again(tiny_llama: Path) -> None:
    """Or before, while there is nothing else to do; the first of its steps is launched kernel by kernel."""
    config = EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", num_kv_blocks=8)
    runner = loading.load_model(config, lambda progress: None).runner
    graphs = StepGraphs(
        runner.decoder, runner._caches, max_num_seqs=8, max_num_tokens=64, max_model_len=MAX_MODEL_LEN
    )
    decodes = StepPlan(0, (chunk(1, 9),), (), ())
    one, other = (StepPlan(0, (), (chunk(length),), ()) for length in (9, 40))
    assert graphs.choose(decodes) == graphs.shapes.fit(decodes)
    assert graphs.choose(one) is None
    assert graphs.choose(other) is None
    assert graphs.choose(one) == graphs.shapes.fit(one)
    assert graphs.next_unrecorded() == graphs.shapes.fit(other)
    assert graphs.next_unrecorded() is None


def test_a_step_that_is_not_recorded_costs_no_recording(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", num_kv_blocks=8)
    runner = loading.load_model(config, lambda progress: None).runner
    graphs = StepGraphs(
        runner.decoder, runner._caches, max_num_seqs=8, max_num_tokens=64, max_model_len=MAX_MODEL_LEN
    )
    monkeypatch.setattr(step_graphs, "MAX_RECORDINGS", 1)
    kept, left_out = graphs.shapes.common()[:2]
    graphs._recordings = recordings = {kept: object()}  # type: ignore[dict-item]
    graphs.leave_out(left_out)
    with torch.inference_mode():
        graphs.run(left_out, graphs.pack(StepPlan(0, (), (), ()), left_out)[0])
    assert set(recordings) == {kept}


def test_a_recording_that_fails_in_a_pause_ends_nothing(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: StepGraphs, inputs: StepInputs) -> NoReturn:
        raise RuntimeError("a kernel could not be compiled")

    monkeypatch.setattr(loading, "_has_graphs", lambda *_: True)
    monkeypatch.setattr(StepGraphs, "record_common", lambda *_: None)
    engine = make_engine(max_steps_ahead=1)
    monkeypatch.setattr(StepGraphs, "_capture", fail)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for _ in range(3):
        output = engine.submit([40] * 9, params).result(60)
        assert output.finish_reason == "length"
    graphs = engine._model.runner._graphs
    assert graphs is not None
    engine.close()
    assert len(graphs._unrecordable) == 1
    assert "can't be recorded" in caplog.text


def test_a_recording_that_hangs_in_a_pause_is_told_of(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, is_recording, go_on = make_engine(), threading.Event(), threading.Event()

    def hang(runner: Runner) -> bool:
        is_recording.set()
        go_on.wait(60)
        return False

    monkeypatch.setattr(Runner, "record_ahead", hang)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.submit([40] * 9, params).result(60)
    assert is_recording.wait(60)
    assert engine.stats().slow_step is None
    engine._watchdog._clock = lambda: time.monotonic() + 2 * LIMIT_S
    slow = engine.stats().slow_step
    go_on.set()
    assert slow is not None
    assert "recording" in slow.what
    wait_until(lambda: engine.stats().slow_step is None)


def test_blocks_past_a_steps_context_are_sent_by_a_later_step() -> None:
    """The state on the device keeps no more of a block table than the step's context fills."""
    seats, request = Seats(2), Request(0, [5] * 9, PARAMS[0], block_table=[7, 8, 9])
    sent = []
    for start, length in ((0, 4), (4, 1), (5, 4)):
        plan = StepPlan(0, (), (ScheduledChunk(request, start, length, samples=True),), ())
        shape = StepShape(0, 1, length, MAX_MODEL_LEN, MAX_MODEL_LEN)
        host, _ = pack_step(plan, shape, seats, BLOCK_SIZE, torch.device("cpu"))
        inputs = StepInputs(shape, host.clone())
        sent.append(inputs.rows.new_blocks.tolist())
        assert inputs.rows.first_new.tolist() == [len(sent) - 1]
    assert sent == [[7], [8], [9]]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_padding_changes_no_token_and_no_cache(tiny_llama: Path, kv_dtype: torch.dtype) -> None:
    config = EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", num_kv_blocks=1)
    model = loading.load_model(config, lambda progress: None)
    decoder, device = model.runner.decoder, torch.device("cpu")
    with torch.inference_mode():
        for seed in range(3):
            caches = [allocate_caches(model.config, 160, BLOCK_SIZE, kv_dtype, device) for _ in range(2)]
            for cache in (*caches[0], *caches[1]):
                for part in (cache.k, cache.v, cache.k_scale, cache.v_scale):
                    if (
                        part is not None
                    ):  # whoever reads what hasn't been written, or writes elsewhere, shall notice
                        part.fill_(float("nan") if part.is_floating_point() else 77)
            graphs = PlayedGraphs(
                decoder, caches[1], max_num_seqs=40, max_num_tokens=200, max_model_len=MAX_MODEL_LEN
            )
            eager, played = Runner(decoder, caches[0]), Runner(decoder, caches[1], graphs)
            for plan in random_plans(seed):
                assert played.run(plan).token_ids == eager.run(plan).token_ids
                for one, other in zip(*caches, strict=True):
                    # Products of another shape, so nearly the same.
                    tolerance = 1 if kv_dtype == torch.int8 else 1e-5
                    for ours, theirs in ((one.k, other.k), (one.v, other.v)):
                        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0, equal_nan=True)
            assert len(graphs.shapes_run) > 3


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 12, "max_num_seqs": 4}, {"block_size": 3}],
    ids=["plain", "chunked", "preempted", "odd blocks"],
)
def test_an_engine_gives_the_same_tokens(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, depth: int, options: dict[str, Any]
) -> None:
    """Seats, block tables sent by difference and ids that stay on the device, through a whole engine."""
    plain = [kind for kind in KINDS if "logprobs" not in kind] + [{"repetition_penalty": 1.3}]
    mixed = [*KINDS, {"repetition_penalty": 1.3}]
    eager = make_engine(max_steps_ahead=0, **options)
    expected = [answers(eager, kinds) for kinds in (plain, mixed, plain)]
    monkeypatch.setattr(loading, "_has_graphs", lambda *_: True)
    monkeypatch.setattr(loading, "StepGraphs", PlayedGraphs)
    monkeypatch.setattr(PlayedGraphs, "record_common", lambda *_: None)
    engine = make_engine(max_steps_ahead=depth, **options)
    assert [answers(engine, kinds) for kinds in (plain, mixed, plain)] == expected
    graphs = engine._model.runner._graphs
    assert isinstance(graphs, PlayedGraphs)
    assert len(graphs.shapes_run) > 2


class FullCard(StepGraphs):
    """Has memory for steps, but not for keeping what they compute in."""

    captures = 0

    def _capture(self, inputs: StepInputs) -> NoReturn:
        self.captures += 1
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_step_that_cannot_be_recorded_counts_all_the_same(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [kind for kind in KINDS if "logprobs" not in kind]
    expected = answers(make_engine(max_steps_ahead=0), plain)
    monkeypatch.setattr(loading, "_has_graphs", lambda *_: True)
    monkeypatch.setattr(loading, "StepGraphs", FullCard)
    engine = make_engine(max_steps_ahead=1)
    assert [answers(engine, plain) for _ in range(2)] == [expected] * 2
    graphs = engine._model.runner._graphs
    assert isinstance(graphs, FullCard)
    assert graphs.captures == len(graphs._unrecordable) > 2  # each shape is tried once


def test_the_option_has_no_effect_on_a_cpu(make_engine: MakeEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    engines = [make_engine(cuda_graphs=cuda_graphs) for cuda_graphs in (True, False)]
    first, second = (engine.submit([40] * 9, params).result(60).token_ids for engine in engines)
    assert first == second
