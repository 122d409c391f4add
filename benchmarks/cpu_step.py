"""Where one decode step on a CPU spends its time, against the bytes that it must read.

    OMP_NUM_THREADS=2 python -m benchmarks.cpu_step [--rows 1] [--context 128] [--repeat 30]

Each operation of the recorded step runs by itself, on one thread and on all, after the operation before it, so that its
weights come from memory as in a step; the best of its runs counts, which on a shared machine is the one least disturbed.
Then the whole step: in one native call, and as the engine runs it, with what Python adds.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict

import torch

from benchmarks.cpu_attention import best_ms
from nanochat.engine.config import EngineConfig, SamplingParams
from nanochat.engine.loading import load_model
from nanochat.engine.progress import ignore_progress
from nanochat.engine.request import Request
from nanochat.engine.runner import Runner
from nanochat.engine.step_plan import ScheduledChunk, StepPlan
from nanochat.kernels.native import library as c
from nanochat.kernels.native.library import Library, Op

TITLES = {
    c.TAKE_ROWS: "embedding, rows that sample",
    c.RMS_NORM: "norms and additions",
    c.GATED_SILU: "SiLU and product",
    c.QUANTIZE: "quantising rows",
    c.LINEAR_INT4: "linear maps, 4 bits",
    c.LINEAR_INT8: "linear maps, 8 bits",
    c.LINEAR_FLOAT: "linear maps, 16 or 32 bits",
    c.LINEAR_UPPER: "output matrix, upper halves of 8 bits",
    c.BOUND: "output matrix, what may be the likeliest",
    c.LINEAR_REST: "output matrix, all 8 bits of those",
    c.ROPE_STORE: "rotation and store",
    c.ATTENTION: "attention",
    c.ARGMAX: "likeliest token",
}


def weight_bytes(op: Op) -> int:
    """What a linear map reads of its weight; of the output matrix the part that it always reads."""
    groups = -(-op.n // c.PANEL) * (op.inner // c.GROUP)
    sizes = {c.LINEAR_INT4: 320, c.LINEAR_INT8: 512, c.LINEAR_UPPER: 256}
    if op.kind == c.LINEAR_FLOAT:
        return op.n * op.inner * (4 if op.w_type == c.FLOAT32 else 2)
    return groups * sizes.get(op.kind, 0)


def make_plan(rows: int, context: int, block_size: int) -> StepPlan:
    """Every row decodes its token at place ``context - 1``."""
    blocks = -(-context // block_size)
    chunks = []
    for row in range(rows):
        table = list(range(row * blocks, (row + 1) * blocks))
        ids = [100 + (7 * i + row) % 40_000 for i in range(context)]
        request = Request(row, ids, SamplingParams(temperature=0), block_table=table)
        chunks.append(ScheduledChunk(request, context - 1, 1, samples=True))
    return StepPlan(step=0, decodes=tuple(chunks), prefills=(), preempted=())


def operations_ms(library: Library, ops: list[Op], threads: int, repeats: int) -> dict[int, float]:
    """By kind; one after the other, ``repeats`` times."""
    best = [float("inf")] * len(ops)
    for _ in range(repeats):
        for index, op in enumerate(ops):
            one = (Op * 1)(op)
            start = time.perf_counter()
            library.run(one, 1, threads)
            best[index] = min(best[index], time.perf_counter() - start)
    kinds: dict[int, float] = defaultdict(float)
    for op, seconds in zip(ops, best, strict=True):
        kinds[op.kind] += seconds * 1e3
    return kinds


def profile(runner: Runner, plan: StepPlan, threads: int, repeats: int) -> None:
    """Print the tables of one step."""
    programs = runner._programs
    if programs is None:
        raise SystemExit("This model's steps aren't native here.")
    runner.run(plan)
    program = programs._few._program
    library, ops = program._library, program._ops
    kv_bytes = sum(
        2 * 2 * chunk.request.num_tokens * op.kv_heads * op.head_dim
        for op in ops
        if op.kind == c.ATTENTION
        for chunk in plan.decodes
    )
    read: dict[int, int] = defaultdict(int, {c.ATTENTION: kv_bytes})
    for op in ops:
        read[op.kind] += weight_bytes(op)
    by_threads = {count: operations_ms(library, ops, count, repeats) for count in sorted({1, threads})}
    print("| operation | " + " | ".join(f"ms, {n} thread(s)" for n in by_threads) + " | MB read |")
    print("|---" * (len(by_threads) + 2) + "|")
    for kind in sorted(by_threads[1], key=lambda kind: -by_threads[1][kind]):
        cells = [f"{times[kind]:.2f}" for times in by_threads.values()]
        megabytes = f"{read[kind] / 1e6:.1f}" if read[kind] else ""
        print(f"| {TITLES.get(kind, kind)} | {' | '.join(cells)} | {megabytes} |")
    total = sum(read.values()) / 1e6
    native = best_ms(program.run, 4 * repeats)
    whole = best_ms(lambda: runner.run(plan), 4 * repeats)
    print(
        f"\nThe step reads {total:.1f} MB. Native: {native:.2f} ms ({total / native:.1f} GB/s); as the engine"
    )
    print(
        f"runs it: {whole:.2f} ms, of which Python {whole - native:.2f} ms ({100 * (1 - native / whole):.1f} %)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1, help="chats that decode")
    parser.add_argument("--context", type=int, default=128, help="tokens of each")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--weights", default="auto")
    args = parser.parse_args()
    config = EngineConfig(device="cpu", weights=args.weights)
    model = load_model(config, ignore_progress)
    with torch.inference_mode():
        plan = make_plan(args.rows, args.context, config.block_size)
        profile(model.runner, plan, torch.get_num_threads(), args.repeat)


if __name__ == "__main__":
    main()
