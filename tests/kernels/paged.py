"""Paged batches for tests: a cache full of NaN in which only the rows' own slots hold numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanochat import kernels
from nanochat.kernels import AttentionBatch, LayerCache

NAN_BITS_INT8 = 127
"""INT8 has no NaN; unused slots hold this, under a NaN scale."""


@dataclass
class Case:
    """One packed batch with what a dense computation needs to check it."""

    q: torch.Tensor
    cache: LayerCache
    batch: AttentionBatch
    contexts: list[tuple[torch.Tensor, torch.Tensor]]
    """K and V ``[L, Hkv, D]`` of each row, as the cache holds them."""


def empty_cache(
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    *,
    int8: bool,
    device: torch.device | None = None,
) -> LayerCache:
    """A cache whose every slot is poison."""
    shape = (num_blocks, block_size, kv_heads, dim)
    if not int8:
        return LayerCache(*(torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2)))
    data = [torch.full(shape, NAN_BITS_INT8, dtype=torch.int8, device=device) for _ in range(2)]
    scales = [torch.full(shape[:3], float("nan"), dtype=torch.float16, device=device) for _ in range(2)]
    return LayerCache(*data, *scales)


def make_case(
    rows: list[tuple[int, int]],
    *,
    num_decodes: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    int8: bool = False,
    contiguous: bool = False,
    seed: int = 0,
) -> Case:
    """``rows``: ``(queries, context length)`` each, decodes first; block tables permuted at random."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    counts = [-(-length // block_size) for _, length in rows]
    num_blocks = sum(counts) + 3
    cache = empty_cache(num_blocks, block_size, kv_heads, dim, dtype, int8=int8)
    order = torch.arange(num_blocks) if contiguous else torch.randperm(num_blocks, generator=generator)
    tables = torch.zeros(len(rows), max([*counts, 1]) + 1, dtype=torch.int32)
    contexts = []
    taken = 1
    for row, (_, length) in enumerate(rows):
        blocks = order[taken : taken + counts[row]]
        taken += counts[row]
        tables[row, : counts[row]] = blocks
        positions = torch.arange(length)
        slots = blocks[positions // block_size] * block_size + positions % block_size
        k, v = randn(length, kv_heads, dim), randn(length, kv_heads, dim)
        kernels.reference.store_kv(k, v, cache, slots)
        contexts.append(kernels.reference.read_kv(cache, tables[row], length))
    queries = [n for n, _ in rows]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    batch = AttentionBatch(
        num_decodes=sum(n == 1 for n in queries) if num_decodes is None else num_decodes,
        block_tables=tables,
        context_lens=torch.tensor([length for _, length in rows], dtype=torch.int32),
        query_starts=starts,
        max_query_len=max(queries),
        max_context_len=max(length for _, length in rows),
    )
    return Case(randn(sum(queries), heads, dim), cache, batch, contexts)


def dense_attention(case: Case, *, scale: float, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
    """The same in float64, head by head and query by query, from the definition."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    group = case.q.shape[1] // case.cache.k.shape[2]
    starts = case.batch.query_starts.tolist()
    for row, (k, v) in enumerate(case.contexts):
        length, count = k.shape[0], starts[row + 1] - starts[row]
        if length == 0:
            continue
        for i in range(count):
            last = length - count + i
            first = max(0, last - window + 1) if window else 0
            for head in range(case.q.shape[1]):
                keys = k[first : last + 1, head // group].double()
                scores = keys @ case.q[starts[row] + i, head].double() * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = torch.softmax(scores, dim=0)
                out[starts[row] + i, head] = weights @ v[first : last + 1, head // group].double()
    return out
