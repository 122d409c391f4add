"""Long disorder: many requests in any order over few KV blocks, each of which must answer as if it were alone.

A random small model with 40 blocks on the CPU. Requests arrive in bursts, share prefixes, sample in every
way, stop at texts, are cancelled at any moment and preempt each other all the time. Every output is compared
with what the same request gives alone on an idle engine; at the end no block may be in use, and memory must
not have grown.

    python -m benchmarks.soak requests --count 100000 --json benchmarks/results/soak.json
    python -m benchmarks.soak threads --threads 64 --minutes 5
    python -m benchmarks.soak bridge --count 2000      # through the app, with tabs opened and closed
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import describe_machine
from benchmarks.random_model import SHAPES, write_random_model
from benchmarks.soak_bridge import run_bridge
from benchmarks.soak_cases import Sample, difference, slope
from nanochat import Engine, EngineConfig, SamplingParams
from nanochat.engine.handle import RequestHandle
from nanochat.engine.outputs import RequestOutput
from nanochat.errors import EngineClosed

NUM_BLOCKS = 40
BLOCK_SIZE = 16
MAX_OUTSTANDING = 24
VOCAB_SIZE = 256
"""Bytes: the tokens that the random model's tokenizer knows."""


@dataclass(frozen=True)
class Case:
    """A request that is sent many times."""

    prompt: list[int]
    params: SamplingParams


@dataclass
class Outstanding:
    case: int
    handle: RequestHandle
    cancel_after: int | None
    """Events until it is cancelled; None: never."""


@dataclass
class Tally:
    """What has been seen."""

    finished: int = 0
    cancelled: int = 0
    differing: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    rss_mib: list[Sample] = field(default_factory=list)


def make_cases(count: int, seed: int) -> list[Case]:
    """Requests of every kind, many of which begin like another."""
    rng = random.Random(seed)
    trunks = [_tokens(rng, rng.randint(8, 160)) for _ in range(max(1, count // 16))]
    return [Case(_prompt(rng, trunks), _params(rng)) for _ in range(count)]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def _prompt(rng: random.Random, trunks: list[list[int]]) -> list[int]:
    trunk = rng.choice(trunks)
    kept = rng.choice([0, len(trunk), rng.randint(1, len(trunk))])
    return trunk[:kept] + _tokens(rng, rng.randint(1, 80))


def _params(rng: random.Random) -> SamplingParams:
    options: dict[str, Any] = {"temperature": 0.0}
    if rng.random() < 0.6:
        options["temperature"] = rng.choice([0.3, 0.7, 1.0, 1.5])
        options |= rng.choice(
            [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.8}]
        )
    if rng.random() < 0.1:
        options["repetition_penalty"] = 1.2
    if rng.random() < 0.1:
        options["logprobs"] = rng.randint(1, 4)
    if rng.random() < 0.3:
        options["stop"] = tuple(chr(rng.randint(97, 122)) for _ in range(rng.randint(1, 3)))
    return SamplingParams(
        max_tokens=rng.choice([1, 2, rng.randint(3, 20), rng.randint(20, 60)]),
        seed=rng.getrandbits(31),
        ignore_eos=rng.random() < 0.2,
        **options,
    )


def make_engine(folder: Path, *, alone: bool = False) -> Engine:
    """The engine under test, or with ``alone`` one in which no request meets another."""
    return Engine(
        EngineConfig(
            model=str(folder),
            device="cpu",
            dtype="float32",
            block_size=BLOCK_SIZE,
            num_kv_blocks=NUM_BLOCKS,
            max_num_seqs=1 if alone else 16,
            max_num_batched_tokens=512 if alone else 96,
            prefix_caching=not alone,
        ),
        debug=True,
    )


def references(folder: Path, cases: list[Case]) -> list[RequestOutput]:
    """What each case gives alone."""
    with make_engine(folder, alone=True) as engine:
        return [engine.submit(case.prompt, case.params).result(60) for case in cases]


def soak(engine: Engine, cases: list[Case], expected: list[RequestOutput], count: int, seed: int) -> Tally:
    """Send ``count`` requests in bursts, never more than ``MAX_OUTSTANDING`` at once."""
    rng, tally, process = random.Random(seed), Tally(), psutil.Process()
    outstanding: list[Outstanding] = []
    sent = 0
    while sent < count or outstanding:
        room = min(MAX_OUTSTANDING - len(outstanding), count - sent, rng.choice([0, 0, 1, 2, 12]))
        for _ in range(room):
            case = rng.randrange(len(cases))
            cancel_after = rng.choice([0, 1, 2, 5]) if rng.random() < 0.15 else None
            handle = engine.submit(cases[case].prompt, cases[case].params)
            outstanding.append(Outstanding(case, handle, cancel_after))
            sent += 1
        outstanding = [one for one in outstanding if not _settle(one, expected, tally)]
        if len(tally.rss_mib) <= tally.finished * 200 // count:
            tally.rss_mib.append((tally.finished, process.memory_info().rss / 2**20))
            _show(tally, count)
        time.sleep(0.001)
    return tally


def _settle(one: Outstanding, expected: list[RequestOutput], tally: Tally) -> bool:
    """Cancel it when its time has come; True once it has ended and been compared."""
    done = one.handle.done
    events = len(one.handle.poll())
    if one.cancel_after is not None and one.cancel_after >= 0:
        one.cancel_after -= events
        if one.cancel_after <= 0:
            one.handle.cancel()
            one.cancel_after = -1
    if not done:
        return False
    output = one.handle.result(0)
    tally.finished += 1
    tally.cancelled += output.finish_reason == "cancelled"
    tally.reasons[output.finish_reason] += 1
    fault = difference(output, expected[one.case], one.cancel_after is not None)
    if fault is not None:
        tally.differing.append(f"case {one.case}: {fault}")
    return True


def _show(tally: Tally, count: int) -> None:
    if sys.stderr.isatty():
        print(
            f"\r{tally.finished:,} of {count:,}, {len(tally.differing)} differ, {tally.rss_mib[-1][1]:.0f} MiB ",
            end="",
            file=sys.stderr,
        )


def run_requests(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The soak, as a report."""
    cases = make_cases(options.cases, options.seed)
    expected = references(folder, cases)
    started = time.monotonic()
    with make_engine(folder) as engine:
        tally = soak(engine, cases, expected, options.count, options.seed)
        stats = engine.stats()
    growth, error = slope(tally.rss_mib)
    for line in tally.differing[:5]:
        print(line, file=sys.stderr)
    return {
        "requests": tally.finished,
        "differing": len(tally.differing),
        "finish_reasons": dict(tally.reasons),
        "preemptions": stats.preemptions,
        "prefix_hit_share": round(stats.prefix_hit_tokens / max(1, stats.prefix_query_tokens), 3),
        "steps": stats.steps,
        "blocks_in_use": stats.blocks_used,
        "rss_mib_over_time": [round(mib, 1) for _, mib in tally.rss_mib[:: max(1, len(tally.rss_mib) // 20)]],
        "rss_mib_first_and_last": [round(tally.rss_mib[0][1], 1), round(tally.rss_mib[-1][1], 1)],
        "rss_mib_per_10000_requests": round(growth, 3),
        "rss_standard_error": round(error, 3),
        "seconds": round(time.monotonic() - started, 1),
        "ok": not tally.differing and stats.blocks_used == 0,
    }


def run_threads(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Threads that submit, read and cancel through one engine, which is closed while they are at it."""
    cases = make_cases(options.cases, options.seed)
    engine, tally, lock, stop = make_engine(folder), Counter[str](), threading.Lock(), threading.Event()
    handles: list[RequestHandle] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for handle in _submissions(engine, cases, rng, stop):
            with lock:
                handles.append(handle)
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.05)
                handle.cancel()
            output = handle.result(120)
            with lock:
                tally[output.finish_reason] += 1
                handles.remove(handle)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(options.threads)]
    for thread in threads:
        thread.start()
    time.sleep(options.minutes * 60)
    busy = engine.stats().running
    started = time.monotonic()
    engine.close()
    close_s = time.monotonic() - started
    stop.set()
    for thread in threads:
        thread.join(10)
    stuck = sum(thread.is_alive() for thread in threads) + sum(not handle.done for handle in handles)
    return {
        "threads": options.threads,
        "minutes": options.minutes,
        "finish_reasons": dict(tally),
        "running_at_close": busy,
        "close_s": round(close_s, 3),
        "stuck": stuck,
        "blocks_in_use": engine.stats().blocks_used,
        "ok": not stuck and close_s <= 5 and not tally["error"] and engine.stats().blocks_used == 0,
    }


def _submissions(
    engine: Engine, cases: list[Case], rng: random.Random, stop: threading.Event
) -> Iterator[RequestHandle]:
    while not stop.is_set():
        case = rng.choice(cases)
        try:
            yield engine.submit(case.prompt, case.params)
        except EngineClosed:
            return


KINDS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "requests": run_requests,
    "threads": run_threads,
    "bridge": run_bridge,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=list(KINDS))
    parser.add_argument("--count", type=int, default=10_000, help="requests in all")
    parser.add_argument("--cases", type=int, default=400, help="different requests among them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder) / "model", SHAPES["tiny"] | {"vocab_size": VOCAB_SIZE})
        report = KINDS[options.what](options, model)
    print(json.dumps(report, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(describe_machine(device="cpu") | report, indent=1) + "\n")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
