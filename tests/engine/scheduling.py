"""A scheduler with a fake device behind it, for tests that step it by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from nanochat.engine.block_pool import BlockPool
from nanochat.engine.config import SamplingParams
from nanochat.engine.request import Request, RequestStatus
from nanochat.engine.scheduler import Scheduler, StepPlan
from tests.engine.fake_device import FakeDevice, Launch, reference_tokens


class Rig:
    """Time is the number of calls that take it. Every move is followed by a check of all invariants."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        max_num_seqs: int = 16,
        budget: int = 64,
        max_model_len: int | None = None,
        prefix_caching: bool = True,
        **options: float,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=num_blocks * block_size + 1 if max_model_len is None else max_model_len,
            **options,  # type: ignore[arg-type]
        )
        self.device = FakeDevice(num_blocks, block_size)
        self.in_flight: deque[Launch] = deque()
        self.requests: list[Request] = []
        self.now = 0.0

    def submit(self, prompt: Iterable[int], max_tokens: int = 4, eos: Iterable[int] = ()) -> Request:
        request = Request(
            request_id=len(self.requests) + 1,
            token_ids=list(prompt),
            params=SamplingParams(max_tokens=max_tokens),
            eos_token_ids=frozenset(eos),
        )
        self.scheduler.add(request)
        self.requests.append(request)
        self.check()
        return request

    def plan(self) -> StepPlan:
        """Plan a step and, if there is anything in it, launch it."""
        self.now += 1
        plan = self.scheduler.plan(self.now)
        if not plan.is_empty:
            self.in_flight.append(self.device.launch(plan))
        self.check()
        return plan

    def commit(self) -> list[tuple[Request, int]]:
        """Collect the oldest step in flight."""
        self.now += 1
        launch = self.in_flight.popleft()
        accepted = self.scheduler.commit(launch.plan, launch.token_ids, self.now)
        self.check()
        return accepted

    def step(self) -> StepPlan:
        plan = self.plan()
        if not plan.is_empty:
            self.commit()
        return plan

    def run(self, depth: int = 0, max_steps: int = 10_000) -> list[StepPlan]:
        """Run until all requests have ended, with ``depth`` steps in flight while another is planned."""
        plans = []
        while self.scheduler.has_work:
            plan = self.plan()
            if not plan.is_empty:
                plans.append(plan)
            if plan.is_empty or len(self.in_flight) > depth:
                self.commit()
            assert len(plans) < max_steps, "it does not come to an end"
        return plans

    def check(self) -> None:
        self.scheduler.check_invariants()
        for launch in self.in_flight:
            assert all(self.pool.ref_count(block) for block in launch.blocks)

    def assert_finished_as_if_alone(self) -> None:
        """Every request has ended with the tokens of the one-at-a-time reference, and no block leaked."""
        for request in self.requests:
            assert request.status is RequestStatus.FINISHED
            assert request.token_ids == reference_tokens(request)
        assert self.pool.num_used == 0


def tokens(count: int, salt: int = 0) -> list[int]:
    """A prompt that shares no first token with one of another salt below 1,000."""
    return [salt * 1_000 + position % 997 for position in range(count)]


def scheduled(plan: StepPlan) -> dict[int, int]:
    """Tokens in this step by request id."""
    return {chunk.request.request_id: chunk.length for chunk in plan.chunks}
