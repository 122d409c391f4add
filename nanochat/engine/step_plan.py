"""What one step computes, as the scheduler plans it and the runner executes it.

Knows nothing of torch, blocks or policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from nanochat.engine.request import Request
from nanochat.engine.wait_queue import by_arrival


class ScheduledChunk(NamedTuple):
    """Tokens ``start`` to ``start + length`` of a request; ``samples``: its last row gives the next token.

    A tuple rather than a frozen dataclass: every row of every step makes one, at less than half the cost.
    """

    request: Request
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. A request appears in it at most once."""

    step: int
    decodes: tuple[ScheduledChunk, ...]
    """One token each, and each samples. The id of that token may still be pending."""
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
class Draft:
    """A plan in the making, and what is left to give out."""

    step: int
    now: float
    budget: int
    """Tokens not given out yet."""
    promised_blocks: int = 0
    """Blocks that running requests lack for the rest of their prefill."""
    unfinished: list[Request] = field(default_factory=list)
    """Requests that were prefilling when the step began."""
    decodes: list[ScheduledChunk] = field(default_factory=list)
    prefills: list[ScheduledChunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    victims: list[Request] | None = None
    """Requests that might be preempted, most recent last, from the first time that memory was short."""
    admitted: bool = False
    """Whether a request has been started: then nobody is preempted in this step."""
    short_of_memory: bool = False
    """Whether one couldn't be started for lack of blocks: then no further one is tried."""

    def reserve(self, share: float, oldest: Request) -> int:
        """Set a share of the budget aside for ``oldest``; of a budget too small to divide, every other turn."""
        got_nothing_last_step = oldest.last_step < self.step - 1
        tokens = int(self.budget * share) or int(got_nothing_last_step)
        self.budget -= tokens
        return tokens

    def schedule_prefill(self, request: Request, length: int) -> None:
        """Add a request's next ``length`` tokens, whose blocks it holds."""
        start = request.num_computed_tokens
        samples = start + length == request.num_tokens
        request.num_computed_tokens = start + length
        request.num_pending_tokens += samples
        request.num_steps_in_flight += 1
        request.last_step = self.step
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self.now
        self.budget -= length
        self.prefills.append(ScheduledChunk(request, start, length, samples))

    def schedule_decode(self, request: Request, start: int) -> None:
        """The same for the one token, at ``start``, of a request that decodes: most of what planning costs."""
        request.num_computed_tokens = start + 1
        request.num_pending_tokens += 1
        request.num_steps_in_flight += 1
        request.last_step = self.step
        self.budget -= 1
        self.decodes.append(ScheduledChunk(request, start, 1, True))

    def next_victim(self, running: Iterable[Request], beneficiary: Request) -> Request | None:
        """The most recent request with nothing in flight, if it came after ``beneficiary``; each only once."""
        if self.victims is None:
            self.victims = sorted(running, key=by_arrival)
        while self.victims and self.victims[-1].num_steps_in_flight:
            self.victims.pop()
        if not self.victims or self.victims[-1].arrival_order <= beneficiary.arrival_order:
            return None
        return self.victims.pop()

    def finish(self) -> StepPlan:
        return StepPlan(self.step, tuple(self.decodes), tuple(self.prefills), tuple(self.preempted))


def writes_shared_block(prefills: Iterable[ScheduledChunk], request: Request, block_size: int) -> bool:
    """Whether one of these chunks begins in a block that ``request`` will want too, prefix and all."""
    keys = request.block_keys
    for chunk in prefills:
        block, others = chunk.start // block_size, chunk.request.block_keys
        if block < min(len(keys), len(others)) and keys[block] == others[block]:
            return True
    return False
