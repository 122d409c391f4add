"""Steps in flight: whatever happens between launch and collection, no token is lost, repeated or leaked."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from nanochat.engine.block_pool import BlockPool
from nanochat.engine.config import SamplingParams
from nanochat.engine.engine import Engine
from nanochat.engine.pipeline import SMALLEST_RETRY, Outcome, Pipeline
from nanochat.engine.request import Request, RequestStatus
from nanochat.engine.runner import StepResult
from nanochat.engine.scheduler import RECOVERY_STEPS, Scheduler, StepPlan
from tests.engine.conftest import MakeEngine
from tests.engine.fake_device import FakeDevice, reference_tokens

DEPTHS = [0, 1, 4]
EOS = 5


class FakeStep:
    def __init__(self, token_ids: list[int], ready: bool) -> None:
        self.token_ids = token_ids
        self.is_ready = ready

    def collect(self) -> StepResult:
        return StepResult(self.token_ids, [None] * len(self.token_ids))


class FakeRunner:
    """Launches on a `FakeDevice`; at random, steps over ``max_tokens`` run out of memory."""

    def __init__(self, device: FakeDevice, rng: random.Random) -> None:
        self.device = device
        self.rng = rng
        self.max_tokens = 1 << 30
        self.num_failed = 0

    def launch(self, plan: StepPlan) -> FakeStep:
        if plan.num_tokens > self.max_tokens:
            self.num_failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return FakeStep(self.device.launch(plan).token_ids, self.rng.random() < 0.5)


class House:
    """A scheduler, its pipeline and what came out of them, with every invariant checked after each move."""

    def __init__(self, depth: int, seed: int, num_blocks: int = 40, budget: int = 24) -> None:
        self.rng = random.Random(seed)
        self.pool = BlockPool(num_blocks, 4)
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=6, max_num_batched_tokens=budget, max_model_len=100
        )
        self.runner = FakeRunner(FakeDevice(num_blocks, 4), self.rng)
        self.pipeline = Pipeline(self.scheduler, self.runner, threading.Lock(), depth)  # type: ignore[arg-type]
        self.requests: list[Request] = []
        self.answers: dict[Request, list[int]] = {}
        self.deepest = 0

    def submit(self, prompt_len: int | None = None, **params: Any) -> Request:
        length = prompt_len or self.rng.choice([1, 3, 4, 5, 17, 40])
        prompt = [(position * position + self.rng.randrange(2)) % 5 for position in range(length)]
        defaults = {"max_tokens": self.rng.randint(1, 30)}
        request = Request(
            len(self.requests), prompt, SamplingParams(**{**defaults, **params}), frozenset([EOS])
        )
        self.scheduler.add(request)
        self.requests.append(request)
        self.answers[request] = []
        return request

    def step(self) -> Outcome | None:
        launched = self.pipeline.launch()
        self.deepest = max(self.deepest, len(self.pipeline._in_flight))
        self.scheduler.check_invariants()
        outcome = self.pipeline.collect(wait=not launched)
        for request, token in outcome.accepted if outcome else ():
            self.answers[request].append(token)
        self.scheduler.check_invariants()
        return outcome

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def check(self) -> None:
        """Everyone has exactly the tokens that a machine serving one request at a time would give."""
        assert self.pool.num_used == 0
        for request in self.requests:
            answer = self.answers[request]
            expected = reference_tokens(request)[request.num_prompt_tokens :]
            assert request.status is RequestStatus.FINISHED
            assert answer == request.token_ids[request.num_prompt_tokens :]
            if request.finish_reason == "length" or answer[-1:] == [EOS]:
                assert answer == expected
            else:
                assert answer == expected[: len(answer)]


def random_events(house: House, count: int) -> None:
    rng = house.rng
    for _ in range(count):
        event = rng.random()
        living = [r for r in house.requests if r.status is not RequestStatus.FINISHED]
        if event < 0.15 and len(living) < 12:
            house.submit(repetition_penalty=1.2 if rng.random() < 0.1 else 1.0)
        elif event < 0.2 and living:
            house.scheduler.finish(rng.choice(living), "cancelled", 0.0)
        elif event < 0.23 and living:
            house.scheduler.finish(rng.choice(living), "stop", 0.0)  # a stop text was found
        elif event < 0.25:
            house.runner.max_tokens = rng.choice([1 << 30, 1 << 30, 20, 6])
        else:
            house.step()
    house.runner.max_tokens = 1 << 30
    house.run()
    house.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_thousand_events_lose_and_repeat_nothing(depth: int) -> None:
    house = House(depth, seed=depth)
    random_events(house, 1000)
    assert house.deepest == depth + 1
    assert house.runner.num_failed
    assert sum(map(len, house.answers.values())) > 300


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_blocks", [25, 30, 100])
def test_many_thousand_events(depth: int, num_blocks: int) -> None:
    for seed in range(10):
        random_events(House(depth, seed, num_blocks), 1000)


class TestDepth:
    def test_decodes_run_ahead_and_an_arrival_waits_for_no_more_than_those(self) -> None:
        house = House(4, seed=0)
        house.submit(prompt_len=4, max_tokens=60, ignore_eos=True)
        while house.deepest < 5:
            house.step()
        second = house.submit(prompt_len=4, max_tokens=5, ignore_eos=True)
        collected = 0
        while second.first_scheduled_s is None:
            collected += house.step() is not None
        assert collected <= 4
        assert len(house.pipeline._in_flight) <= 2
        house.run()
        house.check()

    def test_a_penalty_holds_nobody_back(self) -> None:
        house = House(4, seed=0)
        house.submit(prompt_len=4, max_tokens=20, repetition_penalty=1.3, ignore_eos=True)
        house.run()
        assert house.deepest == 5

    def test_a_finished_request_keeps_its_blocks_until_its_last_step_is_in(self) -> None:
        house = House(4, seed=0)
        request = house.submit(prompt_len=4, max_tokens=60, ignore_eos=True)
        while house.deepest < 5:
            house.step()
        house.scheduler.finish(request, "cancelled", 0.0)
        assert house.pool.num_used
        house.run()
        house.check()


class TestOutOfMemory:
    @pytest.mark.parametrize("depth", DEPTHS)
    def test_a_smaller_step_is_tried_first(self, depth: int) -> None:
        house = House(depth, seed=0, num_blocks=100, budget=64)
        requests = [house.submit(prompt_len=40, max_tokens=8, ignore_eos=True) for _ in range(3)]
        house.runner.max_tokens = 30
        house.run()
        house.check()
        assert [request.finish_reason for request in requests] == ["length"] * 3
        assert house.runner.num_failed
        assert house.scheduler.step_budget == 64  # as before, once no work is left

    @pytest.mark.parametrize("depth", DEPTHS)
    def test_steps_grow_again_while_chats_go_on(self, depth: int) -> None:
        """Another program took the memory for a moment: prompts don't crawl until the longest answer has ended."""
        house = House(depth, seed=0, num_blocks=100, budget=64)
        house.submit(prompt_len=5, max_tokens=90, ignore_eos=True)
        house.submit(prompt_len=60, max_tokens=20, ignore_eos=True)
        house.runner.max_tokens = 20
        for _ in range(10):
            house.step()
        house.runner.max_tokens = 1 << 30
        smallest = house.scheduler.step_budget
        assert smallest <= 16
        for _ in range(3 * RECOVERY_STEPS):
            house.step()
            assert house.scheduler.num_running + house.scheduler.num_waiting
            if house.scheduler.num_running + house.scheduler.num_waiting < 3:
                house.submit(prompt_len=5, max_tokens=5, ignore_eos=True)
        assert house.scheduler.step_budget >= 4 * smallest
        house.run()
        house.check()

    @pytest.mark.parametrize("depth", DEPTHS)
    def test_only_the_largest_ends_where_no_smaller_step_will_do(self, depth: int) -> None:
        house = House(depth, seed=0, num_blocks=100, budget=64)
        large = house.submit(prompt_len=80, max_tokens=8, ignore_eos=True)
        small = [house.submit(prompt_len=3 + n, max_tokens=8, ignore_eos=True) for n in range(2)]
        launch = house.runner.launch

        def fail_for_the_large_one(plan: StepPlan) -> FakeStep:
            if large in [chunk.request for chunk in plan.chunks]:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return launch(plan)

        house.runner.launch = fail_for_the_large_one  # type: ignore[method-assign]
        outcomes = []
        while house.scheduler.has_work:
            outcomes.append(house.step())
        house.check()
        failed = [outcome for outcome in outcomes if outcome and outcome.failed]
        assert [outcome.failed for outcome in failed] == [[large]]
        assert f"step of {failed[0].plan.num_tokens} tokens" in failed[0].why_failed
        assert failed[0].plan.num_tokens <= SMALLEST_RETRY
        assert [request.finish_reason for request in small] == ["length"] * 2


def answers(engine: Engine, kinds: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    rng = random.Random(0)
    handles = []
    for index, kind in enumerate(kinds * 2):
        prompt = [rng.randrange(3, 259) for _ in range(3 + 7 * index)]
        params = {"temperature": 0.8, "seed": index, "max_tokens": 20 + index, **kind}
        handles.append(engine.submit(prompt, SamplingParams(**params)))
    outputs = [handle.result(120) for handle in handles]
    for handle, output in zip(handles, outputs, strict=True):
        events = handle.poll()
        assert "".join(event.text for event in events) == output.text
        assert [token for event in events for token in event.token_ids] == output.token_ids
    return [(o.token_ids, o.text, o.finish_reason, o.error, _ids(o.logprobs)) for o in outputs]


def _ids(logprobs: Any) -> Any:
    return logprobs and [(entry.token_id, [token for token, _ in entry.top]) for entry in logprobs]


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_p": 0.9, "top_k": 40},
    {"ignore_eos": True},
    {"logprobs": 2},
    {"stop": ("e", "th"), "ignore_eos": True},
]


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 12, "max_num_seqs": 4}, {"kv_dtype": "int8"}],
    ids=["plain", "chunked", "preempted", "int8"],
)
@pytest.mark.parametrize("with_penalty", [False, True])
def test_the_depth_changes_no_token(
    make_engine: MakeEngine, depth: int, options: dict[str, Any], with_penalty: bool
) -> None:
    kinds = [*KINDS, {"repetition_penalty": 1.3}] if with_penalty else KINDS
    expected = answers(make_engine(max_steps_ahead=0, **options), kinds)
    assert answers(make_engine(max_steps_ahead=depth, **options), kinds) == expected


@pytest.mark.parametrize("depth", DEPTHS)
def test_cancels_lose_no_token_that_was_shown(make_engine: MakeEngine, depth: int) -> None:
    engine = make_engine(max_steps_ahead=depth, num_kv_blocks=200)
    params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    handles = [engine.submit([40 + index] * 5, params) for index in range(4)]
    for count, handle in enumerate(handles):
        events = [next(iter(handle)) for _ in range(3 + count)]
        handle.cancel()
        output = handle.result(60)
        events += handle.poll()
        assert output.finish_reason == "cancelled"
        assert [token for event in events for token in event.token_ids] == output.token_ids
        assert "".join(event.text for event in events) == output.text
