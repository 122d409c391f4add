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

from nanochat.engine.block_pool import BlockPool, InvariantError
from nanochat.engine.invariants import check_scheduler
from nanochat.engine.kv_cache_manager import KVCacheManager
from nanochat.engine.prompt_limit import too_long
from nanochat.engine.request import FinishReason, Request, RequestStatus
from nanochat.engine.step_pace import StepPace
from nanochat.engine.step_plan import Draft, ScheduledChunk, StepPlan, writes_shared_block
from nanochat.engine.wait_queue import WaitQueue, by_arrival, uncomputed
from nanochat.errors import InvalidOption, PromptTooLong

__all__ = ["ScheduledChunk", "Scheduler", "StepPlan"]

RECOVERY_STEPS = 64
"""Steps that go well before one may be twice as large again, after one has run out of memory."""


class Scheduler:
    """Continuous batching over a :class:`BlockPool`. Every method but ``check_fits`` is for one thread.

    Args:
        max_num_seqs: most requests that hold blocks at once, and so most in a step.
        max_num_batched_tokens: token budget of one step.
        max_model_len: longest prompt plus answer, in tokens. NotEnoughMemory if the pool can't hold that.
        model_limit: the longest that the model itself allows, for what is told; left out: the same.
        long_prefill_share: the oldest prompt's share of the prefill tokens while much shorter ones wait.
        watermark: share of the pool that starting a request must leave free, so that those already
            running can grow before anyone is preempted.
        pace: how many prompt tokens a step may take while chats are running; left out: all that the budget has.
        patience: steps for which a request that lacks memory may be overtaken by smaller ones.
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
        patience: int = 32,
        pace: StepPace | None = None,
        model_limit: int | None = None,
    ) -> None:
        self.pace = pace or StepPace()
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.model_limit = model_limit or max_model_len
        self.long_prefill_share = long_prefill_share
        self.watermark_blocks = int(watermark * pool.num_blocks)
        self.step_budget = max_num_batched_tokens
        """Tokens of one step: less than it may be for a while after a step has run out of memory."""
        self._steps_since_put_back = 0
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._kv = KVCacheManager(pool, max_model_len)
        self._step = 0
        self._num_added = 0
        self._waiting = WaitQueue(patience)
        self._running: dict[int, Request] = {}
        """By arrival; least recently served first."""
        self._draining: dict[int, Request] = {}
        """Finished, but a step in flight still uses their blocks."""
        self._in_flight: deque[StepPlan] = deque()

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold blocks, least recently served first."""
        return tuple(self._running.values())

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def holders(self) -> Sequence[Request]:
        """All that hold blocks: those that run, and those that have ended while a step in flight uses theirs."""
        return (*self._running.values(), *self._draining.values())

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests without blocks, oldest first."""
        return tuple(self._waiting.by_arrival)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

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
            limits = (self.max_model_len, self.model_limit, self.pool.num_blocks, self.pool.block_size)
            raise PromptTooLong(too_long(num_prompt_tokens, *limits))

    def add(self, request: Request) -> None:
        """Queue a new request. Raises as :meth:`check_fits` does."""
        self.check_fits(request.num_prompt_tokens)
        if request.max_total_tokens:
            raise ValueError(f"request {request.request_id} has been added before")
        longest = request.num_prompt_tokens + request.params.max_tokens
        request.max_total_tokens = min(longest, self.max_model_len)
        request.arrival_order = self._num_added
        self._num_added += 1
        request.last_step = self._step
        self._enqueue(request)

    def finish(self, request: Request, reason: FinishReason, now: float) -> None:
        """End a request; its blocks go back at once, or when the last step in flight that uses it is in.

        Harmless when it has ended already.
        """
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        else:
            del self._running[request.arrival_order]
        if not self._running and not self._waiting:
            self.step_budget = self.max_num_batched_tokens
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finished_s = now
        if request.num_steps_in_flight:
            self._draining[request.arrival_order] = request
        else:
            self._kv.release(request)

    def plan(self, now: float) -> StepPlan:
        """Decide the next step. Empty when there is nothing to run, or all of it waits on steps in flight."""
        self._step += 1
        draft = Draft(self._step, now, self.step_budget)
        ready = self._classify(draft)
        if len(ready) >= draft.budget:
            self._plan_overdue_prefills(draft, ready[0].last_step)
        self._plan_decodes(draft, ready)
        draft.budget = self.pace.prefill_tokens(draft.budget, beside_chats=bool(draft.decodes))
        if draft.budget and (draft.unfinished or self._waiting):
            self._plan_prefills(draft)
        plan = draft.finish()
        if not plan.is_empty:
            self._in_flight.append(plan)
        if len(plan.chunks) < len(self._running):
            for chunk in plan.chunks:  # those left out now go first
                order = chunk.request.arrival_order
                self._running[order] = self._running.pop(order)
        return plan

    def commit(self, plan: StepPlan, token_ids: Sequence[int], now: float) -> list[tuple[Request, int]]:
        """Take in the oldest step in flight. ``token_ids``: one per sampling chunk, in plan order.

        Returns the tokens that count, with their requests; those of requests that ended meanwhile don't.
        """
        if len(token_ids) != len(plan.sampling):
            raise ValueError(f"step {plan.step} samples {len(plan.sampling)} tokens, not {len(token_ids)}")
        self._collect(plan)
        self._steps_since_put_back += 1
        if self._steps_since_put_back % RECOVERY_STEPS == 0:
            self.step_budget = min(2 * self.step_budget, self.max_num_batched_tokens)
        accepted: list[tuple[Request, int]] = []
        sampled = iter(token_ids)
        block_size = self.pool.block_size
        for request, start, length, samples in plan.chunks:
            request.num_steps_in_flight -= 1
            if start == request.num_written_tokens:  # else a failed step left a gap before it
                request.num_written_tokens = end = start + length
                if start // block_size < end // block_size:
                    self._kv.index(request, start, end)
            if samples:
                request.num_pending_tokens -= 1
                token = next(sampled)
                if request.status is RequestStatus.RUNNING:
                    accepted.append((request, token))
                    self._accept(request, token, now)
            if request.status is RequestStatus.FINISHED:
                self._drain(request)
        self._resize_sharing([chunk.request for chunk in plan.prefills if chunk.samples])
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

    def put_back(self, plan: StepPlan) -> None:
        """The only step in flight could not be run at its size: its requests start again, in steps half as large.

        What it may have written is not to be trusted: their blocks are released, and never indexed.
        """
        self._collect(plan)
        self.step_budget = max(1, plan.num_tokens // 2)
        self._steps_since_put_back = 0
        for chunk in plan.chunks:
            chunk.request.num_steps_in_flight -= 1
            chunk.request.num_pending_tokens -= chunk.samples
            if chunk.request.status is RequestStatus.FINISHED:
                self._drain(chunk.request)
            else:
                self._requeue(chunk.request)

    def check_invariants(self) -> None:
        """Raises InvariantError, with a sentence, if the bookkeeping contradicts itself. O(everything)."""
        check_scheduler(self)

    def _classify(self, draft: Draft) -> list[Request]:
        """Requests ready to decode; those that still prefill go to the draft."""
        ready = []
        for request in self._running.values():
            num_tokens = request.num_tokens
            if num_tokens - request.num_computed_tokens > 1:
                draft.unfinished.append(request)
                draft.promised_blocks += self._kv.lacking_blocks(request)
            elif num_tokens < request.max_total_tokens:
                ready.append(request)
        return ready

    def _plan_decodes(self, draft: Draft, ready: list[Request]) -> None:
        block_size = self.pool.block_size
        for request in ready:
            if not draft.budget:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an earlier row
            start = request.num_computed_tokens
            if start == len(request.block_table) * block_size:
                if not self._make_room(draft, request):
                    continue
                self._kv.grow(request, 1)
            draft.schedule_decode(request, start)

    def _plan_overdue_prefills(self, draft: Draft, before_step: int) -> None:
        """Decodes alone would fill the step: prefills last served before any of them take their turn first."""
        tokens_since = (draft.step - before_step) * draft.budget
        if tokens_since > self.max_num_seqs:
            return  # a decode has waited as long as if all that may run took turns: nobody goes ahead of it
        cap = max(1, int(draft.budget * self.long_prefill_share))
        for request in self._prefill_queue(draft):
            if request.last_step < before_step:
                self._plan_prefill(draft, request, cap)

    def _plan_prefills(self, draft: Draft) -> None:
        """Oldest first; but if it can't be done in this step, much shorter ones go ahead with a share of it."""
        queue = self._prefill_queue(draft)
        if queue and (uncomputed(queue[0]) > draft.budget or self._waiting.blocked_steps(draft.step)):
            reserved = draft.reserve(self.long_prefill_share, queue[0])
            for request in sorted(queue, key=uncomputed):
                if 2 * uncomputed(request) <= uncomputed(queue[0]):
                    self._plan_prefill(draft, request, draft.budget)
            draft.budget += reserved
        for request in queue:
            self._plan_prefill(draft, request, draft.budget)

    def _prefill_queue(self, draft: Draft) -> list[Request]:
        """Who could prefill in this step, oldest first."""
        queue = set(draft.unfinished)
        if not draft.preempted and len(self._running) < self.max_num_seqs:
            queue.update(self._waiting.window(self.max_num_seqs, draft.step))
        return sorted(queue, key=by_arrival)

    def _plan_prefill(self, draft: Draft, request: Request, cap: int) -> None:
        """Give a request its next chunk of at most ``cap`` tokens, as far as there are blocks."""
        limit = min(cap, draft.budget)
        if not limit or request.last_step == draft.step:
            return
        if request.status is RequestStatus.WAITING and not self._admit(draft, request):
            return
        if not self._make_room(draft, request):
            return
        length = min(limit, uncomputed(request), self._kv.room(request))
        draft.promised_blocks -= self._kv.grow(request, length)
        draft.schedule_prefill(request, length)

    def _admit(self, draft: Draft, request: Request) -> bool:
        """Start a waiting request if its prefill fits what nobody was promised."""
        if draft.short_of_memory or draft.preempted or len(self._running) >= self.max_num_seqs:
            return False
        uncollected = (draft.prefills, *(plan.prefills for plan in self._in_flight))
        if any(writes_shared_block(prefills, request, self.pool.block_size) for prefills in uncollected):
            return False  # what it could share is about to be written
        free = self.pool.num_free - (self.watermark_blocks if self._running else 0)
        soon = self._kv.about_to_be_freed(self._running.values())
        if not self._kv.start(request, draft.budget, free - draft.promised_blocks, soon):
            draft.short_of_memory = True
            self._waiting.note_blocked(draft.step)
            return False
        self._waiting.remove(request)
        draft.admitted = True
        request.status = RequestStatus.RUNNING
        self._running[request.arrival_order] = request
        draft.promised_blocks += self._kv.lacking_blocks(request)
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_query_tokens += request.num_prompt_tokens
            self.prefix_hit_tokens += request.num_cached_tokens
        return True

    def _enqueue(self, request: Request) -> None:
        request.uncached_tokens = self._count_uncached(request)
        self._waiting.add(request)

    def _count_uncached(self, request: Request) -> int:
        return request.num_tokens - self._kv.count_cached(request)

    def _resize_sharing(self, cached: Sequence[Request]) -> None:
        """Prompts are in the cache: those that begin like them have less to compute than when queued.

        Once for all that begin alike, and only what changes is moved: thousands may wait behind one preamble.
        """
        for first_block in {key: None for request in cached for key in request.block_keys[:1]}:
            for other in self._waiting.sharing(first_block):
                uncached_tokens = self._count_uncached(other)
                if uncached_tokens != other.uncached_tokens:
                    self._waiting.resize(other, uncached_tokens)

    def _make_room(self, draft: Draft, request: Request) -> bool:
        """See to room for a token more, by preempting requests that came later and have nothing in flight."""
        while not self._kv.room(request):
            victim = None if draft.admitted else draft.next_victim(self._running.values(), request)
            if victim is None:
                return False
            self._preempt(draft, victim)
        return True

    def _preempt(self, draft: Draft, victim: Request) -> None:
        self._requeue(victim)
        draft.preempted.append(victim)

    def _requeue(self, request: Request) -> None:
        """Take a running request's blocks away, and let it wait in its old place."""
        del self._running[request.arrival_order]
        self._kv.release(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(request)

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

    def _drain(self, request: Request) -> None:
        if not request.num_steps_in_flight and self._draining.pop(request.arrival_order, None) is not None:
            self._kv.release(request)
