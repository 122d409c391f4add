"""Measure this machine with a model: how soon it begins to answer, and how quickly it reads and writes."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nanochat.commands.options import add_engine_options, engine_config
from nanochat.engine.config import SamplingParams
from nanochat.errors import InvalidOption, NanochatError
from nanochat.sanitize import sanitize_line
from nanochat.stray_output import diverted, log_file

if TYPE_CHECKING:
    from nanochat.engine.engine import Engine
    from nanochat.engine.handle import RequestHandle
    from nanochat.engine.outputs import RequestOutput

LONG = 2000
"""Tokens of a long prompt, where the model's context has room for it."""
SHORTEST_CONTEXT = 512
"""Tokens of context that the workloads need."""
Figures = dict[str, float]
"""By name; a name ends in its unit."""


class Bench:
    """The workloads on one engine. Prompts are random tokens, a new one each time, so that nothing is cached."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._random = random.Random(0)

    def warm_up(self) -> None:
        """Have done once what is done only once."""
        self._results([self._prompt(64)] * 8, 8)

    def chat(self) -> Figures:
        """One short question alone, then eight at once."""
        (alone,) = self._results([self._prompt(64)], 64)
        eight = self._results([self._prompt(64) for _ in range(8)], 64)
        return {
            "one_decode_tok_s": _rate(alone),
            "one_ttft_ms": _ttft_s(alone) * 1e3,
            "eight_decode_tok_s": sum(map(_rate, eight)),
            "eight_ttft_ms": max(map(_ttft_s, eight)) * 1e3,
        }

    def offline(self) -> Figures:
        """Sixteen documents with short answers, as fast as may be."""
        prompts = [self._prompt(128) for _ in range(16)]
        started_s = time.monotonic()
        outputs = self._results(prompts, 32)
        seconds = time.monotonic() - started_s
        return {
            "total_tok_s": sum(o.metrics.prompt_tokens + len(o.token_ids) for o in outputs) / seconds,
            "seconds": seconds,
        }

    def turns(self) -> Figures:
        """A conversation: each of its turns adds 60 tokens, and only these are computed."""
        history: list[int] = []
        for _ in range(4):
            (output,) = self._results([prompt := history + self._prompt(60)], 16)
            history = prompt + output.token_ids
        metrics = output.metrics
        return {
            "fourth_ttft_ms": _ttft_s(output) * 1e3,
            "cached_percent": 100 * metrics.cached_tokens / metrics.prompt_tokens,
        }

    def long(self) -> Figures:
        """One long prompt."""
        prompt = self._prompt(self._long)
        (output,) = self._results([prompt], 1)
        return {"prefill_tok_s": len(prompt) / _ttft_s(output), "ttft_ms": _ttft_s(output) * 1e3}

    def mixed(self) -> Figures:
        """A long prompt arrives while another chat is being answered."""
        chat, long = self._submit(self._prompt(64), 96), None
        times_s: list[float] = []
        for _ in chat:
            times_s.append(time.monotonic())
            if long is None and len(times_s) == 16:
                long = self._submit(self._prompt(self._long), 1)
        _checked(chat.result())
        gaps = [after - before for before, after in itertools.pairwise(times_s[15:])]
        return {
            "chat_longest_gap_ms": max(gaps, default=0.0) * 1e3,
            "long_ttft_ms": _ttft_s(_checked(long.result())) * 1e3 if long is not None else 0.0,
        }

    @property
    def _long(self) -> int:
        return min(LONG, self._engine.max_model_len - 64)

    def _prompt(self, length: int) -> list[int]:
        """Ids from the middle of the vocabulary: special tokens lie at its ends."""
        size = len(self._engine.tokenizer)
        return [self._random.randrange(size // 10, size - size // 10) for _ in range(length)]

    def _submit(self, prompt: list[int], length: int) -> RequestHandle:
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        return self._engine.submit(prompt, params)

    def _results(self, prompts: list[list[int]], length: int) -> list[RequestOutput]:
        handles = [self._submit(prompt, length) for prompt in prompts]
        return [_checked(handle.result()) for handle in handles]


WORKLOADS: Mapping[str, Callable[[Bench], Figures]] = {
    "chat": Bench.chat,
    "offline": Bench.offline,
    "turns": Bench.turns,
    "long": Bench.long,
    "mixed": Bench.mixed,
}
TITLES = {
    "chat": "a question of 64 tokens, an answer of 64",
    "offline": "16 texts of 128 tokens at once, answers of 32",
    "turns": "the fourth turn of a conversation",
    "long": "a long prompt",
    "mixed": "a long prompt beside a running chat",
}
LABELS = {
    "one_decode_tok_s": "one chat",
    "one_ttft_ms": "its first token after",
    "eight_decode_tok_s": "eight chats together",
    "eight_ttft_ms": "the last first token after",
    "total_tok_s": "read and written",
    "seconds": "in all",
    "fourth_ttft_ms": "first token after",
    "cached_percent": "of it from the cache",
    "prefill_tok_s": "read",
    "ttft_ms": "first token after",
    "chat_longest_gap_ms": "the chat's longest pause",
    "long_ttft_ms": "first token after",
}
UNITS = {"tok_s": "tok/s", "ms": "ms", "seconds": "s", "percent": "%"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, how to print, and the engine's options."""
    parser.add_argument(
        "--workload",
        action="append",
        choices=tuple(WORKLOADS),
        help="only this one; repeatable (all of them)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_engine_options(parser, leave_out=("system",))


def run(args: argparse.Namespace) -> int:
    """Returns the exit status.

    Raises:
        NanochatError: with a sentence that says what to do.
    """
    _, config = engine_config(args)

    from nanochat.engine.engine import Engine

    started_s = time.monotonic()
    with diverted(log_file()):  # tokenizers print what a model's files say
        engine = Engine(config)
    with engine:
        if engine.max_model_len < SHORTEST_CONTEXT:
            raise InvalidOption(
                f"The benchmark needs a context of {SHORTEST_CONTEXT} tokens, and there are "
                f"{engine.max_model_len:,}; raise --max-model-len or --kv-blocks, or take another model."
            )
        about = describe(engine, time.monotonic() - started_s)
        if not args.json:
            print(heading(about))
        results: dict[str, Figures] = {}
        bench = Bench(engine)
        bench.warm_up()
        for name in args.workload or WORKLOADS:
            results[name] = WORKLOADS[name](bench)
            if not args.json:
                print("\n".join(lines(name, results[name])), flush=True)
        peak = peak_memory_mib(engine)
    if args.json:
        rounded = {
            name: {key: round(value, 3) for key, value in row.items()} for name, row in results.items()
        }
        print(json.dumps(about | {"peak_memory_mib": round(peak, 1), "workloads": rounded}))
    else:
        print(f"memory   {peak:,.0f} MiB at most")
    return 0


def describe(engine: Engine, load_s: float) -> dict[str, Any]:
    """What is measured."""
    stats = engine.stats()
    memory = engine.rank_memory[0]
    return {
        "model": engine.model_name,
        "device": engine.device_name,
        "compute": engine.compute_name,
        "dtype": engine.dtype_name,
        "kv_dtype": engine.kv_dtype_name,
        "kv_tokens": stats.blocks_total * engine.config.block_size,
        "weights_mib": round(memory.weights / 2**20, 1),
        "cache_mib": round(memory.cache / 2**20, 1),
        "load_s": round(load_s, 2),
    }


def heading(about: Mapping[str, Any]) -> str:
    """What is measured, on one line."""
    return (
        f"{sanitize_line(about['model'])} · {about['compute']} · {about['dtype']}, {about['weights_mib']:,.0f} MiB · "
        f"KV {about['kv_dtype']}, {about['kv_tokens']:,} tokens · loaded in {about['load_s']:.1f} s"
    )


def lines(name: str, figures: Figures) -> Iterator[str]:
    """A workload's figures for people."""
    yield f"{name:<8} {TITLES[name]}"
    for key, value in figures.items():
        unit = next(text for suffix, text in UNITS.items() if key.endswith(suffix))
        shown = f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
        yield f"{'':<8} {LABELS[key]:<28} {shown:>9} {unit}"


def peak_memory_mib(engine: Engine) -> float:
    """The most that this process has held: of the GPU's memory where it computes there, or else of the machine's."""
    if engine.device_name == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _checked(output: RequestOutput) -> RequestOutput:
    if output.error is not None:
        raise NanochatError(output.error)
    return output


def _ttft_s(output: RequestOutput) -> float:
    return output.metrics.ttft_s or 0.0


def _rate(output: RequestOutput) -> float:
    return output.metrics.decode_tok_s or 0.0
