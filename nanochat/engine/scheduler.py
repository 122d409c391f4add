"""Who runs in the next step, and on which blocks: ``plan()`` before a step, ``commit()`` after it.

Each step has one budget of tokens. Decodes come first, one token each, least recently served first.
Prefill chunks share what is left, several unfinished ones a step: the oldest keeps a set share of it,
much shorter ones go ahead with the rest. A request takes blocks for the tokens of this step only; when
none are free, the most recent request outside the batch is preempted and later computed anew, mostly
from the prefix cache. Steps may be planned while earlier ones are still in flight: what they sample
counts as pending tokens until ``commit()`` brings the ids.

Knows nothing of torch, models, text, threads or clocks: times are the caller's, in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from nanochat.engine.block_pool import BlockPool, InvariantError
from nanochat.engine.invariants import check_scheduler
from nanochat.engine.request import FinishReason, Request, RequestStatus
from nanochat.engine.wait_queue import WaitQueue
from nanochat.errors import InvalidOption, NotEnoughMemory, PromptTooLong


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens ``start`` to ``start + length`` of a request; ``samples``: its last row gives the next token."""

    request: Request
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. A request appears at most once."""

    step: int
    decodes: tuple[ScheduledChunk, ...]
    """One token each, and each samples. That token's id may still be pending."""
    prefills: tuple[ScheduledChunk, ...]
    preempted: tuple[Request, ...]
    """Requests that lost their blocks to this step and wait again."""

    @property
    def chunks(self) -> tuple[ScheduledChunk, ...]:
        """Decodes, then prefills: the order of the packed batch."""
        return self.decodes + self.prefills

    @property
    def sampling(self) -> tuple[ScheduledChunk, ...]:
        """The chunks that sample a token, in batch order."""
        return self.decodes + tuple(chunk for chunk in self.prefills if chunk.samples)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.length for chunk in self.prefills)

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.prefills


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    step: int
    now: float
    budget: int
    """Tokens not given out yet."""
    unfinished: list[Request] = field(default_factory=list)
    """Running requests that still prefill, as the step began."""
    promised: int = 0
    """Blocks that admitted requests still lack for the rest of their prefill."""
    decodes: list[ScheduledChunk] = field(default_factory=list)
    prefills: list[ScheduledChunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitting: bool = True
    """False once memory was found short: nothing new starts in this step."""


class Scheduler:
    """Continuous batching over a :class:`BlockPool`. Every method but ``check_fits`` is for one thread.

    Args:
        max_num_seqs: most requests that hold blocks at once, and so most in a step.
        max_num_batched_tokens: token budget of one step.
        max_model_len: longest prompt plus answer, in tokens.
        long_prefill_share: the oldest prompt's share of the prefill tokens while much shorter ones wait.
        watermark: share of the pool that starting a request must leave free, so that those already
            running can grow before anyone is preempted.
        patience: steps for which a request that lacks memory may be overtaken by smaller ones.

    Raises:
        NotEnoughMemory: one request of ``max_model_len`` tokens wouldn't fit the pool.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        long_prefill_share: float = 0.5,
        watermark: float = 0.01,
        patience: int = 128,
    ) -> None:
        capacity = pool.num_blocks * pool.block_size + 1  # the last token sampled is never fed back
        if max_model_len > capacity:
            raise NotEnoughMemory(
                f"max_model_len {max_model_len} doesn't fit a cache of {pool.num_blocks} blocks of "
                f"{pool.block_size} tokens; the longest that does is {capacity}."
            )
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.long_prefill_share = long_prefill_share
        self.watermark_blocks = int(watermark * pool.num_blocks)
        self.patience = patience
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._step = 0
        self._num_added = 0
        self._waiting = WaitQueue()
        self._running: dict[int, Request] = {}
        """By arrival; least recently served first."""
        self._draining: dict[int, Request] = {}
        """Finished, but a step in flight still uses their blocks."""
        self._in_flight: deque[StepPlan] = deque()
        self._blocked: Request | None = None
        """The oldest waiting request, if it lacked memory when last tried ..."""
        self._blocked_since = 0
        """... and the step since which it has."""

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold blocks, least recently served first."""
        return tuple(self._running.values())

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests without blocks, oldest first."""
        return tuple(self._waiting.by_arrival)

    @property
    def requests(self) -> Sequence[Request]:
        """Every request that hasn't ended."""
        return (*self._running.values(), *self._waiting.by_arrival)

    @property
    def has_work(self) -> bool:
        """Whether a request hasn't ended, or a step hasn't been collected."""
        return bool(self._running or self._waiting or self._in_flight)

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Pure; any thread may call it.

        Raises:
            InvalidOption: the prompt is empty.
            PromptTooLong: it leaves no room for a single token of an answer.
        """
        if num_prompt_tokens < 1:
            raise InvalidOption("The prompt is empty; it needs at least one token.")
        if num_prompt_tokens >= self.max_model_len:
            raise PromptTooLong(
                f"The prompt has {num_prompt_tokens} tokens but at most {self.max_model_len - 1} fit; "
                "shorten it, or start with a larger max_model_len."
            )

    def add(self, request: Request) -> None:
        """Queue a new request. Raises as :meth:`check_fits` does."""
        self.check_fits(request.num_prompt_tokens)
        request.max_total_tokens = min(
            request.num_prompt_tokens + request.params.max_tokens, self.max_model_len
        )
        request.arrival_order = self._num_added
        self._num_added += 1
        request.last_step = self._step
        self._enqueue(request)

    def cancel(self, request: Request, now: float) -> None:
        """End a request early. Harmless when it has ended already."""
        self.finish(request, "cancelled", now)

    def finish(self, request: Request, reason: FinishReason, now: float) -> None:
        """End a request; its blocks go back at once, or when the last step in flight that uses it is in."""
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.WAITING:
            self._leave_queue(request)
        else:
            del self._running[request.arrival_order]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finished_s = now
        if request.num_steps_in_flight:
            self._draining[request.arrival_order] = request
        else:
            self._release(request)

    def plan(self, now: float) -> StepPlan:
        """Decide the next step. Empty when there is nothing to run, or all of it waits on steps in flight."""
        self._step += 1
        draft = _Draft(self._step, now, self.max_num_batched_tokens)
        ready = self._classify(draft)
        if len(ready) >= draft.budget:
            self._plan_overdue_prefills(draft, ready[0].last_step)
        self._plan_decodes(draft, ready)
        if draft.budget and (draft.unfinished or self._waiting):
            self._plan_prefills(draft)
        plan = StepPlan(draft.step, tuple(draft.decodes), tuple(draft.prefills), tuple(draft.preempted))
        if not plan.is_empty:
            self._in_flight.append(plan)
        if len(draft.decodes) + len(draft.prefills) < len(self._running):
            for chunk in plan.chunks:  # the others now go first
                self._running[chunk.request.arrival_order] = self._running.pop(chunk.request.arrival_order)
        return plan

    def commit(self, plan: StepPlan, token_ids: Sequence[int], now: float) -> list[tuple[Request, int]]:
        """Take in the oldest step in flight. ``token_ids``: one per sampling chunk, in plan order.

        Returns the tokens that count, with their requests; those of requests that ended meanwhile don't.
        """
        if len(token_ids) != len(plan.sampling):
            raise ValueError(f"step {plan.step} samples {len(plan.sampling)} tokens, not {len(token_ids)}")
        self._collect(plan)
        accepted: list[tuple[Request, int]] = []
        sampled = iter(token_ids)
        for chunk in plan.chunks:
            request = chunk.request
            request.num_steps_in_flight -= 1
            if chunk.start == request.num_written_tokens:  # else a failed step left a gap before it
                self._mark_written(request, chunk.start + chunk.length)
            if chunk.samples:
                request.num_pending_tokens -= 1
                token = next(sampled)
                if request.status is not RequestStatus.FINISHED:
                    accepted.append((request, token))
                    self._accept(request, token, now)
            if request.status is RequestStatus.FINISHED:
                self._drain(request)
        return accepted

    def fail(self, plan: StepPlan, now: float) -> list[Request]:
        """The oldest step in flight raised: end its requests. Returns those that hadn't ended before.

        What the step wrote is not to be trusted: it isn't counted as written, so neither its blocks nor
        those of later steps in flight are ever indexed.
        """
        self._collect(plan)
        failed: list[Request] = []
        for chunk in plan.chunks:
            request = chunk.request
            request.num_steps_in_flight -= 1
            request.num_pending_tokens -= chunk.samples
            if request.status is not RequestStatus.FINISHED:
                self.finish(request, "error", now)
                failed.append(request)
            else:
                self._drain(request)
        return failed

    def check_invariants(self) -> None:
        """Raises InvariantError, with a sentence, if the bookkeeping contradicts itself. O(everything)."""
        check_scheduler(self)

    # ---- planning ----

    def _classify(self, draft: _Draft) -> list[Request]:
        """Requests ready to decode; those that still prefill go to the draft."""
        ready = []
        block_size = self.pool.block_size
        for request in self._running.values():
            num_tokens = request.num_tokens
            if num_tokens - request.num_computed_tokens > 1:
                draft.unfinished.append(request)
                draft.promised += -(-num_tokens // block_size) - len(request.block_table)
            elif num_tokens < request.max_total_tokens:
                ready.append(request)
        return ready

    def _plan_decodes(self, draft: _Draft, ready: list[Request]) -> None:
        block_size = self.pool.block_size
        for request in ready:
            if not draft.budget:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an earlier row
            if request.num_computed_tokens == len(request.block_table) * block_size:
                if not self._make_room(draft, request):
                    continue
                request.block_table += self.pool.allocate(1)
            draft.decodes.append(self._schedule(draft, request, 1))

    def _plan_overdue_prefills(self, draft: _Draft, before_step: int) -> None:
        """Decodes alone would fill the step: prefills last served before any of them take their turn first."""
        cap = max(1, int(draft.budget * self.long_prefill_share))
        for request in [*draft.unfinished, *self._waiting.by_arrival[: self.max_num_seqs]]:
            if draft.budget and request.last_step < before_step:
                self._plan_prefill(draft, request, cap)

    def _plan_prefills(self, draft: _Draft) -> None:
        """The oldest keeps its share while much shorter ones go ahead; then it takes all they left."""
        unfinished = sorted(draft.unfinished, key=_uncomputed)
        candidates = [*unfinished, *self._waiting.by_size[: self.max_num_seqs]]
        oldest = min([*unfinished, *self._waiting.by_arrival[:1]], key=_seniority)
        short = _uncomputed(oldest) // 2
        shorter = [request for request in candidates if _uncomputed(request) <= short]
        if shorter:
            reserved = int(draft.budget * self.long_prefill_share)
            if not reserved and oldest.last_step < draft.step - 1:
                reserved = 1
            draft.budget -= reserved
            for request in shorter:
                self._plan_prefill(draft, request, draft.budget)
            draft.budget += reserved
        for request in [oldest, *candidates]:
            self._plan_prefill(draft, request, draft.budget)

    def _plan_prefill(self, draft: _Draft, request: Request, cap: int) -> None:
        """Give a request its next chunk of at most ``cap`` tokens, as far as there are blocks."""
        limit = min(cap, draft.budget)
        if not limit or request.last_step == draft.step:
            return
        if request.status is RequestStatus.WAITING and not self._admit(draft, request):
            return
        block_size, table, start = self.pool.block_size, request.block_table, request.num_computed_tokens
        if start == len(table) * block_size and not self._make_room(draft, request):
            return
        room = (len(table) + self.pool.num_free) * block_size - start
        length = min(limit, room, request.num_tokens - start)
        blocks = -(-(start + length) // block_size) - len(table)
        table += self.pool.allocate(blocks)
        draft.promised -= blocks
        draft.prefills.append(self._schedule(draft, request, length))

    def _schedule(self, draft: _Draft, request: Request, length: int) -> ScheduledChunk:
        start = request.num_computed_tokens
        end = start + length
        samples = end == request.num_tokens
        request.num_computed_tokens = end
        request.num_pending_tokens += samples
        request.num_steps_in_flight += 1
        request.last_step = draft.step
        if request.first_scheduled_s is None:
            request.first_scheduled_s = draft.now
        draft.budget -= length
        return ScheduledChunk(request, start, length, samples)

    # ---- memory ----

    def _admit(self, draft: _Draft, request: Request) -> bool:
        """Start a waiting request if all of its prefill fits what nobody was promised."""
        if not draft.admitting or draft.preempted or len(self._running) >= self.max_num_seqs:
            return False
        starved = self._blocked is not None and draft.step - self._blocked_since >= self.patience
        oldest = self._waiting.by_arrival[0]
        if (starved and request is not oldest) or self._prefix_in_flight(draft, request):
            return False
        hits = self._lookup(request)
        lacking = -(-request.num_tokens // self.pool.block_size) - len(hits)
        spare = self.pool.num_free - draft.promised - (self.watermark_blocks if self._running else 0)
        if lacking + self.pool.num_free_among(hits) > spare:
            draft.admitting = False
            if request is oldest and request is not self._blocked:
                self._blocked, self._blocked_since = request, draft.step
            return False
        self._leave_queue(request)
        self.pool.claim(hits)
        draft.promised += lacking
        request.status = RequestStatus.RUNNING
        request.block_table = hits
        request.num_computed_tokens = request.num_written_tokens = len(hits) * self.pool.block_size
        self._running[request.arrival_order] = request
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_query_tokens += request.num_prompt_tokens
            self.prefix_hit_tokens += request.num_cached_tokens
        return True

    def _prefix_in_flight(self, draft: _Draft, request: Request) -> bool:
        """Whether an uncollected step computes what this request could share: then waiting is cheaper."""
        keys = request.block_keys
        for prefills in (draft.prefills, *(plan.prefills for plan in self._in_flight)):
            for chunk in prefills:
                block, others = chunk.start // self.pool.block_size, chunk.request.block_keys
                if block < min(len(keys), len(others)) and keys[block] == others[block]:
                    return True
        return False

    def _make_room(self, draft: _Draft, request: Request) -> bool:
        """See to one free block, by preempting requests that came later and have nothing in flight."""
        while not self.pool.num_free:
            victims = [
                other
                for other in self._running.values()
                if not other.num_steps_in_flight and other.arrival_order > request.arrival_order
            ]
            if not victims:
                return False
            victim = max(victims, key=_seniority)
            del self._running[victim.arrival_order]
            self._release(victim)
            victim.status = RequestStatus.WAITING
            victim.num_computed_tokens = victim.num_written_tokens = 0
            victim.num_preemptions += 1
            self.num_preemptions += 1
            draft.preempted.append(victim)
            self._enqueue(victim)
        return True

    def _enqueue(self, request: Request) -> None:
        request.uncached_tokens = request.num_tokens - len(self._lookup(request)) * self.pool.block_size
        self._waiting.add(request)

    def _leave_queue(self, request: Request) -> None:
        self._waiting.remove(request)
        if request is self._blocked:
            self._blocked = None

    def _lookup(self, request: Request) -> list[int]:
        """Blocks with its longest cached prefix, short of its last token: one must be left to compute."""
        if not self.pool.prefix_caching:
            return []
        num_blocks = (len(request.token_ids) - 1) // self.pool.block_size
        self.pool.extend_keys(request.block_keys, request.token_ids, num_blocks)
        return self.pool.lookup(request.block_keys, num_blocks)

    def _release(self, request: Request) -> None:
        self.pool.release(request.block_table)
        request.block_table = []

    # ---- collecting ----

    def _collect(self, plan: StepPlan) -> None:
        if not self._in_flight or self._in_flight[0] is not plan:
            raise InvariantError(f"Step {plan.step} isn't the oldest one in flight.")
        self._in_flight.popleft()

    def _accept(self, request: Request, token: int, now: float) -> None:
        request.token_ids.append(token)
        if request.first_token_s is None:
            request.first_token_s = now
        if token in request.eos_token_ids and not request.params.ignore_eos:
            self.finish(request, "stop", now)
        elif len(request.token_ids) >= request.max_total_tokens:
            self.finish(request, "length", now)

    def _mark_written(self, request: Request, end: int) -> None:
        """K/V up to ``end`` is written: the blocks this completes become findable."""
        block_size = self.pool.block_size
        first = request.num_written_tokens // block_size
        last = min(end, len(request.token_ids)) // block_size  # what a dropped token wrote has no known ids
        request.num_written_tokens = end
        if last > first and self.pool.prefix_caching:
            self.pool.extend_keys(request.block_keys, request.token_ids, last)
            self.pool.index(request.block_table, request.block_keys, first, last)

    def _drain(self, request: Request) -> None:
        if not request.num_steps_in_flight and self._draining.pop(request.arrival_order, None) is not None:
            self._release(request)


def _uncomputed(request: Request) -> int:
    """Tokens to compute before it samples; an estimate while it waits."""
    if request.status is RequestStatus.WAITING:
        return request.uncached_tokens
    return request.num_tokens - request.num_computed_tokens


def _seniority(request: Request) -> int:
    return request.arrival_order
