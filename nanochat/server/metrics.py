"""``/metrics``: figures of the engine and of requests in Prometheus' text format, under vLLM's names.

So a dashboard made for vLLM reads them. Each server has a registry of its own; nothing is global.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nanochat.engine.engine import Engine

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
WHOLE_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
)
FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""The engine's and vLLM's."""


class ServerMetrics:
    """Counts what requests do, and asks the engine for its own figures when it is read. Event loop only."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EngineCollector(engine, model_name))
        labels = {"model_name": model_name}

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, help, list(labels), registry=self._registry, buckets=buckets)
            return made.labels(**labels)

        self.ttft_s = histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", TTFT_BUCKETS
        )
        self.itl_s = histogram(
            "vllm:inter_token_latency_seconds", "From one token of a request to its next.", ITL_BUCKETS
        )
        self.whole_s = histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to its end.", WHOLE_BUCKETS
        )
        self.queue_s = histogram(
            "vllm:request_queue_time_seconds", "From submission to the first step.", WHOLE_BUCKETS
        )
        self.prompt_tokens = Counter(
            "vllm:prompt_tokens",
            "Tokens of prompts whose answers have begun.",
            list(labels),
            registry=self._registry,
        ).labels(**labels)
        success = Counter(
            "vllm:request_success",
            "Requests that have ended, by reason.",
            [*labels, "finished_reason"],
            registry=self._registry,
        )
        self._ended = {
            reason: success.labels(**labels, finished_reason=name)
            for reason, name in FINISHED_REASONS.items()
        }

    def ended(self, reason: str) -> None:
        """A request has ended; the reason is the engine's."""
        self._ended[reason].inc()

    def page(self) -> bytes:
        """All of it, in the text format of version 0.0.4."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """The engine's own counters, as they stand when they are asked for."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        usage = stats.blocks_used / stats.blocks_total
        yield self._gauge("num_requests_running", "Requests in the running batch.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests that wait to be run.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", usage)
        yield self._counter("num_preemptions", "Times that a request was put back.", stats.preemptions)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_query_tokens
        )
        yield self._counter("prefix_cache_hits", "Of those, tokens found.", stats.prefix_hit_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generation_tokens)
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "What the KV cache is made of.",
            labels=["model_name", "block_size", "num_gpu_blocks", "cache_dtype"],
        )
        block_size, blocks = str(self._engine.config.block_size), str(stats.blocks_total)
        info.add_metric([self._model_name, block_size, blocks, self._engine.kv_dtype_name], 1)
        yield info

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
