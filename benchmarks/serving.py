"""Many clients of ``nanochat serve`` at once, through the official client: are all answers right, how soon do they come?

Starts the server, lets so many streaming chats ask at the same moment, and compares each answer with what the engine
gives to the same question alone. Then as many ask again and leave in mid-answer; all blocks must be free after that.

    python -m benchmarks.serving                                   # the default model, 100 chats
    python -m benchmarks.serving --chats 500 --no-check --json serving.json

The options after ``--`` go to the server. Float32 by default: in 16 bits an answer may depend on who else is served.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai

from benchmarks.machine import describe_machine
from nanochat import Engine, EngineConfig, SamplingParams

SUBJECTS = ("rivers", "bread", "the moon", "trains", "chess", "honey", "glass", "wolves", "salt", "bridges")
TASKS = ("Name three facts about", "Explain to a child", "Write a short poem about", "Why do people like")
SPREAD_S = 1.0
"""Clients that leave do so within this time of their first token."""


@dataclass
class Asked:
    """One chat, as its client saw it."""

    text: str = ""
    finish_reason: str | None = None
    ttft_s: float | None = None
    token_times: list[float] = field(default_factory=list)
    error: str | None = None


def questions(count: int, seed: int = 0) -> list[str]:
    """Different ones, some of them with the same beginning."""
    rng = random.Random(seed)
    return [f"{rng.choice(TASKS)} {rng.choice(SUBJECTS)}. It is question {index}." for index in range(count)]


def answered_alone(config: EngineConfig, texts: Sequence[str], params: SamplingParams) -> list[str]:
    """What the engine gives to each question when it has nothing else to do."""
    with Engine(config) as engine:
        return [engine.submit([{"role": "user", "content": text}], params).result().text for text in texts]


@contextmanager
def running_server(options: Sequence[str]) -> Iterator[str]:
    """The address of a server; it must end well."""
    command = [sys.executable, "-m", "nanochat", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line.startswith("Serving "):
                raise RuntimeError(f"the server didn't start: {line}")
            yield line.split(" at ")[1].split()[0].removesuffix("/v1")
            process.send_signal(signal.SIGTERM)
            if process.wait(30) != 0:
                raise RuntimeError(f"the server ended with status {process.returncode}")
        finally:
            process.kill()


async def ask(client: openai.AsyncOpenAI, model: str, text: str, options: dict[str, Any]) -> Asked:
    """One streaming chat."""
    asked, started_s = Asked(), time.perf_counter()
    try:
        stream = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": text}], stream=True, **options
        )
        async for chunk in stream:
            asked.finish_reason = chunk.choices[0].finish_reason or asked.finish_reason
            if chunk.choices[0].delta.content:
                asked.text += chunk.choices[0].delta.content
                asked.token_times.append(time.perf_counter() - started_s)
    except openai.OpenAIError as error:
        asked.error = str(error)
    asked.ttft_s = asked.token_times[0] if asked.token_times else None
    return asked


async def leave(client: openai.AsyncOpenAI, model: str, text: str, after_s: float) -> None:
    """A chat whose client goes away in mid-answer."""
    stream = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], stream=True, max_tokens=4_000
    )
    async for _ in stream:
        break
    await asyncio.sleep(after_s)
    await stream.close()


async def measure(
    url: str, texts: Sequence[str], options: dict[str, Any]
) -> tuple[list[Asked], dict[str, Any]]:
    """All chats at once; then as many that leave."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(limits=limits, timeout=600),
    ) as client:
        model = (await client.models.list()).data[0].id
        await ask(client, model, "Hi", options)  # first calls cost more
        started_s = time.perf_counter()
        asked = await asyncio.gather(*(ask(client, model, text, options) for text in texts))
        took_s = time.perf_counter() - started_s
        rng = random.Random(1)
        await asyncio.gather(*(leave(client, model, text, rng.random() * SPREAD_S) for text in texts))
        left_s = time.perf_counter()
        while _figure(url, "num_requests_running") + _figure(url, "num_requests_waiting"):
            await asyncio.sleep(0.005)
        freed_s = time.perf_counter() - left_s
        blocks = _figure(url, "kv_cache_usage_perc")
        step_s = _figure(url, "inter_token_latency_seconds_sum") / _figure(
            url, "inter_token_latency_seconds_count"
        )
    return asked, {
        "model": model,
        "took_s": took_s,
        "after_all_left": {"seconds_until_idle": freed_s, "mean_step_s": step_s, "blocks_in_use": blocks},
    }


def _figure(url: str, name: str) -> float:
    for line in httpx2.get(f"{url}/metrics", timeout=30).text.splitlines():
        if line.startswith(f"vllm:{name}{{"):
            return float(line.rpartition(" ")[2])
    raise RuntimeError(f"the server has no {name}")


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, p95 and p99, in milliseconds."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50_ms": cuts[49] * 1e3, "p95_ms": cuts[94] * 1e3, "p99_ms": cuts[98] * 1e3}


def summarize(asked: Sequence[Asked], expected: Sequence[str] | None) -> dict[str, Any]:
    """How many are right, lost or otherwise, and how soon the tokens came."""
    gaps = [b - a for one in asked for a, b in zip(one.token_times, one.token_times[1:], strict=False)]
    return {
        "chats": len(asked),
        "finished": sum(one.finish_reason in ("stop", "length") for one in asked),
        "errors": sorted({one.error for one in asked if one.error is not None}),
        "differing": None
        if expected is None
        else sum(one.text != text for one, text in zip(asked, expected, strict=True)),
        "ttft": percentiles([one.ttft_s for one in asked if one.ttft_s is not None]),
        "gap_between_events": percentiles(gaps),
        "events": sum(len(one.token_times) for one in asked),
    }


def main() -> None:
    """Run it, and print or save the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=16, help="longest answer")
    parser.add_argument("--model", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--no-check", action="store_true", help="don't compare with the engine alone")
    parser.add_argument("--json", type=Path, help="where to save the report")
    parser.add_argument("server", nargs="*", help="further options of the server, after --")
    args = parser.parse_args()
    texts = questions(args.chats)
    expected = None
    if not args.no_check:
        config = EngineConfig(model=args.model, device=args.device, dtype=args.dtype)
        params = SamplingParams(temperature=0, max_tokens=args.tokens)
        expected = answered_alone(config, texts, params)
    options = ["--device", args.device, "--dtype", args.dtype, "--max-requests", str(max(256, args.chats))]
    if args.model:
        options += ["--model", args.model]
    with running_server([*options, *args.server]) as url:
        asked, about = asyncio.run(measure(url, texts, {"temperature": 0, "max_tokens": args.tokens}))
    report = {
        **describe_machine("openai", "uvicorn", "starlette", device=args.device),
        "options": {"dtype": args.dtype, "max_tokens": args.tokens, "server": args.server},
        **about,
        **summarize(asked, expected),
    }
    print(json.dumps(report, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
