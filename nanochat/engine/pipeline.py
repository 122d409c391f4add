"""Steps in flight: plans and launches them ahead of the device, collects and commits them in order.

While a step runs the next one is planned and launched, so that the device never waits for Python; the ids
that a step samples reach the next one on the device. While nobody waits and all steps only decode, several
are queued. Whatever happens meanwhile (a stop, a cancel, an arrival) takes effect after at most those.
Knows nothing of text, handles or who asks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import torch

from nanochat.engine.device import check_device, is_out_of_memory
from nanochat.engine.outputs import TokenLogprobs
from nanochat.engine.request import Request, RequestStatus
from nanochat.engine.runner import LaunchedStep, Runner
from nanochat.engine.scheduler import Scheduler, StepPlan
from nanochat.errors import RankLost, reason_of

logger = logging.getLogger(__name__)

GPU_STEPS_AHEAD = 4
"""Decode steps queued behind the one that runs: some milliseconds in which the user's terminal may be drawn."""
SMALLEST_RETRY = 16
"""Tokens of a step that is not made smaller when it runs out of memory: then its largest request ends."""


@dataclass(slots=True)
class Outcome:
    """A step that is over."""

    plan: StepPlan
    started_s: float
    """When the device began it, as far as the host knows."""
    ended_s: float
    accepted: list[tuple[Request, int]] = field(default_factory=list)
    """The tokens that count, with their requests."""
    logprobs: dict[Request, TokenLogprobs | None] = field(default_factory=dict)
    failed: list[Request] = field(default_factory=list)
    """Requests that ended with the step."""
    why_failed: str = ""


@dataclass(slots=True)
class _InFlight:
    plan: StepPlan
    launched_s: float
    step: LaunchedStep | None
    error: Exception | None = None
    """Why it could not be launched."""


class Pipeline:
    """The steps of one scheduler on one runner. Used on one thread, under ``torch.inference_mode()``."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, lock: threading.Lock, max_steps_ahead: int
    ) -> None:
        """``lock`` is held while the scheduler is used, never while computing or waiting.

        ``max_steps_ahead``: most steps in flight while another is planned; 0 runs them one by one.
        """
        self.max_steps_ahead = max_steps_ahead
        self._scheduler = scheduler
        self._runner = runner
        self._lock = lock
        self._in_flight: deque[_InFlight] = deque()
        self._last_end_s = 0.0

    def launch(self) -> bool:
        """Plan a step and launch it, unless there is nothing to run or enough is in flight already."""
        if self._in_flight and len(self._in_flight) > self._steps_ahead():
            return False
        launched_s = time.monotonic()
        with self._lock:
            plan = self._scheduler.plan(launched_s)
        if plan.is_empty:
            return False
        in_flight = _InFlight(plan, launched_s, None)
        self._in_flight.append(in_flight)
        try:
            in_flight.step = self._runner.launch(plan)
        except Exception as error:
            in_flight.error = error
        return True

    def collect(self, *, wait: bool) -> Outcome | None:
        """Commit the oldest step, if there is one; without ``wait``, only if that takes no waiting.

        With more in flight than allowed, it is waited for all the same.
        """
        if not self._in_flight:
            return None
        oldest = self._in_flight[0]
        may_wait = wait or len(self._in_flight) > self._steps_ahead()
        if not may_wait and oldest.step is not None and not oldest.step.is_ready:
            return None
        try:
            if oldest.step is None:
                raise oldest.error or RuntimeError("a step was not launched")
            result = oldest.step.collect()
        except Exception as error:
            return self._fail(oldest, error)
        finally:
            self._in_flight.popleft()  # until now it is what describe() tells of
        outcome = self._outcome(oldest)
        with self._lock:
            outcome.accepted = self._scheduler.commit(oldest.plan, result.token_ids, outcome.ended_s)
            self._scheduler.pace.record(oldest.plan, outcome.ended_s - outcome.started_s)
        outcome.logprobs = {
            chunk.request: row
            for chunk, row in zip(oldest.plan.sampling, result.logprobs, strict=True)
            if row is not None
        }
        return outcome

    def describe(self) -> str:
        """What the oldest step in flight does. Called by whoever watches, on any thread."""
        try:
            plan = self._in_flight[0].plan
        except IndexError:
            return "planning, or handing out text"
        parts = [f"{len(plan.decodes)} answers"] if plan.decodes else []
        if plan.prefills:
            tokens = sum(chunk.length for chunk in plan.prefills)
            parts.append(f"{tokens:,} prompt tokens of {len(plan.prefills)}")
        return f"step {plan.step:,}, " + ", ".join(parts)

    def _steps_ahead(self) -> int:
        """Steps that may be in flight while another is planned. At least one is."""
        newest = self._in_flight[-1]
        if newest.error is not None:
            return 0
        if newest.plan.prefills or self._scheduler.num_waiting:
            return min(1, self.max_steps_ahead)
        return self.max_steps_ahead

    def _outcome(self, step: _InFlight) -> Outcome:
        now = time.monotonic()
        outcome = Outcome(step.plan, max(step.launched_s, self._last_end_s), now)
        self._last_end_s = now
        return outcome

    def _fail(self, step: _InFlight, error: Exception) -> Outcome:
        """Lack of memory ends a request only where no smaller step will do, and then only the largest.

        Raises:
            DeviceLost: no other step will do either.
        """
        if not is_out_of_memory(error) and not isinstance(error, RankLost):
            check_device(self._runner.decoder.device)
        outcome = self._outcome(step)
        outcome.why_failed = _why_failed(step.plan, error)
        with self._lock:
            if step.step is not None or not is_out_of_memory(error):
                outcome.failed = self._scheduler.fail(step.plan, outcome.ended_s)
                return outcome
            self._scheduler.put_back(step.plan)
            if step.plan.num_tokens <= SMALLEST_RETRY:
                outcome.failed = self._end_largest(step.plan, outcome.ended_s)
        # What the failed step took may lie in pieces that no smaller one can use.
        torch.cuda.empty_cache()
        return outcome

    def _end_largest(self, plan: StepPlan, now: float) -> list[Request]:
        """End the one with the most tokens of the plan's requests, if any of them still lives."""
        living = [c.request for c in plan.chunks if c.request.status is not RequestStatus.FINISHED]
        largest = sorted(living, key=lambda request: request.num_tokens)[-1:]
        for request in largest:
            self._scheduler.finish(request, "error", now)
        return largest


def _why_failed(plan: StepPlan, error: Exception) -> str:
    """A sentence for the callers; what isn't plainly a lack of memory also goes to the log, with its trace."""
    if isinstance(error, RankLost):
        return str(error)
    if is_out_of_memory(error):
        logger.info("step %d of %d tokens ran out of memory: %s", plan.step, plan.num_tokens, error)
        return (
            f"There wasn't enough memory for a step of {plan.num_tokens:,} tokens. Close other programs, or "
            "start with fewer --max-batched-tokens or --kv-blocks."
        )
    logger.error("step %d failed", plan.step, exc_info=error)
    return f"This step failed: {reason_of(error)}. Try again."
