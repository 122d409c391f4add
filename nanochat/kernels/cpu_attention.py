"""Attention over the paged cache on the CPU, by PyTorch's fused attention wherever its rules allow.

A context whose blocks lie side by side is read in place; others are copied together first. Short decode
rows share one call. Long prompts are cut into query tiles, so that a mask never grows beyond one tile.
INT8 contexts, and those with a softcap, are read in tiles of keys whose results are merged by their
log-sum-exp (arXiv:2205.14135), so that no float copy of a long context is made.
docs/kernels.md has the measurements behind the constants. Knows nothing of models or schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.cpu_plan import (
    GROUP_TOKENS,
    DecodeGroup,
    DecodePlan,
    PrefillRow,
    Span,
    plan_decode,
    plan_prefill,
)

QUERY_TILE = 256
"""Queries that share one mask."""
KEY_TILE = 1024
"""Tokens that are converted from INT8 at a time: their float32 copy stays in a core's own cache."""


@dataclass(slots=True)
class _Reader:
    """Reads K and V of one layer, through buffers that all layers of a step share."""

    cache: LayerCache
    dtype: torch.dtype
    scratch: dict[Any, Any]

    def read(self, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """``[span.length, Hkv, D]`` each, in the queries' type; valid until the next read."""
        cache = self.cache
        k = self._read(cache.k.flatten(0, 1), cache.k_scale, span, "k")
        return k, self._read(cache.v.flatten(0, 1), cache.v_scale, span, "v")

    def _read(self, data: torch.Tensor, scale: torch.Tensor | None, span: Span, name: str) -> torch.Tensor:
        data = self._select(data, span, name)
        if scale is None:
            return data
        scale = self._select(scale.flatten(0, 1), span, name + "_scale")
        wide = self._buffer(name + "_float32", data.shape, torch.float32)
        wide.copy_(data).mul_(scale.float().unsqueeze(-1))
        if self.dtype == torch.float32:
            return wide
        return self._buffer(name + "_converted", data.shape, self.dtype).copy_(wide)

    def _select(self, data: torch.Tensor, span: Span, name: str) -> torch.Tensor:
        if span.slots is None:
            return data.narrow(0, span.start, span.length)
        shape = (span.slots.shape[0], *data.shape[1:])
        return torch.index_select(data, 0, span.slots, out=self._buffer(name, shape, data.dtype))

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = 1
        for n in shape:
            size *= n
        buffer = self.scratch.get(("buffer", name))
        if buffer is None or buffer.numel() < size:
            buffer = self.scratch["buffer", name] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(shape)


def _softcapped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with capped scores, which the fused one can't do: ``(out, log-sum-exp)``, both float32."""
    scores = q.float() @ k.float().transpose(-1, -2)
    scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    lse = torch.logsumexp(scores, dim=-1)
    return scores.sub_(lse.unsqueeze(-1)).exp_() @ v.float(), lse


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
    is_causal: bool = False,
) -> torch.Tensor:
    """``q [a, b, n, D]`` with ``k``, ``v`` ``[a, b, L, D]`` and ``mask`` broadcast to ``[a, b, n, L]``."""
    if softcap:
        return _softcapped(q, k, v, mask, scale, softcap)[0].to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)


def _attend_in_tiles(
    q: torch.Tensor,
    reader: _Reader,
    tiles: list[Span],
    last_mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """``q [Hkv, e, n, D]`` over all ``tiles`` of keys, the last of them under ``last_mask [n, its length]``."""
    total: torch.Tensor | None = None
    total_lse: torch.Tensor | None = None
    for tile in tiles:
        k, v = (_by_head(x, q.shape[1]) for x in reader.read(tile))
        mask = last_mask if tile is tiles[-1] else None
        if softcap:
            out, lse = _softcapped(q, k, v, mask, scale, softcap)
        else:
            # The public function keeps the log-sum-exp to itself.
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            out, lse = fused(q, k, v, attn_mask=mask, scale=scale)
        if total is None or total_lse is None:
            total, total_lse = out.float(), lse
        else:
            # Of two parts, the second has the share e^lse / (e^total + e^lse).
            total = torch.lerp(total, out.float(), torch.sigmoid(lse - total_lse).unsqueeze(-1))
            total_lse = torch.logaddexp(total_lse, lse)
    if total is None:
        raise ValueError("tiles must not be empty")
    return total.to(q.dtype)


def _by_head(x: torch.Tensor, copies: int) -> torch.Tensor:
    """``[L, Hkv, D]`` to ``[Hkv, copies, L, D]``, a view: each KV head serves several query heads."""
    return x.transpose(0, 1).unsqueeze(1).expand(-1, copies, -1, -1)


def attention(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """See `nanochat.kernels.attention`."""
    if batch.num_decodes == batch.num_rows == q.shape[0]:
        return _decode(q, cache, batch, scale, window, softcap)
    prefills = _prefill(q, cache, batch, scale, window, softcap)
    if batch.num_decodes == 0:
        return prefills
    return torch.cat((_decode(q, cache, batch, scale, window, softcap), prefills))


def _decode(
    q: torch.Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, window: int, softcap: float
) -> torch.Tensor:
    """The decode rows: ``q [T, H, D]`` to ``[num_decodes, H, D]``."""
    q = q[: batch.num_decodes]
    tiled = cache.k_scale is not None or softcap > 0
    key = ("decode", window)
    plan: DecodePlan | None = batch.scratch.get(key)
    if plan is None:
        group_tokens = KEY_TILE if tiled else GROUP_TOKENS
        plan = plan_decode(batch, cache.block_size, window, q.dtype, group_tokens)
        batch.scratch[key] = plan
    ordered = q if plan.order is None else q.index_select(0, plan.order)
    reader = _Reader(cache, q.dtype, batch.scratch)
    results = []
    first = 0
    for group in plan.groups:
        rows = ordered[first : first + group.num_rows]
        first += group.num_rows
        if tiled and group.length > KEY_TILE:
            results.append(_decode_in_tiles(rows, reader, group, scale, softcap))
        else:
            results.append(_decode_group(rows, reader, group, scale, softcap))
    if plan.order is None:
        return results[0] if len(results) == 1 else torch.cat(results)
    out = torch.zeros_like(q)
    return out.index_copy_(0, plan.order, torch.cat(results)) if results else out


def _decode_group(
    q: torch.Tensor, reader: _Reader, group: DecodeGroup, scale: float, softcap: float
) -> torch.Tensor:
    """``q [rows, H, D]`` of the group's rows, in one call."""
    rows, heads, _ = q.shape
    k, v = (
        x.unflatten(0, (rows, group.length)).transpose(1, 2) for x in reader.read(group.span)
    )  # [rows, Hkv, length, D]
    kv_heads = k.shape[1]
    if q.dtype == torch.float32 or softcap:
        # A KV head's query heads see the same keys, so they can stand as queries of one head.
        grouped = q.unflatten(1, (kv_heads, heads // kv_heads))
        return _attend(grouped, k, v, group.mask, scale, softcap).flatten(1, 2)
    # PyTorch's 16-bit matrix products are faster one query at a time.
    out = F.scaled_dot_product_attention(
        q.unsqueeze(2), k, v, attn_mask=group.mask, scale=scale, enable_gqa=True
    )
    return out.squeeze(2)


def _decode_in_tiles(
    q: torch.Tensor, reader: _Reader, group: DecodeGroup, scale: float, softcap: float
) -> torch.Tensor:
    """``q [1, H, D]`` of a long row."""
    _, heads, dim = q.shape
    kv_heads = reader.cache.k.shape[2]
    span = group.span
    tiles = [
        span.part(begin, min(begin + KEY_TILE, span.length)) for begin in range(0, span.length, KEY_TILE)
    ]
    grouped = q.reshape(kv_heads, 1, heads // kv_heads, dim)
    return _attend_in_tiles(grouped, reader, tiles, None, scale, softcap).view(1, heads, dim)


def _prefill(
    q: torch.Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, window: int, softcap: float
) -> torch.Tensor:
    """The other rows: ``q [T, H, D]`` to ``[T - num_decodes, H, D]``."""
    key = ("prefill", window)
    plan: list[PrefillRow] | None = batch.scratch.get(key)
    if plan is None:
        plan = batch.scratch[key] = plan_prefill(batch, cache.block_size, window)
    first = batch.num_decodes
    covered = sum(row.num_queries for row in plan) == q.shape[0] - first
    out = torch.empty_like(q[first:]) if covered else torch.zeros_like(q[first:])
    reader = _Reader(cache, q.dtype, batch.scratch)
    kv_heads = cache.k.shape[2]
    by_head = (kv_heads, q.shape[1] // kv_heads)
    for row in plan:
        begin, end = row.first_token, row.first_token + row.num_queries
        queries = q[begin:end].unflatten(1, by_head).permute(1, 2, 0, 3)
        results = out[begin - first : end - first].unflatten(1, by_head).permute(1, 2, 0, 3)
        if cache.k_scale is not None or softcap:
            _prefill_in_tiles(queries, results, reader, row, batch, scale, softcap)
        else:
            _prefill_row(queries, results, reader, row, batch, scale)
    return out


def _prefill_row(
    q: torch.Tensor,
    out: torch.Tensor,
    reader: _Reader,
    row: PrefillRow,
    batch: AttentionBatch,
    scale: float,
) -> None:
    """``q``, ``out`` ``[Hkv, G, n, D]`` of one row, its whole context at hand."""
    k, v = (_by_head(x, q.shape[1]) for x in reader.read(row.span))
    if row.first_position == 0 and not row.window:
        out.copy_(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale))
        return
    for begin, end in _query_tiles(row.num_queries):
        first_key, last_key = _visible_keys(row, begin, end)
        keys = slice(first_key - row.first_key, last_key - row.first_key)
        mask = _mask(batch, row.window, q.dtype, end - begin, last_key - first_key)
        out[:, :, begin:end] = F.scaled_dot_product_attention(
            q[:, :, begin:end], k[:, :, keys], v[:, :, keys], attn_mask=mask, scale=scale
        )


def _prefill_in_tiles(
    q: torch.Tensor,
    out: torch.Tensor,
    reader: _Reader,
    row: PrefillRow,
    batch: AttentionBatch,
    scale: float,
    softcap: float,
) -> None:
    """``q``, ``out`` ``[Hkv, G, n, D]`` of one row, its context read tile by tile."""
    for begin, end in _query_tiles(row.num_queries):
        first_key, last_key = _visible_keys(row, begin, end)
        edges = [first_key, last_key]
        if not row.window and last_key - first_key > KEY_TILE:
            # What lies before the tile's own tokens is seen by all of its queries: no mask.
            own = row.first_position + begin
            edges = [*range(first_key, own, KEY_TILE), own, last_key]
        tiles = [row.span.part(a - row.first_key, b - row.first_key) for a, b in pairwise(edges)]
        mask = _mask(batch, row.window, q.dtype, end - begin, tiles[-1].length)
        out[:, :, begin:end] = _attend_in_tiles(q[:, :, begin:end], reader, tiles, mask, scale, softcap)


def _query_tiles(num_queries: int) -> list[tuple[int, int]]:
    return [(a, min(a + QUERY_TILE, num_queries)) for a in range(0, num_queries, QUERY_TILE)]


def _visible_keys(row: PrefillRow, begin: int, end: int) -> tuple[int, int]:
    """Positions ``first .. last - 1`` that at least one of the row's queries ``begin .. end - 1`` sees."""
    first = row.first_position + begin
    return max(0, first - row.window + 1) if row.window else 0, row.first_position + end


def _mask(
    batch: AttentionBatch, window: int, dtype: torch.dtype, num_queries: int, num_keys: int
) -> torch.Tensor | None:
    """``[num_queries, num_keys]``, added to the scores, for queries at the last ``num_queries`` keys.

    All such masks of a step are the lower right corner of one.
    """
    if num_queries == 1 and (not window or num_keys <= window):
        return None
    rows = min(QUERY_TILE, batch.max_query_len)
    columns = min(batch.max_context_len, window + rows - 1) if window else batch.max_context_len
    key = ("mask", window)
    mask: torch.Tensor | None = batch.scratch.get(key)
    if mask is None:
        visible = torch.ones(rows, columns, dtype=torch.bool).tril_(columns - rows)
        if window:
            visible.triu_(columns - rows - window + 1)
        mask = torch.zeros(rows, columns, dtype=dtype).masked_fill_(~visible, float("-inf"))
        batch.scratch[key] = mask
    return mask[rows - num_queries :, columns - num_keys :]
