"""One request as the scheduler sees it: tokens, blocks, progress. Knows nothing of torch or text."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from nanochat.engine.block_pool import BlockKey
from nanochat.engine.config import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestStatus(Enum):
    WAITING = "waiting"
    """Not admitted yet, or preempted: its block table is empty."""
    RUNNING = "running"
    """Holds blocks; prefilling or decoding."""
    FINISHED = "finished"
    """Will not be planned again; its blocks go back once no step in flight uses them."""


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of one request. Only the scheduler changes it, and only on the step thread.

    Lengths are in tokens. ``num_computed_tokens`` counts tokens whose K/V is written or is being
    written by a planned step, so it runs ahead of what has been collected while steps are in flight.
    """

    request_id: int
    token_ids: list[int]
    """Prompt, then every generated token that has been collected."""
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    sampling_seed: int = 0
    """64 bits that, with a position, decide every random choice of this request."""
    arrival_s: float = 0.0

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    block_table: list[int] = field(default_factory=list)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_written_tokens: int = 0
    """Tokens whose K/V collected steps have written without a gap: full blocks below it are indexed."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when first admitted (what the user is told)."""
    num_pending_tokens: int = 0
    """Tokens sampled by steps in flight: they exist, but their ids aren't known here yet."""
    num_steps_in_flight: int = 0
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    max_total_tokens: int = 0
    """Prompt plus answer can't become longer than this. Set when the request is queued."""
    arrival_order: int = 0
    """Seniority: lower came earlier. Set when the request is queued, kept for life."""
    last_step: int = 0
    """The step that last planned it, or the last step before it was queued."""
    uncached_tokens: int = 0
    """Tokens it must compute before it samples, as the prefix cache stood when it was last queued."""
    block_keys: list[BlockKey] = field(default_factory=list, repr=False)
    """Prefix-cache keys of its full blocks, as far as they have been needed."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens plus those that steps in flight will bring."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Generated tokens that have been collected."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens it must compute before it samples; an estimate while it waits."""
        if self.status is RequestStatus.WAITING:
            return self.uncached_tokens
        return self.num_tokens - self.num_computed_tokens
