"""What the kernel benchmark measures with: paged test cases, float64 references, timing by graph replay.

Times are medians over replays of a CUDA graph, divided by its calls: launch gaps are a graph's. A call has inputs
and a result of its own. Where their number is `copies_beyond_l2`, all of them exceed the L2 cache several times,
so that nothing is found there; benchmarks with fewer say so: they are as warm as after the kernel before in a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nanochat.kernels import reference
from nanochat.kernels.cache import AttentionBatch, LayerCache

L2_BYTES = 60 << 20
BLOCK_SIZE = 16
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
"""Qwen3-0.6B's attention."""


@dataclass(slots=True)
class Case:
    """One attention call's inputs."""

    q: torch.Tensor
    cache: LayerCache
    batch: AttentionBatch
    k: torch.Tensor
    """What the cache holds, ``[R, L, Hkv, D]`` in the query's type."""
    v: torch.Tensor


def paged_case(
    rows: int, queries: int, context: int, *, int8: bool, decode: bool, dtype: torch.dtype = torch.bfloat16
) -> Case:
    """``rows`` equal rows, their blocks scattered over the cache in random order."""
    device = torch.device("cuda")
    per_row = -(-context // BLOCK_SIZE)
    blocks = rows * per_row
    tables = torch.randperm(blocks, device=device).view(rows, per_row).int()
    k, v = (torch.randn(rows, context, KV_HEADS, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
    shape = (blocks, BLOCK_SIZE, KV_HEADS)
    if int8:
        cache = LayerCache(
            *(torch.empty(*shape, HEAD_DIM, device=device, dtype=torch.int8) for _ in range(2)),
            *(torch.empty(shape, device=device, dtype=torch.float16) for _ in range(2)),
        )
    else:
        cache = LayerCache(*(torch.empty(*shape, HEAD_DIM, device=device, dtype=dtype) for _ in range(2)))
    positions = torch.arange(context, device=device)
    slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    for row in range(rows):
        reference.store_kv(k[row], v[row], cache, slots[row])
    starts = torch.arange(rows + 1, device=device, dtype=torch.int32) * queries
    lens = torch.full((rows,), context, device=device, dtype=torch.int32)
    q = torch.randn(rows * queries, HEADS, HEAD_DIM, device=device, dtype=dtype)
    batch = AttentionBatch(rows if decode else 0, tables, lens, starts, queries, context)
    return Case(q, cache, batch, k, v)


def stored_kv(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as the cache holds them: dequantised if it is INT8. ``[R, L, Hkv, D]`` float32."""
    pairs = [
        reference.read_kv(case.cache, table, case.batch.max_context_len) for table in case.batch.block_tables
    ]
    return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])


def exact_attention(case: Case, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64, one row and one block of queries at a time."""
    rows, context = k.shape[:2]
    q = case.q.unflatten(0, (rows, -1))
    queries = q.shape[1]
    out = torch.empty(case.q.shape, dtype=torch.float64, device=q.device).unflatten(0, (rows, -1))
    positions = torch.arange(context, device=q.device)
    for row in range(rows):
        keys = k[row].double().repeat_interleave(HEADS // KV_HEADS, 1)
        values = v[row].double().repeat_interleave(HEADS // KV_HEADS, 1)
        for start in range(0, queries, 512):
            part = q[row, start : start + 512].double()
            scores = torch.einsum("qhd,khd->hqk", part, keys) * HEAD_DIM**-0.5
            limit = context - queries + start + torch.arange(part.shape[0], device=q.device)
            scores.masked_fill_(positions > limit[:, None], float("-inf"))
            out[row, start : start + 512] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out.flatten(0, 1)


def sdpa(case: Case) -> torch.Tensor:
    """PyTorch's attention over the same K and V laid out contiguously: ``[T, H, D]``."""
    rows = case.k.shape[0]
    q = case.q.unflatten(0, (rows, -1)).transpose(1, 2)
    causal = q.shape[2] > 1
    out = torch.nn.functional.scaled_dot_product_attention(
        q, case.k.transpose(1, 2), case.v.transpose(1, 2), is_causal=causal, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def format_value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def copies_beyond_l2(num_bytes: int) -> int:
    """How many inputs of this size rotate: together at least four L2s, unless that takes more than 1,024 of them."""
    return max(2, min(1024, -(-4 * L2_BYTES // num_bytes)))


def time_us(calls: Sequence[Callable[[], object]], replays: int = 20) -> float:
    """Median microseconds of one call, from replays of a graph of all of them (at least 16 a graph)."""
    calls = list(calls) * -(-16 // len(calls))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the inputs were made on another stream
    with torch.cuda.stream(stream):
        for call in calls:  # what a batch keeps for its next layers is made here, not in the graph
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            # All results stay until the end: else each would get the memory of the one before, warm in the L2.
            results = [call() for call in calls]
        times = []
        for _ in range(replays + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / len(calls))
        del results
    return statistics.median(times[2:])


def read_bandwidth(num_bytes: int = 2 << 30) -> float:
    """TB/s of a sum: what a kernel that writes next to nothing can read, which is more than a copy moves."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device="cuda")
    return num_bytes / time_us([source.sum], replays=3) / 1e6


def copy_bandwidth(num_bytes: int = 2 << 30) -> float:
    """TB/s of a device-to-device copy, bytes read and bytes written counted."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)  # in a graph this would be a copy node, which is slower
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * num_bytes / statistics.median(times[2:]) / 1e9


def gemm_rate(size: int = 8192) -> float:
    """TFLOP/s of a square BF16 matrix product on random data."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / time_us([lambda: a @ b], replays=3) / 1e6
