"""Run the scheduler alone, without a model: a table of fixed cases, or a trace of real arrivals replayed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from nanochat.engine.config import EngineConfig
from nanochat.engine.simulation import (
    ANSWER_TOKENS,
    BLOCK_SIZE,
    TABLE,
    Arrival,
    CaseResult,
    CostModel,
    Percentiles,
    Replay,
    ReplayResult,
    read_trace,
    run_case,
)
from nanochat.errors import InvalidOption


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The trace to replay, what to replay it on, and how to print."""
    defaults = EngineConfig()
    cost = CostModel()
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.csv",
        help="replay these arrivals: columns TIMESTAMP, ContextTokens, GeneratedTokens",
    )
    group = parser.add_argument_group("with --trace")

    def option(flag: str, kind: type, default: float, help: str) -> None:
        metavar = "N" if kind is int else "X"
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{help} ({default:g})")

    option("--kv-blocks", int, 2048, "KV blocks in the cache")
    option("--block-size", int, defaults.block_size, "tokens per KV block")
    option("--max-seqs", int, defaults.max_num_seqs, "most requests in one step")
    option("--max-batched-tokens", int, defaults.max_num_batched_tokens, "most tokens in one step")
    option("--shared-prefix", int, 0, "first tokens that all prompts have in common")
    option("--speed", float, 1, "arrivals so many times as fast")
    option("--step-ms", float, cost.step_s * 1e3, "simulated milliseconds of a step")
    option("--token-us", float, cost.token_s * 1e6, "and simulated microseconds of each token in it")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status.

    Raises:
        InvalidOption: a number that can't work, or a trace that can't be read.
        NotEnoughMemory: the simulated cache is too small for any request.
    """
    if args.trace is None:
        results = [run_case(case) for case in TABLE]
        if args.json:
            print(json.dumps({"cases": [asdict(result) for result in results]}))
        else:
            print(format_table(results))
        return 0
    result = _replay(args)
    print(json.dumps({"trace": asdict(result)}) if args.json else format_replay(result))
    return 0


def _replay(args: argparse.Namespace) -> ReplayResult:
    config = EngineConfig(
        num_kv_blocks=args.kv_blocks,
        block_size=args.block_size,
        max_num_seqs=args.max_seqs,
        max_num_batched_tokens=args.max_batched_tokens,
    )
    if not (args.speed > 0 and args.step_ms > 0 and args.token_us >= 0 and args.shared_prefix >= 0):
        raise InvalidOption(
            "--speed and --step-ms must be above 0, --token-us and --shared-prefix at least 0."
        )
    arrivals: list[Arrival] = [
        replace(arrival, time_s=arrival.time_s / args.speed) for arrival in read_trace(args.trace)
    ]
    cost = CostModel(args.step_ms / 1e3, args.token_us / 1e6)
    return Replay(arrivals, config, cost=cost, shared_prefix_tokens=args.shared_prefix).run()


def format_table(results: list[CaseResult]) -> str:
    """The cases as lines of text; figures of a sequential scheduler in brackets."""
    header = ("case", "budget", "blocks", "requests", "rounds", "preemptions", "leaked", "peak")
    rows = [
        (
            result.name,
            str(result.max_num_batched_tokens),
            str(result.num_blocks),
            str(result.requests),
            f"{result.rounds} ({result.baseline_rounds})",
            f"{result.preemptions} ({result.baseline_preemptions})",
            str(result.leaked_blocks),
            str(result.peak_blocks),
        )
        for result in results
    ]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in (header, *rows)
    ]
    ample = results[0]
    return "\n".join(
        [
            f"Blocks of {BLOCK_SIZE} tokens, {ANSWER_TOKENS} generated tokens a request, no model.",
            "In brackets: a scheduler with one unfinished prefill a step.",
            "",
            *lines,
            "",
            f"Blocks taken as tokens need them: {ample.peak_blocks} at most in the first case; "
            f"reserved at admission: {ample.upfront_blocks}.",
        ]
    )


def format_replay(result: ReplayResult) -> str:
    """What came of a trace as lines of text."""

    def spread(values: Percentiles, digits: int) -> str:
        names = ("p50", "p90", "p99", "max")
        return "  ".join(f"{name} {getattr(values, name):,.{digits}f}" for name in names)

    lines = [
        ("requests", f"{result.requests:,}" + (f", {result.refused:,} refused" if result.refused else "")),
        ("tokens", f"{result.prompt_tokens:,} prompt, {result.answer_tokens:,} generated"),
        ("steps", f"{result.steps:,} in {result.simulated_s:,.0f} simulated seconds"),
        ("computed", f"{result.computed_tokens:,} tokens"),
        ("preemptions", f"{result.preemptions:,}"),
        ("prefix hits", f"{result.prefix_hit_rate:.1%} of prompt tokens"),
        ("peak blocks", f"{result.peak_blocks:,}"),
        ("TTFT, steps", spread(result.ttft_steps, 0)),
        ("TTFT, s", spread(result.ttft_s, 2)),
        ("planner, µs", spread(result.planner_us, 0) + " a step"),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in lines)
