"""Keeps what :class:`EngineStats` shows: counters and recent latencies, fed by the step thread.

Not thread-safe: the engine calls it under the lock that also guards the scheduler. What takes long there is left
for later: see :class:`Holdings`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, islice

from nanochat.engine.outputs import decode_rate
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

WAITING_ROWS = 256
"""Of requests that wait, so many have a row: a server's queue may be long, and the lock is held meanwhile."""


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
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
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
            requests=tuple(_row(request, now_s) for request in _with_rows(scheduler)),
        )


@dataclass(frozen=True, slots=True)
class Holdings:
    """Copies of what a :class:`BlockMap` is made from: quick to take, so that steps hardly wait for it."""

    num_blocks: int
    indexed: Sequence[object]
    """`BlockPool.indexed`."""
    tables: Sequence[tuple[int, list[int]]]
    """Request ids and block tables, highest id first."""

    @classmethod
    def of(cls, scheduler: Scheduler) -> Holdings:
        """To be called under the lock; nothing else here needs it."""
        holders = sorted(scheduler.holders, key=lambda request: request.request_id, reverse=True)
        tables = [(request.request_id, request.block_table.copy()) for request in holders]
        return cls(scheduler.pool.num_blocks, scheduler.pool.indexed(), tables)

    def block_map(self) -> BlockMap:
        """One entry a block."""
        owner = [FREE] * self.num_blocks
        for block in compress(range(self.num_blocks), self.indexed):
            owner[block] = CACHED
        shared = set()
        for request_id, table in self.tables:
            for block in table:
                if owner[block] >= 0:
                    shared.add(block)
                owner[block] = request_id  # the lowest id comes last and stays
        return BlockMap(tuple(owner), frozenset(shared))


def _with_rows(scheduler: Scheduler) -> Sequence[Request]:
    return (*scheduler.running, *islice(scheduler.waiting, WAITING_ROWS))


def _row(request: Request, now_s: float) -> RequestRow:
    prefill_total = request.num_tokens
    decoding = request.num_generated_tokens > 0 and request.num_computed_tokens >= prefill_total - 1
    first = request.first_token_s
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
        decode_tok_s=decode_rate(request.num_generated_tokens, first, now_s),
    )


def _state(request: Request, decoding: bool) -> RequestState:
    if request.status is RequestStatus.WAITING:
        return "preempted" if request.num_preemptions else "queued"
    return "decode" if decoding else "prefill"
