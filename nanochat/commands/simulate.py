"""Run the scheduler alone, without a model: a table of fixed cases, or a trace of real arrivals replayed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nanochat.commands.options import from_command_line
from nanochat.engine.config import EngineConfig
from nanochat.engine.simulation import (
    ANSWER_TOKENS,
    BLOCK_SIZE,
    TABLE,
    CaseResult,
    CostModel,
    Percentiles,
    Replay,
    ReplayResult,
    read_trace,
    run_case,
)
from nanochat.errors import WrongUsage

_ENGINE, _COST = EngineConfig(), CostModel()
TRACE_OPTIONS: Mapping[str, tuple[float, str]] = {
    "kv_blocks": (2048, "KV blocks in the cache"),
    "block_size": (_ENGINE.block_size, "tokens per KV block"),
    "max_seqs": (_ENGINE.max_num_seqs, "most requests in one step"),
    "max_batched_tokens": (_ENGINE.max_num_batched_tokens, "most tokens in one step"),
    "shared_prefix": (0, "first tokens that all prompts have in common"),
    "speed": (1.0, "arrivals so many times as fast"),
    "step_ms": (_COST.step_s * 1e3, "simulated milliseconds of a step"),
    "token_us": (_COST.token_s * 1e6, "and simulated microseconds of each token in it"),
}
"""What replaying a trace takes, with its default and its help."""
ENGINE_FIELDS = {
    "num_kv_blocks": "kv_blocks",
    "block_size": "block_size",
    "max_num_seqs": "max_seqs",
    "max_num_batched_tokens": "max_batched_tokens",
}
"""Which of them shape an engine, by the name of its field."""
MAX_KV_BLOCKS = 10_000_000
"""A cache of more would only fill the memory of whoever simulates it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The trace to replay, what to replay it on, and how to print."""
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.csv",
        help="replay these arrivals: columns TIMESTAMP, ContextTokens, GeneratedTokens",
    )
    group = parser.add_argument_group("with --trace")
    for name, (default, help) in TRACE_OPTIONS.items():
        metavar = "N" if isinstance(default, int) else "X"
        group.add_argument(_flag(name), type=type(default), metavar=metavar, help=f"{help} ({default:g})")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status.

    Raises:
        WrongUsage: a number that can't work.
        InvalidOption: a trace that can't be read.
        NotEnoughMemory: the simulated cache is too small for any request.
    """
    given = {name: getattr(args, name) for name in TRACE_OPTIONS if getattr(args, name) is not None}
    if args.trace is None:
        if given:
            raise WrongUsage(f"{_flag(next(iter(given)))} is for replaying a trace; add --trace FILE.csv.")
        results = [run_case(case) for case in TABLE]
        if args.json:
            print(json.dumps({"cases": [asdict(result) for result in results]}))
        else:
            print(format_table(results))
        return 0
    result = _replay(args.trace, {name: default for name, (default, _) in TRACE_OPTIONS.items()} | given)
    print(json.dumps({"trace": asdict(result)}) if args.json else format_replay(result))
    return 0


def _replay(trace: Path, options: Mapping[str, Any]) -> ReplayResult:
    with from_command_line({field: _flag(name) for field, name in ENGINE_FIELDS.items()}):
        config = EngineConfig(**{field: options[name] for field, name in ENGINE_FIELDS.items()})
    if options["kv_blocks"] > MAX_KV_BLOCKS:
        raise WrongUsage(f"--kv-blocks can be at most {MAX_KV_BLOCKS:,} here.")
    speed, step_ms, token_us = options["speed"], options["step_ms"], options["token_us"]
    if not (1e-6 <= speed <= 1e6 and 1e-3 <= step_ms <= 1e6 and 0 <= token_us <= 1e9):
        raise WrongUsage(
            "--speed must be between 1e-6 and 1e6, --step-ms between 0.001 and 1e6, "
            "--token-us between 0 and 1e9."
        )
    if options["shared_prefix"] < 0:
        raise WrongUsage("--shared-prefix must be at least 0.")
    arrivals = [replace(arrival, time_s=arrival.time_s / speed) for arrival in read_trace(trace)]
    cost = CostModel(step_ms / 1e3, token_us / 1e6)
    return Replay(arrivals, config, cost=cost, shared_prefix_tokens=options["shared_prefix"]).run()


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
