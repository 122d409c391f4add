"""Reads one Prometheus page of a server: vLLM's names, which nanochat's own server has too, or SGLang's.

Where they are documented: https://docs.vllm.ai/en/latest/design/metrics/ and
https://docs.sglang.io/references/production_metrics.html. Names have changed over time; the first that is
there counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

SUMS: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "preemptions": (
        "vllm:num_preemptions_total",
        "vllm:num_preemptions",
        "sglang:num_retracted_requests_total",
    ),
    "hits": (
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_hits",
        "vllm:gpu_prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits",
    ),
    "queries": (
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_queries",
        "vllm:gpu_prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries",
    ),
    "prompt_tokens": ("vllm:prompt_tokens_total", "vllm:prompt_tokens", "sglang:prompt_tokens_total"),
    "generation_tokens": (
        "vllm:generation_tokens_total",
        "vllm:generation_tokens",
        "sglang:generation_tokens_total",
    ),
    "decode_tok_s": ("sglang:gen_throughput", "vllm:avg_generation_throughput_toks_per_s"),
    "prefill_tok_s": ("vllm:avg_prompt_throughput_toks_per_s",),
    "used_tokens": ("sglang:num_used_tokens",),
    "total_tokens": ("sglang:max_total_num_tokens",),
}
"""What is added up over several engines behind one address."""
MEANS: Mapping[str, tuple[str, ...]] = {
    "kv_share": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "hit_share": ("sglang:cache_hit_rate", "vllm:gpu_prefix_cache_hit_rate"),
}
"""Shares, 0 to 1."""
TTFT = ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds")
CACHE_CONFIG = "vllm:cache_config_info"
"""Tells the number of blocks in its labels."""
_RANKS = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
"""Labels of processes that do the same work together, and all count it."""
_READ = tuple(name for names in (*SUMS.values(), *MEANS.values(), TTFT, (CACHE_CONFIG,)) for name in names)
MAX_LINES = 5_000
"""Of those that are read: some of each engine behind the address. More would hold up answers that stream."""
_LARGEST = 2.0**53
"""No figure is larger: sums of some that were would be infinite, which no count can be."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Requests by time. A bucket counts those that took at most its bound, in seconds."""

    buckets: tuple[tuple[float, float], ...]
    """(bound, count), rising; the last bound is infinite."""
    total_s: float

    @property
    def count(self) -> float:
        return self.buckets[-1][1] if self.buckets else 0.0

    def since(self, before: Histogram) -> Histogram:
        """What has been added since an earlier page."""
        counts = dict(before.buckets)
        buckets = tuple((bound, max(0.0, count - counts.get(bound, 0.0))) for bound, count in self.buckets)
        return Histogram(buckets, max(0.0, self.total_s - before.total_s))

    def quantile(self, fraction: float) -> float | None:
        """An estimate in seconds, linear within a bucket as Prometheus has it; None without requests."""
        rank = fraction * self.count
        if self.count <= 0:
            return None
        low = below = 0.0
        for bound, count in self.buckets:
            if count >= rank and count > below:
                if math.isinf(bound):
                    return low
                return low + (bound - low) * (rank - below) / (count - below)
            low, below = bound, count
        return low


@dataclass(frozen=True, slots=True)
class Page:
    """What a page tells; a figure that isn't on it is not in ``figures``."""

    figures: Mapping[str, float]
    """By the names of ``SUMS`` and ``MEANS``."""
    num_blocks: int | None = None
    ttft: Histogram | None = None


@dataclass(slots=True)
class _Samples:
    by_name: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))

    def first(self, names: Iterable[str], ending: str = "") -> list[Sample]:
        return next((self.by_name[name + ending] for name in names if name + ending in self.by_name), [])


def read_page(text: str, model: str = "") -> Page | None:
    """What the page tells about a model, all engines that run it together; None if it is no such page.

    Args:
        model: as the page calls it; where it names others only, all of them count.
    """
    samples = _read(text, model)
    figures = {name: sum(values) for name, names in SUMS.items() if (values := _values(samples.first(names)))}
    for name, names in MEANS.items():
        if values := _values(samples.first(names)):
            figures[name] = min(1.0, sum(values) / len(values))
    page = Page(figures, _num_blocks(samples.by_name.get(CACHE_CONFIG, [])), _histogram(samples))
    return None if page == Page({}) else page


def _read(text: str, model: str) -> _Samples:
    # Most of a page is about other things, and reading it takes time that the screen could use.
    wanted = (f"{line}\n" for line in text.split("\n") if line.startswith(_READ))
    lines = "".join(islice(wanted, MAX_LINES))
    found = _Samples()
    try:
        all_samples = [
            sample for family in text_string_to_metric_families(lines) for sample in family.samples
        ]
    except (ValueError, KeyError, IndexError):
        return found
    ours = [sample for sample in all_samples if sample.labels.get("model_name", model) == model]
    if not any("model_name" in sample.labels for sample in ours):
        ours = all_samples  # it is called otherwise there
    for sample in ours:
        is_part = bool(sample.labels.get("priority"))  # beside the same for all priorities
        if 0 <= sample.value <= _LARGEST and not is_part:  # false for NaN
            found.by_name[sample.name].append(sample)
    return found


def _values(samples: Iterable[Sample]) -> list[float]:
    """One value for each group of ranks: they tell the same, or only one of them knows."""
    groups: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in samples:
        key = tuple(sorted(item for item in sample.labels.items() if item[0] not in _RANKS))
        groups[key] = max(groups.get(key, 0.0), sample.value)
    return list(groups.values())


def _num_blocks(samples: Iterable[Sample]) -> int | None:
    numbers = [sample.labels.get("num_gpu_blocks", "") for sample in samples]
    known = [int(number) for number in numbers if number.isdecimal() and len(number) < 12]
    return sum(known) or None


def _histogram(samples: _Samples) -> Histogram | None:
    by_bound: dict[float, list[Sample]] = defaultdict(list)
    for sample in samples.first(TTFT, "_bucket"):
        try:
            bound = float(sample.labels.get("le", ""))
        except ValueError:
            continue
        if bound >= 0:  # false for NaN, which has no place in an order
            by_bound[bound if bound <= _LARGEST else math.inf].append(sample)
    if not by_bound:
        return None
    buckets = tuple((bound, sum(_values(by_bound[bound]))) for bound in sorted(by_bound))
    return Histogram(buckets, sum(_values(samples.first(TTFT, "_sum"))))
