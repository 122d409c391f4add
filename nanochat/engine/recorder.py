"""Keeps what :class:`EngineStats` shows: counters and recent latencies, fed by the step thread.

Not thread-safe: the engine calls it under the lock that also guards the scheduler.
"""

from __future__ import annotations

from collections import deque

from nanochat.engine.request import Request, RequestStatus
from nanochat.engine.scheduler import Scheduler, StepPlan
from nanochat.engine.stats import (
    CACHED,
    FREE,
    RECENT,
    BlockMap,
    EngineStats,
    RateMeter,
    RequestRow,
    RequestState,
)


class Recorder:
    """Counters since the engine's start. Times in seconds of the caller's monotonic clock."""

    def __init__(self) -> None:
        self._steps = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._ttft_s: deque[float] = deque(maxlen=RECENT)
        self._itl_s: deque[float] = deque(maxlen=RECENT)
        self._decode = RateMeter()
        self._prefill = RateMeter()

    def record_step(self, plan: StepPlan, start_s: float, end_s: float) -> None:
        """A step has been computed and committed."""
        self._steps += 1
        prefilled = sum(chunk.length for chunk in plan.prefills)
        self._prompt_tokens += prefilled
        if plan.decodes:
            self._decode.add(start_s, end_s, len(plan.decodes))
        if prefilled:
            self._prefill.add(start_s, end_s, prefilled)

    def record_token(self, request: Request, previous_s: float | None, now_s: float) -> None:
        """A request has got a token; its previous one came at ``previous_s``."""
        self._generation_tokens += 1
        if previous_s is not None:
            self._itl_s.append(now_s - previous_s)
        elif request.first_token_s is not None:
            self._ttft_s.append(request.first_token_s - request.arrival_s)

    def snapshot(self, scheduler: Scheduler, now_s: float) -> EngineStats:
        """The state of things, as a value."""
        pool = scheduler.pool
        return EngineStats(
            blocks_total=pool.num_blocks,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.num_preemptions,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            ttft_s=tuple(self._ttft_s),
            itl_s=tuple(self._itl_s),
            decode_tok_s=self._decode.rate(now_s),
            prefill_tok_s=self._prefill.rate(now_s),
            steps=self._steps,
            requests=tuple(_row(request, now_s) for request in scheduler.requests),
        )

    def block_map(self, scheduler: Scheduler) -> BlockMap:
        """One entry a block."""
        pool = scheduler.pool
        owner = [CACHED if pool.is_cached(block) else FREE for block in range(pool.num_blocks)]
        shared = set()
        for request in sorted(scheduler.requests, key=lambda request: request.request_id, reverse=True):
            for block in request.block_table:
                owner[block] = request.request_id  # the lowest id comes last and stays
                if pool.ref_count(block) > 1:
                    shared.add(block)
        return BlockMap(tuple(owner), frozenset(shared))


def _row(request: Request, now_s: float) -> RequestRow:
    prefill_total = request.num_tokens
    decoding = request.num_generated_tokens > 0 and request.num_computed_tokens >= prefill_total - 1
    first = request.first_token_s
    later_tokens = request.num_generated_tokens - 1
    rate = (
        later_tokens / (now_s - first) if first is not None and later_tokens > 0 and now_s > first else None
    )
    return RequestRow(
        request_id=request.request_id,
        state=_state(request, decoding),
        prompt_tokens=request.num_prompt_tokens,
        prefill_done=request.num_computed_tokens,
        prefill_total=prefill_total,
        context_tokens=request.num_tokens,
        generated_tokens=request.num_generated_tokens,
        cached_tokens=request.num_cached_tokens,
        preemptions=request.num_preemptions,
        blocks=len(request.block_table),
        ttft_s=first - request.arrival_s if first is not None else None,
        decode_tok_s=rate,
    )


def _state(request: Request, decoding: bool) -> RequestState:
    if request.status is RequestStatus.WAITING:
        return "preempted" if request.num_preemptions else "queued"
    return "decode" if decoding else "prefill"
