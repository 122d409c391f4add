"""Measure how well the model predicts a text, and what an INT8 KV cache changes about it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from nanochat.bounded import read_at_most
from nanochat.commands.options import add_engine_options, engine_config, from_command_line
from nanochat.engine.progress import Progress
from nanochat.errors import InvalidOption
from nanochat.stray_output import diverted, log_file

if TYPE_CHECKING:
    from nanochat.engine.quality import PathQuality, QualityReport

MAX_BYTES = 2**30
"""Of the text."""
QUALITY_OPTIONS = ("compare", "ctx", "stride", "limit_tokens", "decode_tokens")
WITHOUT_EFFECT = ("prefix_caching", "cuda_graphs", "gpu_memory_utilization", "step_goal_ms", "system")
"""Engine options of no meaning here: nothing is cached between windows, the cache is as large as needed, and no chat
waits for the steps."""
TERMINAL_PERIOD_S = 0.1
LOG_PERIOD_S = 10.0
"""How often progress is written to something that isn't a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The text, the windows, what to measure, how to print, and the engine's options."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a text in UTF-8")
    parser.add_argument(
        "--compare", action="store_true", help="a cache of the model's own type and an INT8 one, side by side"
    )

    def count(flag: str, help: str) -> None:
        parser.add_argument(flag, type=int, metavar="N", help=help)

    count("--ctx", "tokens of a window (2048, or less if the model or the text has less)")
    count("--stride", "tokens from one window to the next (half a window)")
    count("--limit-tokens", "use only the text's first N tokens")
    count("--decode-tokens", "tokens to score by decoding as well; 0: none (1024, or what the text has)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_engine_options(parser, leave_out=WITHOUT_EFFECT)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status.

    Raises:
        NanochatError: with a sentence that says what to do.
    """
    _, config = engine_config(args)
    text = read_text(args.file)

    from nanochat.engine.quality import QualityMeter, QualityOptions

    with from_command_line({}):
        options = QualityOptions(**{name: getattr(args, name) for name in QUALITY_OPTIONS})
    with ProgressLine() as progress, diverted(log_file(), (1,)):  # loading prints what a model's files say
        report = QualityMeter(config, options, progress).measure(text)
    print(json.dumps(report.to_json()) if args.json else format_report(report))
    return 0


def read_text(file: Path) -> str:
    """All of a text file.

    Raises:
        InvalidOption: it is missing, unreadable, empty or no text.
    """
    try:
        text = read_at_most(file, MAX_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise InvalidOption(f"There is no file {file}; check the path.") from None
    except UnicodeDecodeError as error:
        raise InvalidOption(
            f"{file} isn't text in UTF-8 (byte {error.start:,} can't be read); convert it or use another file."
        ) from None
    except OSError as error:
        raise InvalidOption(f"{file} can't be read: {error.strerror or error}; name a text file.") from error
    if "\0" in text:
        raise InvalidOption(f"{file} holds binary data, not text; use another file.")
    if not text.strip():
        raise InvalidOption(f"{file} is empty; perplexity needs some text.")
    return text


class ProgressLine:
    """Progress on standard error: one line that is rewritten on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._rewrites = sys.stderr.isatty()
        self._started = self._shown = time.monotonic()
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._shown < (TERMINAL_PERIOD_S if self._rewrites else LOG_PERIOD_S):
            return
        self._shown = now
        text = progress.stage
        if progress.total:
            text += f" {progress.done / progress.total:.0%}"
        if progress.unit != "B" and progress.total:
            text += f" ({progress.done:,} of {progress.total:,} {progress.unit}".rstrip() + ")"
        self._write(f"{text}, {now - self._started:,.0f} s")

    def _write(self, text: str) -> None:
        end = "" if self._rewrites else "\n"
        start = "\r" if self._rewrites else ""
        print(start + text.ljust(self._width), end=end, file=sys.stderr, flush=True)
        self._width = len(text) if self._rewrites else 0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)


def format_report(report: QualityReport) -> str:
    """The figures as tables for a person."""
    lines = [
        f"{report.model}, {report.dtype} on {report.device}: {report.tokens:,} tokens in windows of "
        f"{report.ctx:,}, one every {report.stride:,}",
        "",
        *_path_lines(f"Chunked prefill, {report.prefill.tokens:,} tokens scored", report.prefill),
    ]
    if report.decode is not None and report.prefill_of_decoded is not None:
        lines += ["", *_path_lines(f"Decode, {report.decode.tokens:,} of these tokens", report.decode)]
        lines += ["", *_path_lines("Chunked prefill, the same tokens", report.prefill_of_decoded)]
    if report.rollout is not None:
        rollout = report.rollout
        lines += [
            "",
            f"Greedy answers of {rollout.tokens} tokens to {rollout.prompts} prompts: "
            f"{rollout.agreement:.1%} of all places agree, {rollout.identical:.1%} of answers wholly",
        ]
    return "\n".join(lines)


def _path_lines(title: str, path: PathQuality) -> list[str]:
    head = f"  {'KV cache':<10}{'bytes/token':>12}{'perplexity':>14}"
    if len(path.caches) > 1:
        head += f"{'change':>10}{'mean KL':>10}{'99 % KL':>10}{'same top-1':>12}"
    lines = [title, head]
    for cache in path.caches:
        line = f"  {cache.kv_dtype:<10}{cache.kv_bytes_per_token:>12,}{cache.perplexity:>14.6g}"
        if cache.perplexity_change is not None:
            line += f"{cache.perplexity_change:>+10.3%}{cache.kl_mean:>10.1e}{cache.kl_p99:>10.1e}"
            line += f"{cache.top1_agreement:>12.2%}"
        lines.append(line)
    return lines
