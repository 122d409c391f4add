"""The figures under vLLM's names, read as Prometheus reads them."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from nanochat.server.metrics import TTFT_BUCKETS
from tests.engine.conftest import wait_until
from tests.server.conftest import MakeServer, Running

HI: list[Any] = [{"role": "user", "content": "A question of some length, longer than a block"}]


def read(api: Running) -> dict[tuple[str, str], float]:
    """Values by name and by what tells samples of a name apart, besides the model."""
    reply = httpx2.get(f"{api.url}/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == api.model
            others = sample.labels.get("le") or sample.labels.get("finished_reason") or ""
            values[sample.name, others] = sample.value
    return values


def test_after_some_requests(make_server: MakeServer) -> None:
    api = make_server(num_kv_blocks=64)
    client = api.client()
    for _ in range(2):
        answer = client.chat.completions.create(
            model=api.model, messages=HI, max_tokens=5, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
    values = read(api)
    prompt = answer.usage.prompt_tokens
    cached = answer.usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr]
    assert values["vllm:num_requests_running", ""] == values["vllm:num_requests_waiting", ""] == 0
    assert values["vllm:kv_cache_usage_perc", ""] == values["vllm:num_preemptions_total", ""] == 0
    assert values["vllm:prefix_cache_queries_total", ""] == 2 * prompt
    assert values["vllm:prefix_cache_hits_total", ""] == cached > 0
    assert values["vllm:prompt_tokens_total", ""] == 2 * prompt
    assert values["vllm:generation_tokens_total", ""] == 10
    assert values["vllm:request_success_total", "length"] == 2
    assert values["vllm:request_success_total", "abort"] == 0
    assert values["vllm:time_to_first_token_seconds_count", ""] == 2
    assert 0 < values["vllm:time_to_first_token_seconds_sum", ""] < 20
    assert values["vllm:time_to_first_token_seconds_bucket", str(TTFT_BUCKETS[-1])] == 2
    assert values["vllm:inter_token_latency_seconds_count", ""] == 8
    assert values["vllm:e2e_request_latency_seconds_count", ""] == 2


@pytest.mark.parametrize("n", [1, 3])
def test_while_one_runs_and_once_its_client_has_gone(
    make_server: MakeServer, long_llama: Any, n: int
) -> None:
    api = make_server(long_llama, num_kv_blocks=2_000)
    body = {
        "model": api.model,
        "messages": HI,
        "stream": True,
        "ignore_eos": True,
        "max_tokens": 20_000,
        "n": n,
    }
    with httpx2.stream("POST", f"{api.url}/v1/chat/completions", json=body) as reply:
        lines = reply.iter_lines()
        assert next(lines)
        wait_until(lambda: api.engine.stats().running == n)
        values = read(api)
        assert values["vllm:num_requests_running", ""] == n
        assert 0 < values["vllm:kv_cache_usage_perc", ""] < 1
    wait_until(lambda: not api.engine.stats().requests)
    wait_until(lambda: read(api)["vllm:request_success_total", "abort"] == n)


def test_nothing_is_global(make_server: MakeServer) -> None:
    first, second = make_server(), make_server()
    first.client().completions.create(model=first.model, prompt="a", max_tokens=3)
    assert read(first)["vllm:prompt_tokens_total", ""] > 0
    assert read(second)["vllm:prompt_tokens_total", ""] == 0
    assert not [family for family in REGISTRY.collect() if family.name.startswith("vllm:")]
