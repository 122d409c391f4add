"""Any interleaving of submit, fork, plan, commit, fail, cancel and finish leaves every invariant and text whole.

Each request must end with exactly the tokens of a naive one-at-a-time reference (or a prefix of them, if it
was ended early), on a fake device that notices any KV slot that is wrong, stale or not yet written.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanochat.engine import block_pool
from nanochat.engine.block_pool import BlockPool
from nanochat.engine.config import SamplingParams
from nanochat.engine.request import Request, RequestStatus
from nanochat.engine.scheduler import Scheduler
from tests.engine.fake_device import FakeDevice, Launch, reference_tokens

MAX_REQUESTS = 12
LONGEST = 90
"""Tokens of the longest request: what the reference costs is quadratic in it."""
EOS = 5


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        """Steps that may be in flight while another is planned."""
        self.requests: list[Request] = []
        self.in_flight: deque[Launch] = deque()
        self.now = 0.0

    @initialize(
        num_blocks=st.integers(4, 12) | st.integers(1, 64),
        block_size=st.integers(2, 5) | st.integers(1, 32),
        max_num_seqs=st.integers(3, 10) | st.integers(1, 3),
        budget=st.sampled_from([1, 2, 3, 4, 6, 9, 16, 33, 64]),
        options=st.tuples(st.sampled_from([0.25, 0.5, 1.0]), st.sampled_from([0.0, 0.1]), st.integers(0, 5)),
        prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        options: tuple[float, float, int],
        prefix_caching: bool,
    ) -> None:
        share, watermark, patience = options
        self.pool = BlockPool(num_blocks, block_size, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max(2, min(LONGEST, num_blocks * block_size + 1)),
            long_prefill_share=share,
            watermark=watermark,
            patience=patience,
        )
        self.device = FakeDevice(num_blocks, block_size)

    def _submit(self, prompt: list[int], max_tokens: int, with_eos: bool) -> None:
        request = Request(
            request_id=len(self.requests),
            token_ids=prompt[: self.scheduler.max_model_len - 1],
            params=SamplingParams(max_tokens=max_tokens),
            eos_token_ids=frozenset([EOS]) if with_eos else frozenset(),
        )
        self.scheduler.add(request)
        self.requests.append(request)

    def _pick(self, index: int) -> Request:
        return self.requests[index % len(self.requests)]

    @precondition(lambda self: len(self.requests) < MAX_REQUESTS)
    @rule(
        length=st.integers(1, 8) | st.integers(1, LONGEST),
        first=st.integers(0, 3),
        max_tokens=st.integers(1, 40),
        eos=st.booleans(),
    )
    def submit(self, length: int, first: int, max_tokens: int, eos: bool) -> None:
        """Prompts come from four sequences, so many share a prefix."""
        self._submit([(first + position * position) % 5 for position in range(length)], max_tokens, eos)

    @precondition(lambda self: 0 < len(self.requests) < MAX_REQUESTS)
    @rule(index=st.integers(0, 11), keep=st.integers(1, LONGEST), more=st.integers(0, 6), eos=st.booleans())
    def fork(self, index: int, keep: int, more: int, eos: bool) -> None:
        """Go on from some of another request's tokens: a branch, a repetition or a next turn."""
        self._submit(self._pick(index).token_ids[:keep] + [4] * more, 12, eos)

    @precondition(lambda self: len(self.in_flight) <= self.depth)
    @rule(times=st.integers(1, 6))
    def plan(self, times: int) -> None:
        for _ in range(times):
            if len(self.in_flight) > self.depth:
                self._commit()
            self._plan()

    def _plan(self) -> None:
        self.now += 1
        waiting = set(self.scheduler.waiting)
        plan = self.scheduler.plan(self.now)
        members = {chunk.request for chunk in plan.chunks}
        assert not members.intersection(plan.preempted)
        assert not (plan.preempted and members & waiting), "a step either starts requests or preempts some"
        if not plan.is_empty:
            self.in_flight.append(self.device.launch(plan))
        elif not self.in_flight:
            assert not self.scheduler.num_running + self.scheduler.num_waiting, (
                "nothing is in flight, yet nobody can run"
            )

    @precondition(lambda self: self.in_flight)
    @rule()
    def commit(self) -> None:
        self._commit()

    def _commit(self) -> None:
        launch = self.in_flight.popleft()
        self.now += 1
        ended = {r for r in self.requests if r.status is RequestStatus.FINISHED}
        accepted = self.scheduler.commit(launch.plan, launch.token_ids, self.now)
        expected = zip((chunk.request for chunk in launch.plan.sampling), launch.token_ids, strict=True)
        assert accepted == [(request, token) for request, token in expected if request not in ended]

    @precondition(lambda self: self.in_flight)
    @rule()
    def fail(self) -> None:
        launch = self.in_flight.popleft()
        members = {chunk.request for chunk in launch.plan.chunks}
        alive = {request for request in members if request.status is not RequestStatus.FINISHED}
        assert set(self.scheduler.fail(launch.plan, self.now)) == alive
        assert all(request.finish_reason == "error" for request in alive)

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 11), reason=st.sampled_from(["cancelled", "stop"]))
    def end_early(self, index: int, reason: str) -> None:
        request = self._pick(index)
        if reason == "cancelled":
            self.scheduler.finish(request, "cancelled", self.now)
        else:
            self.scheduler.finish(request, "stop", self.now)
        assert request.status is RequestStatus.FINISHED

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_invariants()
        for launch in self.in_flight:
            assert all(self.pool.ref_count(block) for block in launch.blocks), "freed while in flight"

    def teardown(self) -> None:
        """Let everything run to its end, and compare with the reference."""
        if not hasattr(self, "scheduler"):
            return
        while self.scheduler.has_work:
            before = len(self.in_flight)
            if before <= self.depth:
                self._plan()
            if self.in_flight and (len(self.in_flight) > self.depth or len(self.in_flight) == before):
                self._commit()
        self.everything_adds_up()
        assert self.pool.num_used == 0
        for request in self.requests:
            self._check_outcome(request)

    def _check_outcome(self, request: Request) -> None:
        expected = reference_tokens(request)
        if len(request.token_ids) < len(expected):
            assert request.finish_reason in ("cancelled", "stop", "error")
            assert request.token_ids == expected[: len(request.token_ids)]
        else:
            assert request.token_ids == expected
        if request.finish_reason == "length":
            assert len(request.token_ids) == request.max_total_tokens
        assert request.num_pending_tokens == request.num_steps_in_flight == 0


def run_machine(depth: int, examples: int) -> None:
    run_state_machine_as_test(
        partial(SchedulerMachine, depth),
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_few_interleavings(depth: int) -> None:
    run_machine(depth, 25)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_many_interleavings(depth: int) -> None:
    run_machine(depth, 300)


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_very_many_interleavings(depth: int) -> None:
    run_machine(depth, 2000)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 2])
def test_interleavings_with_colliding_hashes(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hash values for all contents: the prefix index must never serve another prompt's K/V."""
    monkeypatch.setattr(block_pool, "xxh64_intdigest", lambda tokens, seed: (sum(tokens) + seed) % 3)
    run_machine(depth, 100)
