"""What the engine shows of itself: counters, recent latencies and rates, one row a request.

Times come from the caller, in seconds of one monotonic clock. Knows nothing of torch or threads; the
engine guards it with its own lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

RequestState = Literal["queued", "prefill", "decode", "preempted"]

RECENT = 256
"""Latencies kept for percentiles."""
RATE_WINDOW_S = 2.0
"""Rates are averaged over this much of the recent past."""


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One live request. Token counts; rates in tokens a second."""

    request_id: int
    state: RequestState
    prompt_tokens: int
    prefill_done: int
    """Of the tokens to prefill (after a preemption these include generated ones)."""
    prefill_total: int
    context_tokens: int
    generated_tokens: int
    cached_tokens: int
    preemptions: int
    blocks: int
    ttft_s: float | None
    decode_tok_s: float | None


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A step that takes very long."""

    seconds: float
    """Taken so far."""
    what: str
    """What it does, in a few words."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counters run from the engine's start; ``ttft_s`` and ``itl_s`` hold recent values."""

    blocks_total: int
    blocks_used: int
    blocks_cached: int
    """Free blocks whose contents can still be reused."""
    running: int
    waiting: int
    preemptions: int
    prefix_query_tokens: int
    """Of the prompts started so far."""
    prefix_hit_tokens: int
    """Of those, what the prefix cache had."""
    prompt_tokens: int
    """Computed by prefills: prompts less what was cached, and again whatever a preemption made anew."""
    generation_tokens: int
    ttft_s: tuple[float, ...]
    """From submission to the first token."""
    itl_s: tuple[float, ...]
    """From one token of a request to its next."""
    decode_tok_s: float
    """Of all requests together, while there was work; 0 when idle. So is the next."""
    prefill_tok_s: float
    steps: int
    requests: tuple[RequestRow, ...]
    """All that run, and of those that wait the oldest ones."""
    slow_step: SlowStep | None = None
    """The step in progress, if it takes suspiciously long."""


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Who holds each KV block, for drawing. One entry a block, by block id."""

    owner: tuple[int, ...]
    """A request id (the lowest of several), ``FREE`` or ``CACHED``."""
    shared: frozenset[int]
    """Ids of blocks held by more than one request."""


FREE = -1
CACHED = -2


class RateMeter:
    """Tokens per second over a sliding window, fed with (start, end, tokens)."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float, int]] = deque()
        self._tokens = 0

    def add(self, start_s: float, end_s: float, tokens: int) -> None:
        """``tokens`` were produced between two times."""
        self._samples.append((start_s, end_s, tokens))
        self._tokens += tokens
        self._drop(end_s)

    def rate(self, now_s: float) -> float:
        """Tokens a second while there was work, over the window that ends now; 0 when idle."""
        self._drop(now_s)
        busy = sum(end - start for start, end, _ in self._samples)
        return self._tokens / busy if busy > 0 else 0.0

    def _drop(self, now_s: float) -> None:
        while self._samples and self._samples[0][1] < now_s - self._window_s:
            self._tokens -= self._samples.popleft()[2]
