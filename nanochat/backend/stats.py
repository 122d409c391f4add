"""What a backend shows of itself. A figure that it doesn't tell is None, and shown as a dash."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from nanochat.engine.stats import EngineStats, RequestRow, SlowStep


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStats:
    """A snapshot. Of a server that others use too, all their requests count, but for ``requests``."""

    running: int | None = None
    waiting: int | None = None
    kv_used: int | None = None
    kv_total: int | None = None
    kv_unit: str = "blocks"
    """What the two above count."""
    kv_share: float | None = None
    """Used part of the KV cache, 0 to 1."""
    hit_share: float | None = None
    """Part of the prompts' tokens that the prefix cache had, 0 to 1."""
    preemptions: int | None = None
    ttft_p50_s: float | None = None
    """From submission to the first token, of recent requests."""
    ttft_p95_s: float | None = None
    ttft_s: tuple[float, ...] = ()
    """Recent values, or means of recent seconds, for drawing."""
    decode_tok_s: float | None = None
    """Of all requests together; 0 when idle. So is the next."""
    prefill_tok_s: float | None = None
    requests: tuple[RequestRow, ...] = ()
    """This process's own."""
    slow_step: SlowStep | None = None
    """The step in progress, if it takes suspiciously long."""
    source: str = ""
    """Whose figures these are, where that isn't plain."""

    @classmethod
    def of_engine(cls, stats: EngineStats) -> Self:
        """The same of an engine in this process, which tells all."""
        return cls(
            running=stats.running,
            waiting=stats.waiting,
            kv_used=stats.blocks_used,
            kv_total=stats.blocks_total,
            kv_share=share(stats.blocks_used, stats.blocks_total),
            hit_share=share(stats.prefix_hit_tokens, stats.prefix_query_tokens),
            preemptions=stats.preemptions,
            ttft_p50_s=percentile(stats.ttft_s, 0.5),
            ttft_p95_s=percentile(stats.ttft_s, 0.95),
            ttft_s=stats.ttft_s,
            decode_tok_s=stats.decode_tok_s,
            prefill_tok_s=stats.prefill_tok_s,
            requests=stats.requests,
            slow_step=stats.slow_step,
        )


def share(part: float, whole: float) -> float | None:
    """Part of a whole, 0 to 1; None when there is no whole."""
    return part / whole if whole else None


def percentile(values: Sequence[float], fraction: float) -> float | None:
    """Nearest-rank percentile; ``fraction`` 0.95 is the 95th. None when there are no values."""
    if not values:
        return None
    rank = math.ceil(fraction * len(values)) - 1
    return sorted(values)[max(0, rank)]
