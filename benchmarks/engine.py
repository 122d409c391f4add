"""Engine throughput and latency on fixed workloads: random token ids, everything submitted at once.

The model has the shape of Qwen3-0.6B and random weights made from a seed (``--shape tiny`` for a dry run on
a CPU), so that nothing is downloaded. E1 is the offline batch that nano-vllm publishes: 256 requests of
100 to 1,024 tokens in and out, temperature 0.6.

    python -m benchmarks.engine --json benchmarks/results/engine.json
    python -m benchmarks.engine --engine nanochat --engine transformers
    python -m benchmarks.engine --workload E3 --kv int8
    python -m benchmarks.engine --shape qwen3-8b --folder /tmp/8b --workload D1 --tokens --json one.json
    python -m benchmarks.engine --shape qwen3-8b --folder /tmp/8b --workload D1 --tp 2 --compare one.json
    python -m benchmarks.engine --shape tiny --tp 2 --workload D1 --repeat 1  # a dry run on a CPU

Besides throughput and latency it reports, for nanochat, what the host spends on a step (planning, building,
launching, committing) and, on a GPU, the time from one step's end to the next's. With ``--tokens`` it keeps
the ids of greedy answers, and with ``--compare REPORT`` says how far they are those of another such report:
one card's, say.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from benchmarks.random_model import SHAPES, write_random_model
from benchmarks.servers import Served, Server, TransformersBatching, decode_rate
from nanochat import Engine, EngineConfig, SamplingParams
from nanochat.engine.handle import RequestHandle
from nanochat.engine.loading import RECORDING_STAGE

WARM_UPS = 3
"""Runs that compile, and find out what is worth recording."""


@dataclass(frozen=True)
class Workload:
    """Requests submitted at once: how many, tokens in and out (a range is drawn evenly)."""

    requests: int
    tokens_in: tuple[int, int]
    tokens_out: tuple[int, int]
    temperature: float = 0.0


WORKLOADS: dict[str, Workload] = {
    "E1": Workload(256, (100, 1024), (100, 1024), temperature=0.6),
    "E2-8x32": Workload(8, (32, 32), (16, 16)),
    "E2-8x128": Workload(8, (128, 128), (16, 16)),
    "E2-8x256": Workload(8, (256, 256), (16, 16)),
    "E3": Workload(1, (128, 128), (512, 512)),
    "E4": Workload(32, (512, 512), (256, 256)),
    "E5a": Workload(1, (30_000, 30_000), (128, 128)),
    "E5b": Workload(8, (8_000, 8_000), (128, 128)),
    "D1": Workload(1, (128, 128), (256, 256)),
    "D8": Workload(8, (128, 128), (256, 256)),
    "D32": Workload(32, (128, 128), (256, 256)),
    "D4": Workload(4, (128, 128), (128, 128)),
    "D32-8000": Workload(32, (8_000, 8_000), (64, 64)),
    "P4-128": Workload(4, (128, 128), (1, 1)),
    "P4-2048": Workload(4, (2_048, 2_048), (1, 1)),
    "P8": Workload(8, (2_048, 2_048), (1, 1)),
}


def draw_requests(workload: Workload, vocab_size: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and the numbers of tokens to generate."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(vocab_size) for _ in range(rng.randint(*workload.tokens_in))]
        for _ in range(workload.requests)
    ]
    return prompts, [rng.randint(*workload.tokens_out) for _ in range(workload.requests)]


class Nanochat:
    """This project's engine, with what its step thread spends on each step."""

    def __init__(self, config: EngineConfig, max_steps_ahead: int | None) -> None:
        stages: list[tuple[str, float]] = []
        self.engine = Engine(
            config,
            max_steps_ahead=max_steps_ahead,
            progress=lambda progress: stages.append((progress.stage, time.perf_counter())),
        )
        recording = [at for stage, at in stages if stage == RECORDING_STAGE]
        self.about = {
            "kv": self.engine.kv_dtype_name,
            "options": {key: str(value) for key, value in asdict(config).items() if key != "model"},
            "max_steps_ahead": self.engine._pipeline.max_steps_ahead,
            "ranks": [memory.to_json() for memory in self.engine.rank_memory],
            "recording_s": recording[-1] - recording[0] if recording else 0.0,
        }
        self._host_s: list[float] = []
        """Planning, building, launching and committing, added up, of each step since the last run began."""
        self.token_ids: list[list[int]] = []
        """Of the last run's answers."""
        self._ends: list[torch.cuda.Event] = []
        """On a GPU, when each of them was over."""
        pipeline, scheduler = self.engine._pipeline, self.engine._scheduler
        # Methods of two objects are replaced by themselves and a clock: nothing of it is in the product.
        pipeline.launch = self._timed_launch(pipeline.launch)  # type: ignore[method-assign]
        scheduler.commit = self._timed_commit(scheduler.commit)  # type: ignore[method-assign]

    def _timed_launch(self, launch: Callable[[], bool]) -> Callable[[], bool]:
        def timed() -> bool:
            started = time.perf_counter()
            launched = launch()
            if launched:
                self._host_s.append(time.perf_counter() - started)
                if self.engine.device_name == "cuda":
                    event = torch.cuda.Event(enable_timing=True)
                    event.record()
                    self._ends.append(event)
            return launched

        return timed

    def _timed_commit(self, commit: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            accepted = commit(*args)
            if self._host_s:
                self._host_s[-1] += time.perf_counter() - started
            return accepted

        return timed

    def serve(self, prompts: list[list[int]], outs: list[int], temperature: float) -> list[Served]:
        self._host_s.clear()
        self._ends.clear()
        handles = [
            self.engine.submit(
                prompt, SamplingParams(temperature=temperature, max_tokens=out, ignore_eos=True, seed=index)
            )
            for index, (prompt, out) in enumerate(zip(prompts, outs, strict=True))
        ]
        outputs = [handle.result() for handle in handles]
        failed = [output.error for output in outputs if output.error]
        if failed:
            raise RuntimeError(failed[0])
        self.token_ids = [output.token_ids for output in outputs]
        return [
            Served(o.metrics.ttft_s or 0.0, token_times(handle), o.metrics.preemptions)
            for handle, o in zip(handles, outputs, strict=True)
        ]

    def extras(self) -> dict[str, float]:
        """Medians over the last run's steps: the host's time, and on a GPU from one step's end to the next's."""
        figures = {"host_us": statistics.median(self._host_s) * 1e6, "steps": float(len(self._host_s))}
        if len(self._ends) > 1:
            torch.cuda.synchronize()
            intervals = [start.elapsed_time(end) for start, end in pairwise(self._ends)]
            figures["device_us"] = statistics.median(intervals) * 1e3
        return figures

    def close(self) -> None:
        self.engine.close()


def token_times(handle: RequestHandle) -> list[float]:
    """When each token of a finished request came, on the engine's clock; those of one step came together."""
    return [event.time_s or 0.0 for event in handle for _ in event.token_ids]


def run(server: Server, workload: Workload, vocab_size: int, seed: int) -> dict[str, float]:
    """Submit everything, wait for everything. TTFT is the mean over requests.

    Rates are of the whole run, but that of decoding is of the time when every request had its first token.
    """
    prompts, outs = draw_requests(workload, vocab_size, seed)
    started = time.perf_counter()
    served = server.serve(prompts, outs, workload.temperature)
    wall_s = time.perf_counter() - started
    last_ttft_s = max(each.ttft_s for each in served)
    generated = sum(len(each.token_s) for each in served)
    return {
        "wall_s": wall_s,
        "output_tok_s": generated / wall_s,
        "ttft_ms": statistics.mean(each.ttft_s for each in served) * 1e3,
        "ttft_last_ms": last_ttft_s * 1e3,
        "prefill_tok_s": sum(map(len, prompts)) / last_ttft_s,
        "decode_tok_s": decode_rate(served),
        "preemptions": float(sum(each.preemptions for each in served)),
        **server.extras(),
    }


def compare_answers(answers: list[list[int]], others: list[list[int]]) -> dict[str, float]:
    """How far greedy answers agree: random weights have near ties, and after one of them nothing is the same."""
    shared = [
        next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))
        for mine, theirs in zip(answers, others, strict=True)
    ]
    pairs = zip(shared, answers, strict=True)
    return {
        "same_answers": statistics.mean(count == len(answer) for count, answer in pairs),
        "same_first_tokens": statistics.mean(count > 0 for count in shared),
        "tokens_before_the_first_difference": statistics.mean(shared),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--folder", type=Path, help="keep the model here, or use the one that is here")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="repeatable; default: all")
    parser.add_argument("--kv", choices=["auto", "int8"], default="auto")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the median is reported")
    parser.add_argument("--max-seqs", type=int, default=256)
    parser.add_argument("--max-batched-tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--engine", choices=["nanochat", "transformers"], action="append", help="repeatable")
    parser.add_argument("--steps-ahead", type=int, help="of nanochat: most steps in flight at once, less one")
    parser.add_argument("--no-cuda-graphs", action="store_true", help="of nanochat")
    parser.add_argument("--tp", type=int, default=1, help="of nanochat: number of GPUs")
    parser.add_argument("--kv-blocks", type=int, help="of nanochat: the same for all makes memory comparable")
    parser.add_argument(
        "--tokens", action="store_true", help="of nanochat: keep greedy answers in the report"
    )
    parser.add_argument(
        "--compare", type=Path, help="of nanochat: a report with --tokens, of the same options"
    )
    args = parser.parse_args()
    report: dict[str, Any] = {
        **describe_machine("triton", "transformers"),
        "shape": args.shape,
        "engines": {},
    }
    with tempfile.TemporaryDirectory() as name:
        folder: Path = args.folder or Path(name) / "model"
        if not (folder / "tokenizer_config.json").exists():  # what is written last
            write_random_model(folder, SHAPES[args.shape])
        for engine in args.engine or ["nanochat"]:
            report["engines"][engine] = measure(engine, folder, args)
            if args.json is not None:
                args.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(engine: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All workloads on one engine."""
    started = time.perf_counter()
    server: Server
    if engine == "transformers":
        server = TransformersBatching(folder, args.max_seqs, args.max_batched_tokens)
    else:
        config = EngineConfig(
            model=str(folder),
            kv_dtype=args.kv,
            max_num_seqs=args.max_seqs,
            max_num_batched_tokens=args.max_batched_tokens,
            cuda_graphs=not args.no_cuda_graphs,
            tensor_parallel_size=args.tp,
            num_kv_blocks=args.kv_blocks,
            prefix_caching=False,  # the prompts of repeated runs would otherwise be found in it
        )
        server = Nanochat(config, args.steps_ahead)
    report: dict[str, Any] = {**server.about, "load_s": time.perf_counter() - started, "workloads": {}}
    print(engine, f"loaded in {report['load_s']:.1f} s", flush=True)
    for name in args.workload or WORKLOADS:
        workload, vocab_size = WORKLOADS[name], SHAPES[args.shape]["vocab_size"]
        runs = []
        for seed in [0] * WARM_UPS + list(range(1, args.repeat + 1)):
            time.sleep(0.5)  # what came and may come again is recorded in the pauses
            runs.append(run(server, workload, vocab_size, seed))
        runs = runs[WARM_UPS:]
        median = {key: statistics.median(each[key] for each in runs) for key in runs[0]}
        if isinstance(server, Nanochat) and workload.temperature == 0:
            if args.compare is not None:
                others = json.loads(args.compare.read_text())["engines"][engine]["workloads"][name][
                    "token_ids"
                ]
                median |= compare_answers(server.token_ids, others)
            if args.tokens:
                report["workloads"][name] = median | {"token_ids": server.token_ids}
        report["workloads"].setdefault(name, median)
        print(engine, name, {key: round(value, 2) for key, value in median.items()}, flush=True)
    server.close()
    del server
    gc.collect()
    torch.cuda.empty_cache()  # for the next engine
    return report


if __name__ == "__main__":
    main()
