"""Attention over the paged cache on the CPU, by PyTorch's fused attention wherever its rules allow.

A context whose blocks lie side by side is read in place; others are copied together first. Short decode
rows share one call. Long prompts are cut into query tiles, so that a mask never grows beyond one tile.
INT8 contexts, and those with a softcap, are read in tiles of keys whose results are merged by their
log-sum-exp (arXiv:2205.14135), so that no float copy of a long context is made.
Knows nothing of models or schedules; `cpu_plan` decides what is computed together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.cpu_plan import Context, DecodePlan, Planner, PrefillCall


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
    if batch.num_decodes == q.shape[0]:
        return decode_attention(q, cache, batch, scale=scale, window=window, softcap=softcap)
    prefills = prefill_attention(q, cache, batch, scale=scale, window=window, softcap=softcap)
    if batch.num_decodes == 0:
        return prefills
    decodes = decode_attention(q, cache, batch, scale=scale, window=window, softcap=softcap)
    return torch.cat((decodes, prefills))


def decode_attention(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """See `nanochat.kernels.decode_attention`."""
    decodes, _ = _plan(q, cache, batch, window, softcap)
    if batch.num_decodes < q.shape[0]:
        q = q[: batch.num_decodes]
    return _decode(q, cache, decodes, scale, softcap)


def prefill_attention(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """See `nanochat.kernels.prefill_attention`."""
    _, prefills = _plan(q, cache, batch, window, softcap)
    first = batch.num_decodes
    covered = sum(call.last - call.first for call in prefills) == q.shape[0] - first
    out = torch.empty_like(q[first:]) if covered else torch.zeros_like(q[first:])
    for call in prefills:
        _prefill(q, out[call.first - first : call.last - first], cache, call, scale, softcap)
    return out


def _plan(
    q: torch.Tensor, cache: LayerCache, batch: AttentionBatch, window: int, softcap: float
) -> tuple[DecodePlan, list[PrefillCall]]:
    """Made for the first layer with this window, and kept for the others."""
    in_tiles = cache.k_scale is not None or softcap > 0
    key = ("plan", window, in_tiles, softcap > 0)
    plan: tuple[DecodePlan, list[PrefillCall]] | None = batch.scratch.get(key)
    if plan is None:
        planner = Planner(
            batch,
            cache.block_size,
            window,
            decode_dtype=_decode_dtype(q, cache),
            prefill_dtype=q.dtype,
            in_tiles=in_tiles,
            fused=not softcap,
            fills_up=not softcap and q.dtype != torch.float32,
        )
        plan = batch.scratch[key] = planner.decode(), planner.prefill()
    return plan


def _decode_dtype(q: torch.Tensor, cache: LayerCache) -> torch.dtype:
    """What decode rows are computed in: INT8 becomes float32 first, and rounding that on costs a pass."""
    return q.dtype if cache.k_scale is None else torch.float32


def _decode(
    q: torch.Tensor, cache: LayerCache, plan: DecodePlan, scale: float, softcap: float
) -> torch.Tensor:
    """``q [R, H, D]`` of the decode rows to ``[R, H, D]``."""
    if not plan.calls:
        return torch.zeros_like(q)
    wide = q.to(_decode_dtype(q, cache))
    ordered = wide if plan.order is None else wide.index_select(0, plan.order)
    results = []
    first = 0
    for call in plan.calls:
        context = call.tiles[0]
        rows = ordered if context.rows == ordered.shape[0] else ordered[first : first + context.rows]
        first += context.rows
        if len(call.tiles) == 1:
            results.append(_decode_rows(rows, cache, context, call.mask, scale, softcap))
        else:
            kv_heads, dim = cache.k.shape[2:]
            grouped = rows.reshape(kv_heads, 1, -1, dim)
            out = _attend_in_tiles(grouped, cache, call.tiles, None, scale, softcap)
            results.append(out.view(1, -1, dim))
    together = (results[0] if len(results) == 1 else torch.cat(results)).to(q.dtype)
    if plan.order is None:
        return together
    return torch.zeros_like(q).index_copy_(0, plan.order, together)


def _decode_rows(
    q: torch.Tensor,
    cache: LayerCache,
    context: Context,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """``q [rows, H, D]`` of the context's rows, in one call."""
    k, v = context.read(cache, q.dtype)
    if q.dtype == torch.float32 or softcap:
        # A KV head's query heads see the same keys, so they can stand as queries of one head.
        grouped = q.view(q.shape[0], k.shape[1], -1, q.shape[2])
        if softcap:
            return _softcapped(grouped, k, v, mask, scale, softcap)[0].flatten(1, 2)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).flatten(1, 2)
    # PyTorch's 16-bit matrix products are faster one query at a time.
    out = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.squeeze(2)


def _prefill(
    q: torch.Tensor, out: torch.Tensor, cache: LayerCache, call: PrefillCall, scale: float, softcap: float
) -> None:
    """The call's tokens of ``q [T, H, D]``, to ``out [n, H, D]``."""
    shape = (call.last - call.first, cache.k.shape[2], -1, q.shape[2])
    grouped = q[call.first : call.last].view(shape).permute(1, 2, 0, 3)
    result = out.view(shape).permute(1, 2, 0, 3)
    grouped = _filled_up(grouped, call.queries)
    if softcap or len(call.tiles) > 1:
        attended = _attend_in_tiles(grouped, cache, call.tiles, call.mask, scale, softcap)
    else:
        k, v = (_filled_up(x, call.keys) for x in call.tiles[0].read(cache, q.dtype))
        k, v = (_share(x, grouped.shape[1]) for x in (k, v))
        attended = F.scaled_dot_product_attention(
            grouped, k, v, attn_mask=call.mask, is_causal=call.is_causal, scale=scale
        )
    result.copy_(attended[:, :, : shape[0]])


def _filled_up(x: torch.Tensor, size: int) -> torch.Tensor:
    """``[a, b, n, D]`` to ``[a, b, size, D]``, the last of them zeros."""
    return x if x.shape[2] == size else F.pad(x, (0, 0, 0, size - x.shape[2]))


def _share(x: torch.Tensor, copies: int) -> torch.Tensor:
    """``[1, Hkv, L, D]`` to ``[Hkv, copies, L, D]``, a view: each KV head serves several query heads."""
    return x.transpose(0, 1).expand(-1, copies, -1, -1)


def _attend_in_tiles(
    q: torch.Tensor,
    cache: LayerCache,
    tiles: list[Context],
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """``q [Hkv, e, n, D]`` over all ``tiles`` of one row's keys; ``mask [n, keys]`` is that of the last."""
    total: torch.Tensor | None = None
    total_lse: torch.Tensor | None = None
    for tile in tiles:
        k, v = tile.read(cache, q.dtype)
        tile_mask = mask if tile is tiles[-1] else None
        if tile_mask is not None:
            k, v = (_filled_up(x, tile_mask.shape[1]) for x in (k, v))
        k, v = (_share(x, q.shape[1]) for x in (k, v))
        if softcap:
            out, lse = _softcapped(q, k, v, tile_mask, scale, softcap)
        else:
            # The public function keeps the log-sum-exp to itself.
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            out, lse = fused(q, k, v, attn_mask=tile_mask, scale=scale)
        if total is None or total_lse is None:
            total, total_lse = out.float(), lse
        else:
            # Of the two parts, this one has the share e^lse / (e^total_lse + e^lse).
            total = torch.lerp(total, out.float(), torch.sigmoid(lse - total_lse).unsqueeze(-1))
            total_lse = torch.logaddexp(total_lse, lse)
    if total is None:
        raise ValueError("tiles must not be empty")
    return total.to(q.dtype)


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
