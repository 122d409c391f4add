"""What must always be true of a scheduler and its block pool, checked from outside.

Slow on purpose: it recounts everything. Tests call it after every move, the engine when it is idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanochat.engine.block_pool import InvariantError
from nanochat.engine.request import Request, RequestStatus

if TYPE_CHECKING:
    from nanochat.engine.scheduler import Scheduler


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise InvariantError(sentence)


def check_scheduler(scheduler: Scheduler) -> None:
    """O(blocks + rows in flight). Blocks are held by someone who still needs them, so none can leak.

    Raises:
        InvariantError: something doesn't add up; the sentence says what.
    """
    holders = scheduler.holders
    scheduler.pool.check(request.block_table for request in holders)
    _check_in_flight(scheduler, holders)
    for request in holders:
        _check_holder(request, scheduler)
    for request in scheduler.waiting:
        _check_waiting(request)
    _require(scheduler.num_running <= scheduler.max_num_seqs, "More requests run than max_num_seqs.")
    scheduler._waiting.check()


def _check_in_flight(scheduler: Scheduler, holders: Sequence[Request]) -> None:
    steps: Counter[Request] = Counter()
    samples: Counter[Request] = Counter()
    for plan in scheduler._in_flight:
        members = [chunk.request for chunk in plan.chunks]
        _require(len(set(members)) == len(members), f"Step {plan.step} holds a request twice.")
        _require(plan.num_tokens <= scheduler.max_num_batched_tokens, f"Step {plan.step} is over budget.")
        _require(len(members) <= scheduler.max_num_seqs, f"Step {plan.step} holds too many requests.")
        steps.update(members)
        samples.update(chunk.request for chunk in plan.sampling)
    _require(steps.keys() <= set(holders), "A step in flight uses a request whose blocks were given back.")
    for request in holders:
        name = f"Request {request.request_id}"
        _require(request.num_steps_in_flight == steps[request], f"{name} miscounts its steps in flight.")
        _require(request.num_pending_tokens == samples[request], f"{name} miscounts its pending tokens.")


def _check_holder(request: Request, scheduler: Scheduler) -> None:
    name, block_size = f"Request {request.request_id}", scheduler.pool.block_size
    ended = request.status is RequestStatus.FINISHED
    _require(ended or request.status is RequestStatus.RUNNING, f"{name} waits but holds blocks.")
    _require(not ended or request.num_steps_in_flight > 0, f"{name} has ended but keeps its blocks.")
    _require(
        len(request.block_table) == -(-request.num_computed_tokens // block_size),
        f"{name} has {len(request.block_table)} blocks for {request.num_computed_tokens} tokens.",
    )
    _require(request.num_written_tokens <= request.num_computed_tokens, f"{name} wrote more than planned.")
    _require(ended or request.num_computed_tokens < request.num_tokens, f"{name} computed too much.")
    _require(request.num_tokens <= request.max_total_tokens, f"{name} outgrew its limit.")
    unwritten = request.block_table[request.num_written_tokens // block_size :]
    _require(
        not any(scheduler.pool.is_cached(block) for block in unwritten),
        f"{name} has a block in the prefix index that isn't written yet.",
    )


def _check_waiting(request: Request) -> None:
    name = f"Request {request.request_id}"
    _require(request.status is RequestStatus.WAITING, f"{name} is queued but doesn't wait.")
    _require(not request.block_table, f"{name} waits but holds blocks.")
    progress = (request.num_computed_tokens, request.num_pending_tokens, request.num_steps_in_flight)
    _require(progress == (0, 0, 0), f"{name} waits but has progress or steps in flight.")
