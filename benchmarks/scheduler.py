"""What planning costs: plan() and commit() of a step, against requests, context length and cached blocks.

    python -m benchmarks.scheduler                 # about a minute
    python -m benchmarks.scheduler --json results.json

No model and no torch. Each figure is the median over many steps; of ``--repeats`` such medians the lowest is
shown, because other programs on the machine can only make it slower.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.machine import describe_machine
from nanochat.engine.block_pool import BlockKey, BlockPool
from nanochat.engine.config import SamplingParams
from nanochat.engine.request import Request
from nanochat.engine.scheduler import Scheduler

BLOCK_SIZE = 16
STEPS = 200
LOOKUP_TOKENS = 32_768


def random_prompt(length: int) -> list[int]:
    return random.choices(range(30_000), k=length)


def decode_step(num_requests: int, context: int, cached_blocks: int = 0) -> dict[str, float]:
    """Median microseconds of a step in which ``num_requests`` decode at about ``context`` tokens each.

    ``steady``: every 16th request fills a block and takes a new one in each step. ``no_new_block``: all
    are as far into their last block, so that most steps add and index none.
    """
    return {
        "steady": statistics.median(decode_times(num_requests, context, cached_blocks, stagger=True)),
        "no_new_block": statistics.median(decode_times(num_requests, context, cached_blocks, stagger=False)),
    }


def decode_times(num_requests: int, context: int, cached_blocks: int, *, stagger: bool) -> list[float]:
    longest = context + 2 * STEPS
    used_blocks = num_requests * (longest // BLOCK_SIZE + 1)
    pool = BlockPool(used_blocks + cached_blocks, BLOCK_SIZE)
    fill_cache(pool, cached_blocks)
    scheduler = Scheduler(
        pool,
        max_num_seqs=num_requests,
        max_num_batched_tokens=16_384,
        max_model_len=longest,
        watermark=0,
    )
    params = SamplingParams(max_tokens=longest, ignore_eos=True)
    for number in range(num_requests):
        length = context + number % BLOCK_SIZE if stagger else context
        scheduler.add(Request(number, random_prompt(length), params))
    times: list[float] = []
    while len(times) < STEPS:
        start = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        token_ids = [7] * len(plan.sampling)
        committing = time.perf_counter()
        scheduler.commit(plan, token_ids, 0.0)
        if len(plan.decodes) == num_requests:
            times.append((planned - start + time.perf_counter() - committing) * 1e6)
    return times


def fill_cache(pool: BlockPool, num_blocks: int) -> None:
    """Leave so many free blocks in the prefix index."""
    keys: list[BlockKey] = []
    pool.extend_keys(keys, random_prompt(num_blocks * BLOCK_SIZE), num_blocks)
    table = pool.allocate(num_blocks)
    pool.index(table, keys, 0, num_blocks)
    pool.release(table)


def admission(cached_blocks: int) -> float:
    """Median microseconds of the step that starts a 256-token prompt, and evicts to do so."""
    pool = BlockPool(cached_blocks, BLOCK_SIZE)
    fill_cache(pool, cached_blocks)
    scheduler = Scheduler(pool, max_num_seqs=4, max_num_batched_tokens=512, max_model_len=1_000, watermark=0)
    spent = []
    for number in range(STEPS):
        scheduler.add(Request(number, random_prompt(256), SamplingParams(max_tokens=1)))
        start = time.perf_counter()
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, [7], 0.0)
        spent.append((time.perf_counter() - start) * 1e6)
    return statistics.median(spent)


def prefix_lookup() -> dict[str, float]:
    """Milliseconds to find a prompt of 32k tokens in the cache: the first time, and again."""
    num_blocks = LOOKUP_TOKENS // BLOCK_SIZE
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    random.seed(0)
    fill_cache(pool, num_blocks)
    first: list[float] = []
    again: list[float] = []
    for _ in range(20):
        random.seed(0)
        token_ids = random_prompt(LOOKUP_TOKENS)
        keys: list[BlockKey] = []
        for times in (first, again):
            start = time.perf_counter()
            pool.extend_keys(keys, token_ids, num_blocks)
            hits = pool.lookup(keys, num_blocks)
            times.append((time.perf_counter() - start) * 1e3)
            if len(hits) != num_blocks:
                raise RuntimeError("the prompt was not found whole")
    return {"first": statistics.median(first), "again": statistics.median(again)}


def lowest(measure: Callable[[], dict[str, float]], repeats: int) -> dict[str, float]:
    runs = [measure() for _ in range(repeats)]
    return {name: round(min(run[name] for run in runs), 2) for name in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}

    def report(name: str, unit: str, measure: Callable[[], dict[str, float]]) -> None:
        results[name] = lowest(measure, args.repeats)
        figures = "  ".join(
            f"{key.replace('_', ' ')} {value:,.1f} {unit}" for key, value in results[name].items()
        )
        print(f"{name:<46} {figures}", flush=True)

    for requests in (1, 64, 512):
        report(f"decode step, {requests} requests", "µs", lambda n=requests: decode_step(n, 256))
    for context in (256, 2_048, 16_384):
        report(f"decode step, 64 requests at {context:,} tokens", "µs", lambda n=context: decode_step(64, n))
    for blocks in (1_000, 10_000, 100_000):
        report(
            f"decode step, 64 requests, {blocks:,} cached blocks",
            "µs",
            lambda n=blocks: decode_step(64, 256, n),
        )
    for blocks in (1_000, 10_000, 100_000):
        report(
            f"start of a 256-token prompt, {blocks:,} cached", "µs", lambda n=blocks: {"all": admission(n)}
        )
    report("prefix lookup, 32,768 tokens", "ms", prefix_lookup)
    if args.json:
        args.json.write_text(
            json.dumps({**describe_machine(device="cpu"), "results": results}, indent=2) + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
