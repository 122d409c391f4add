"""From a server's pages over time to the panel's figures; and what can be measured at this end. Any thread."""

from __future__ import annotations

import threading
from collections import deque

from nanochat.backend.remote.metrics import Histogram, Page
from nanochat.backend.stats import BackendStats, percentile, share

RATE_WINDOW_S = 3.0
"""Rates are averaged over this much of the recent past."""
TTFT_WINDOW_S = 60.0
RECENT = 256
"""Times to first token that are kept."""
STALE_S = 5.0
"""Figures older than this are not shown."""
_COUNTERS = ("prompt_tokens", "generation_tokens", "preemptions", "hits", "queries")


class Monitor:
    """What the server tells of itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: deque[tuple[float, Page]] = deque()
        self._means: deque[float] = deque(maxlen=RECENT)
        self._ttft: Histogram | None = None
        """Of the newest minute in which there were any requests."""

    def feed(self, page: Page, now_s: float) -> None:
        """A page was read."""
        with self._lock:
            if self._pages and _has_restarted(self._pages[-1][1], page):
                self._pages.clear()
            if self._pages:
                self._note_mean(self._pages[-1][1], page)
            self._pages.append((now_s, page))
            while self._pages[0][0] < now_s - TTFT_WINDOW_S:
                self._pages.popleft()
            if page.ttft is not None:
                oldest = self._pages[0][1].ttft
                recent = page.ttft.since(oldest) if oldest is not None else page.ttft
                if recent.count > 0 or self._ttft is None:
                    self._ttft = recent if recent.count > 0 else page.ttft

    def figures(self, now_s: float) -> BackendStats | None:
        """As of the newest page; None if there is none, or it is old."""
        with self._lock:
            if not self._pages or self._pages[-1][0] < now_s - STALE_S:
                return None
            page = self._pages[-1][1]
            told = page.figures
            used, total, unit = _kv_counts(page)
            hits, queries = told.get("hits"), told.get("queries")
            hit_share = share(hits, queries) if hits is not None and queries is not None else None
            return BackendStats(
                running=_whole(told.get("running")),
                waiting=_whole(told.get("waiting")),
                kv_used=used,
                kv_total=total,
                kv_unit=unit,
                kv_share=told.get("kv_share"),
                hit_share=told.get("hit_share") if hit_share is None else hit_share,
                preemptions=_whole(told.get("preemptions")),
                ttft_p50_s=self._ttft.quantile(0.5) if self._ttft is not None else None,
                ttft_p95_s=self._ttft.quantile(0.95) if self._ttft is not None else None,
                ttft_s=tuple(self._means),
                decode_tok_s=self._rate("generation_tokens", "decode_tok_s"),
                prefill_tok_s=self._rate("prompt_tokens", "prefill_tok_s"),
            )

    def _rate(self, counter: str, gauge: str) -> float | None:
        """From the counter's growth; from the server's own gauge as long as that isn't known."""
        newest_s, newest = self._pages[-1]
        for then_s, page in self._pages:
            if newest_s - RATE_WINDOW_S - 0.5 <= then_s < newest_s:
                if counter in page.figures and counter in newest.figures:
                    return (newest.figures[counter] - page.figures[counter]) / (newest_s - then_s)
                break
        return newest.figures.get(gauge)

    def _note_mean(self, before: Page, page: Page) -> None:
        if before.ttft is not None and page.ttft is not None:
            new = page.ttft.since(before.ttft)
            if new.count > 0:
                self._means.append(new.total_s / new.count)


def _has_restarted(before: Page, after: Page) -> bool:
    return any(after.figures.get(name, 0.0) < before.figures.get(name, 0.0) for name in _COUNTERS)


def _kv_counts(page: Page) -> tuple[int | None, int | None, str]:
    """Used and all, and of what."""
    told = page.figures
    if page.num_blocks is not None and "kv_share" in told:
        return round(told["kv_share"] * page.num_blocks), page.num_blocks, "blocks"
    if "used_tokens" in told and "total_tokens" in told:
        return round(told["used_tokens"]), round(told["total_tokens"]), "tokens"
    return None, None, "blocks"


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


class OwnFigures:
    """What is measured of our own answers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: deque[tuple[float, int]] = deque()
        self._ttft: deque[float] = deque(maxlen=RECENT)

    def tokens(self, number: int, now_s: float) -> None:
        """So many tokens have come."""
        with self._lock:
            self._tokens.append((now_s, number))
            self._forget(now_s)

    def first_token(self, after_s: float) -> None:
        """An answer has begun, so long after it was asked for."""
        with self._lock:
            self._ttft.append(after_s)

    def figures(self, now_s: float) -> BackendStats:
        """Times and rates only."""
        with self._lock:
            self._forget(now_s)
            ttft = tuple(self._ttft)
            rate = 0.0
            if self._tokens:
                window_s = max(0.5, min(RATE_WINDOW_S, now_s - self._tokens[0][0]))
                rate = sum(number for _, number in self._tokens) / window_s
        return BackendStats(
            ttft_p50_s=percentile(ttft, 0.5),
            ttft_p95_s=percentile(ttft, 0.95),
            ttft_s=ttft,
            decode_tok_s=rate,
        )

    def _forget(self, now_s: float) -> None:
        while self._tokens and self._tokens[0][0] < now_s - RATE_WINDOW_S:
            self._tokens.popleft()
