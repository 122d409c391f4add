"""How long attention takes on the CPU in one step of SmolLM2-135M's shape, beside the plain reference.

    OMP_NUM_THREADS=2 python -m benchmarks.cpu_attention [--quick]

Every layer has its own cache, as in a model, so that K and V come from memory and not from a core's cache.
Times are the best of several runs: on a shared machine that is the one least disturbed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from nanochat import kernels
from nanochat.kernels import AttentionBatch, LayerCache, reference

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 30, 9, 3, 64, 16


def best_ms(function: Callable[[], object], repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def make_caches(num_blocks: int, dtype: torch.dtype, int8: bool) -> list[LayerCache]:
    shape = (num_blocks, BLOCK, KV_HEADS, DIM)
    if not int8:
        return [LayerCache(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(LAYERS)]

    def data() -> torch.Tensor:
        return torch.randint(-127, 128, shape, dtype=torch.int8)

    def scales() -> torch.Tensor:
        return torch.rand(shape[:3]).half() * 0.02

    return [LayerCache(data(), data(), scales(), scales()) for _ in range(LAYERS)]


def make_batch(rows: list[tuple[int, int]], contiguous: bool) -> tuple[AttentionBatch, int]:
    """``rows``: ``(queries, context length)`` each; also the number of blocks."""
    counts = [-(-length // BLOCK) for _, length in rows]
    order = torch.arange(sum(counts)) if contiguous else torch.randperm(sum(counts))
    tables = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    for row, blocks in enumerate(order.split(counts)):
        tables[row, : counts[row]] = blocks
    queries = torch.tensor([0] + [n for n, _ in rows])
    batch = AttentionBatch(
        num_decodes=sum(n == 1 for n, _ in rows),
        block_tables=tables,
        context_lens=torch.tensor([length for _, length in rows], dtype=torch.int32),
        query_starts=queries.cumsum(0).int(),
        max_query_len=max(n for n, _ in rows),
        max_context_len=max(length for _, length in rows),
    )
    return batch, sum(counts)


def step_ms(rows: list[tuple[int, int]], dtype: torch.dtype, kind: str, repeats: int, plain: bool) -> float:
    """Milliseconds of attention in all layers of one step; a new step plans anew."""
    batch, num_blocks = make_batch(rows, kind != "scattered")
    caches = make_caches(num_blocks, dtype, kind == "int8")
    q = torch.randn(sum(n for n, _ in rows), HEADS, DIM).to(dtype)
    attention = reference.attention if plain else kernels.attention

    def step() -> None:
        batch.scratch.clear()
        for cache in caches:
            attention(q, cache, batch, scale=DIM**-0.5)

    return best_ms(step, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    quick = parser.parse_args().quick
    cases: list[tuple[str, list[tuple[int, int]]]] = [
        (f"decode {rows} x {length}", [(1, length - 3 * row) for row in range(rows)])
        for rows, length in ((1, 200), (1, 4096), (8, 64), (8, 200), (8, 1024), (8, 4096))
    ]
    cases += [(f"prefill {n} on {p}", [(n, n + p)]) for n, p in ((512, 0), (64, 1024), (512, 1536))]
    if quick:
        cases = cases[:1] + cases[3:4] + cases[6:7]
    print(f"{torch.get_num_threads()} threads; ms of attention in a step of {LAYERS} layers")
    print(f"{'':22}{'reference':>12}{'in place':>12}{'scattered':>12}{'int8':>12}")
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            for name, rows in cases:
                plain = step_ms(rows, dtype, "in place", 1 if quick else 2, plain=True)
                fast = [
                    step_ms(rows, dtype, kind, 3 if quick else 9, plain=False)
                    for kind in ("in place", "scattered", "int8")
                ]
                figures = "".join(f"{ms:12.2f}" for ms in (plain, *fast))
                print(f"{str(dtype)[6:]:9}{name:19}{figures}"[:90], flush=True)


if __name__ == "__main__":
    main()
