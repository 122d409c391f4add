"""Six workloads of a chat on a CPU, for nanochat and for what its users would run otherwise.

    OMP_NUM_THREADS=2 python -m benchmarks.cpu --engine nanochat --engine llama_cpp --engine transformers \\
        --gguf MODEL.gguf --json all.json
    OMP_NUM_THREADS=2 python -m benchmarks.cpu --json ours.json
    python -m benchmarks.cpu --compare ours.json theirs.json
    OMP_NUM_THREADS=2 python -m benchmarks.cpu --workloads w6 --kv int8 --json int8.json

W1 one chat, 64 tokens in, 128 out: decode tok/s. W2 eight of them at once: all their tok/s. W3 six turns with
100 new tokens each: time to the sixth's first token, ms. W4 a prompt of 2,000 tokens: prefill tok/s. W5 such a
prompt arrives beside a running chat: its longest gap between tokens, ms, and the prompt's time to the first
token, s. W6, which has to be asked for, eight chats of 2,000 tokens each: all their tok/s. Everyone gets the
same token ids and decodes greedily; each workload runs once to warm up and then ``--repeat`` times, of which the
medians are kept. An engine has the process to itself, for its peak memory; of several, one after the other, the
report begins with the first one's ratios to the others, above 1 where the first is better.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.cpu_peers import Job, LlamaCpp, Peer, Transformers
from benchmarks.machine import describe_machine
from nanochat import Engine, EngineConfig, SamplingParams

LONG = 2000
HIGHER_IS_BETTER = {"w1_tok_s", "w2_tok_s", "w4_tok_s", "w6_tok_s"}
NAMES = {
    "w1_tok_s": "W1 one chat, tok/s",
    "w2_tok_s": "W2 eight chats, tok/s",
    "w3_ttft_ms": "W3 sixth turn, ms",
    "w4_tok_s": "W4 prefill, tok/s",
    "w5_gap_ms": "W5 longest gap, ms",
    "w5_ttft_s": "W5 long prompt, s",
    "w6_tok_s": "W6 eight long chats, tok/s",
    "peak_rss_mib": "peak RSS, MiB",
}


class Nanochat:
    """Our engine, as its app uses it."""

    def __init__(self, options: dict[str, Any]) -> None:
        started = time.perf_counter()
        self._engine = Engine(EngineConfig(device="cpu", **options))
        self.about = {
            "load_s": time.perf_counter() - started,
            "dtype": self._engine.dtype_name,
            "kv": self._engine.kv_dtype_name,
            "options": options,
            **{name: version(name) for name in ("nanochat", "torch")},
        }

    def run(self, jobs: list[Job]) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in jobs]
        threads = []
        for index, job in enumerate(jobs):
            while len(times[job.after_job]) < job.after_tokens:
                time.sleep(0.0005)
            job.submitted_s = time.perf_counter()
            params = SamplingParams(temperature=0, max_tokens=job.out, ignore_eos=True)
            handle = self._engine.submit(job.prompt, params)

            def listen(handle: Any = handle, index: int = index) -> None:
                for event in handle:
                    times[index] += [time.perf_counter()] * len(event.token_ids)

            threads.append(threading.Thread(target=listen))
            threads[-1].start()
            job.handle = handle
        for thread in threads:
            thread.join()
        for job in jobs:
            job.answer = list(job.handle.result().token_ids)
        return times

    def close(self) -> None:
        self._engine.close()


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, 40_000) for _ in range(length)] for _ in range(count)]


def decode_rate(peer: Peer, chats: int, seed: int, length: int = 64, out: int = 128) -> float:
    """Tokens a second from when all have their first one to when the first has all."""
    times = peer.run([Job(prompt, out) for prompt in prompts(chats, length, seed)])
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    return sum(sum(begin < t <= end for t in each) for each in times) / (end - begin)


def sixth_turn_ms(peer: Peer, seed: int) -> float:
    history: list[int] = []
    job, times = Job([], 0), [[0.0]]
    for new in prompts(6, 100, seed):
        job = Job(history + new, 32)
        times = peer.run([job])
        history = job.prompt + job.answer
    return (times[0][0] - job.submitted_s) * 1e3


def prefill_rate(peer: Peer, seed: int) -> float:
    job = Job(prompts(1, LONG, seed)[0], 1)
    return LONG / (peer.run([job])[0][0] - job.submitted_s)


def beside_a_long_prompt(peer: Peer, seed: int) -> dict[str, float]:
    chat = Job(prompts(1, 64, seed)[0], 128)
    long = Job(prompts(1, LONG, seed + 1000)[0], 8, after_job=0, after_tokens=16)
    chat_times, long_times = peer.run([chat, long])
    gaps = [after - before for before, after in pairwise(chat_times) if after > long.submitted_s]
    return {"w5_gap_ms": max(gaps) * 1e3, "w5_ttft_s": long_times[0] - long.submitted_s}


WORKLOADS: dict[str, Callable[[Peer, int], dict[str, float]]] = {
    "w1": lambda peer, seed: {"w1_tok_s": decode_rate(peer, 1, seed)},
    "w2": lambda peer, seed: {"w2_tok_s": decode_rate(peer, 8, seed + 100)},
    "w3": lambda peer, seed: {"w3_ttft_ms": sixth_turn_ms(peer, seed + 200)},
    "w4": lambda peer, seed: {"w4_tok_s": prefill_rate(peer, seed + 300)},
    "w5": lambda peer, seed: beside_a_long_prompt(peer, seed + 400),
    # Those that decode already go on while the others' prompts are read, each for longer.
    "w6": lambda peer, seed: {"w6_tok_s": decode_rate(peer, 8, seed + 500, LONG, 384)},
}


def measure(peer: Peer, seed: int, workloads: list[str]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for workload in workloads:
        figures |= WORKLOADS[workload](peer, seed)
    return figures


def make_peer(args: argparse.Namespace) -> Peer:
    if args.engine == "llama_cpp":
        return LlamaCpp(args.gguf, args.threads, not args.no_repack)
    if args.engine == "transformers":
        return Transformers(args.threads, args.weights)
    options: dict[str, Any] = {"weights": args.weights, "kv_dtype": args.kv}
    return Nanochat(options)


def ratio(key: str, ours: float, theirs: float) -> float:
    """Above 1 where ours is better."""
    return ours / theirs if key in HIGHER_IS_BETTER else theirs / ours


def measure_all(engines: list[str], options: list[str], json_file: Path | None) -> None:
    """Each in a process of its own, told ``options``; then the table, and one report of all."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{engine}.json" for engine in engines]
        for engine, file in zip(engines, files, strict=True):
            print(f"{engine}:", flush=True)
            command = [sys.executable, "-m", "benchmarks.cpu", *options, "--engine", engine]
            subprocess.run([*command, "--json", str(file)], check=True)
        reports = [json.loads(file.read_text()) for file in files]
    compare(reports)
    ours, *others = reports
    ratios = {
        other["engine"]: {
            key: round(ratio(key, x, other["medians"][key]), 3) for key, x in ours["medians"].items()
        }
        for other in others
    }
    if json_file:
        report = {"ratios": ratios, **describe_machine(), "command": sys.argv[1:], "reports": reports}
        json_file.write_text(json.dumps(report, indent=1) + "\n")


def compare(reports: list[dict[str, Any]]) -> None:
    """A table: ratios to the first report's figures, above 1 where the first is better; then the figures."""
    names = [f"{report['engine']} {report['variant']}" for report in reports]
    print("| workload | " + " | ".join([f"ratio to {name}" for name in names[1:]] + names) + " |")
    print("|---" * (2 * len(names)) + "|")
    for key, title in NAMES.items():
        if any(key not in report["medians"] for report in reports):
            continue
        figures = [report["medians"][key] for report in reports]
        ratios = [ratio(key, figures[0], x) for x in figures[1:]]
        cells = [f"{x:.2f}" for x in ratios] + [f"{x:,.4g}" for x in figures]
        print(f"| {title} | " + " | ".join(cells) + " |")


def options_of_one(args: argparse.Namespace) -> list[str]:
    """What was said on the command line, but for the engines and the report."""
    options = ["--weights", args.weights, "--kv", args.kv, "--threads", str(args.threads)]
    options += ["--repeat", str(args.repeat), "--workloads", *args.workloads]
    options += ["--gguf", str(args.gguf)] if args.gguf else []
    return options + (["--no-repack"] if args.no_repack else [])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engine", dest="engines", action="append", choices=["nanochat", "llama_cpp", "transformers"]
    )
    parser.add_argument("--weights", default="auto", help="nanochat's formats; of transformers bf16 or fp32")
    parser.add_argument("--kv", choices=["auto", "int8"], default="auto")
    parser.add_argument("--gguf", type=Path, help="the model for llama_cpp")
    parser.add_argument(
        "--no-repack", action="store_true", help="llama_cpp keeps weights in the file's order"
    )
    parser.add_argument("--threads", type=int, default=2, help="of the peers; nanochat chooses itself")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS)[:5])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path, nargs="+", metavar="FILE")
    args = parser.parse_args()
    engines = args.engines or ["nanochat"]
    if args.compare:
        compare([json.loads(file.read_text()) for file in args.compare])
        return
    if "llama_cpp" in engines and args.gguf is None:
        parser.error("llama_cpp needs --gguf")
    if len(engines) > 1:
        measure_all(engines, options_of_one(args), args.json)
        return
    args.engine = engines[0]
    peer = make_peer(args)
    runs = []
    for seed in range(args.repeat + 1):
        runs.append(measure(peer, seed, args.workloads))
        print({key: round(value, 2) for key, value in runs[-1].items()}, flush=True)
    runs = runs[1:]
    pick: Callable[[str], list[float]] = lambda key: [run[key] for run in runs]  # noqa: E731
    medians = {key: statistics.median(pick(key)) for key in runs[0]}
    medians["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    report = {
        "engine": args.engine,
        "variant": args.gguf.stem if args.engine == "llama_cpp" else args.weights,
        **describe_machine(device="cpu"),
        "about": peer.about,
        "medians": medians,
        "best": {key: (max if key in HIGHER_IS_BETTER else min)(pick(key)) for key in runs[0]},
        "runs": runs,
    }
    print(json.dumps(medians))
    peer.close()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
