"""Prefill attention over the paged cache: packed queries of many requests, chunks and prefixes alike.

A program takes a tile of query rows of one request, the query heads that share a KV head side by side, and
walks over the keys that tile may see, in the style of FlashAttention-2 (arXiv:2307.08691): first the tiles
that every row sees whole, without masks, then those on the diagonal; with a window, those on its edge before.
Which request a program serves is found on the device, so that nothing but the packed length is known to the
host. Knows nothing of requests or models.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanochat.kernels.attention_common import (
    ROWS_OF_PREFILLS,
    check_layout,
    int8_to_float,
    load_blocks,
    score_scales,
    slots_of,
)
from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.kv_convert import convert_prefills, is_worth_converting
from nanochat.kernels.triton_utils import INTERPRETED, dependent_launch, device_info, next_power_of_2, tanh
from nanochat.kernels.tuning import PrefillConfig, prefill_config, prefill_int8_config

HOPPER_HEAD_DIMS = (64, 128)
HOPPER_MIN_CONTEXT = 64
"""Where `attention_prefill_hopper` is faster on an INT8 cache: heads of these dims, rows longer than this."""


def prefill_attention(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `nanochat.kernels.prefill_attention`. ``out [T - num_decodes, H, D]``, if given, receives the result."""
    check_layout(q, cache, batch)
    q = q[batch.num_decodes :]
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.shape[0] == 0:
        return out
    way = prefill_converted if is_worth_converting(q, cache, batch) else prefill_in_place
    way(q, cache, batch, out, scale=scale, window=window, softcap=softcap)
    return out


def prefill_converted(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    out: torch.Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """Launch for ``q [T - num_decodes, H, D]`` and an INT8 cache, which is converted first, without checks."""
    copy, copy_batch = convert_prefills(cache, batch, q.dtype, window)
    config, dependent = _config(q, copy, batch), dependent_launch(q.device)
    launch_prefill(
        q, copy, copy_batch, out, config, scale=scale, window=window, softcap=softcap, dependent=dependent
    )


def prefill_in_place(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    out: torch.Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """Launch for ``q [T - num_decodes, H, D]``, whatever the cache's type, without checks."""
    int8_config = prefill_int8_config(batch.max_context_len)
    if (
        device_info(q.device).capability == 90
        and not INTERPRETED
        and cache.k_scale is not None
        and q.dtype != torch.float32
        and q.shape[2] in HOPPER_HEAD_DIMS
        and q.shape[1] // cache.k.shape[2] <= int8_config.block_m
        and batch.max_context_len > HOPPER_MIN_CONTEXT
        and window == 0
        and softcap == 0
    ):
        from nanochat.kernels.attention_prefill_hopper import launch_prefill_int8

        launch_prefill_int8(q, cache, batch, out, int8_config, scale=scale)
        return
    config = _config(q, cache, batch)
    launch_prefill(q, cache, batch, out, config, scale=scale, window=window, softcap=softcap)


def _config(q: torch.Tensor, cache: LayerCache, batch: AttentionBatch) -> PrefillConfig:
    return prefill_config(
        device_info(q.device).capability,
        next_power_of_2(q.shape[2]),
        q.element_size(),
        cache.k.element_size(),
        batch.max_context_len,
    )


def launch_prefill(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    out: torch.Tensor,
    config: PrefillConfig,
    *,
    scale: float,
    window: int,
    softcap: float,
    dependent: bool = False,
) -> None:
    """Launch for ``q [T - num_decodes, H, D]``, without checks; ``dependent``: while the kernel before it ends."""
    first_row = batch.num_decodes
    tokens, heads, head_dim = q.shape
    rows = batch.num_rows - first_row
    kv_heads = cache.k.shape[2]
    group = heads // kv_heads
    block_m = max(config.block_m, next_power_of_2(group))
    block_q = block_m // group
    qk_scale, cap = score_scales(scale, softcap)
    # A row of n tokens starts at most one partly filled tile; so do the gaps before and after all rows.
    tiles = tokens // block_q + rows + 2
    _prefill_kernel[(tiles * kv_heads,)](
        q,
        cache.k,
        cache.v,
        cache.k_scale,
        cache.v_scale,
        batch.block_tables[first_row:],
        batch.context_lens[first_row:],
        batch.query_starts[first_row:],
        out,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        cache.k.stride(1),
        cache.k.stride(2),
        0 if cache.k_scale is None else cache.k_scale.stride(1),
        batch.block_tables.stride(0),
        tokens,
        rows,
        first_row,
        window,
        qk_scale,
        cap,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.block_size,
        BLOCK_Q=block_q,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_R=max(32, next_power_of_2(rows + 2)),
        WINDOWED=window > 0,
        CAPPED=softcap > 0,
        NATIVE=not INTERPRETED,
        HAS_BF16=q.element_size() == 2 and device_info(q.device).capability >= 80 and not INTERPRETED,
        DEPENDENT=dependent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=dependent,
    )


@triton.jit(
    do_not_specialize=["table_stride", "num_tokens", "num_rows", "first_token", "window"],
    do_not_specialize_on_alignment=ROWS_OF_PREFILLS,
)
def _prefill_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor | None,
    v_scale_ptr: tl.tensor | None,
    block_tables_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    q_stride_token: int,
    q_stride_head: int,
    out_stride_token: int,
    kv_stride_token: int,
    kv_stride_head: int,
    scale_stride_token: int,
    table_stride: int,
    num_tokens: int,
    num_rows: int,
    first_token: int,
    window: int,
    qk_scale: float,
    cap: float,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    NATIVE: tl.constexpr,
    HAS_BF16: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:  # the kernel after it waits: its programs would take places of this one's
        tl.extra.cuda.gdc_wait()
    # The last tiles of a prompt see the most keys, so they start first.
    head = tl.program_id(0) % KV_HEADS
    tile = tl.num_programs(0) // KV_HEADS - 1 - tl.program_id(0) // KV_HEADS

    # Rows 1 .. num_rows are real; rows 0 and num_rows + 1 are the tokens before and after them.
    rows = tl.arange(0, BLOCK_R)
    is_real = (rows >= 1) & (rows <= num_rows)
    starts = tl.load(query_starts_ptr + rows - 1, mask=is_real, other=first_token) - first_token
    ends = (
        tl.load(query_starts_ptr + rows, mask=rows <= num_rows, other=num_tokens + first_token) - first_token
    )
    lens = tl.load(context_lens_ptr + rows - 1, mask=is_real, other=0)
    starts = tl.where(rows == num_rows + 1, tl.sum(tl.where(rows == num_rows, ends, 0), 0), starts)
    row_tiles = starts // BLOCK_Q + rows
    row = tl.sum(((row_tiles <= tile) & (rows <= num_rows + 1)).to(tl.int32), 0) - 1
    start = tl.sum(tl.where(rows == row, starts, 0), 0)
    num_queries = tl.sum(tl.where(rows == row, ends, 0), 0) - start
    context_len = tl.sum(tl.where(rows == row, lens, 0), 0)
    first_query = (tile - start // BLOCK_Q - row) * BLOCK_Q
    if first_query >= num_queries:
        return

    members = tl.arange(0, BLOCK_M)
    queries = first_query + members // GROUP
    heads = head * GROUP + members % GROUP
    dims = tl.arange(0, BLOCK_D)
    is_query = (members < BLOCK_Q * GROUP) & (queries < num_queries)
    query_mask = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (start + queries).to(tl.int64)
    out_ptrs = out_ptr + (tokens * out_stride_token + heads * HEAD_DIM)[:, None] + dims[None, :]
    if context_len == 0:
        tl.store(out_ptrs, tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty), mask=query_mask)
        return

    q_ptrs = q_ptr + (tokens * q_stride_token + heads * q_stride_head)[:, None] + dims[None, :]
    q = tl.load(q_ptrs, mask=query_mask, other=0.0)
    lowest = context_len - num_queries + first_query
    query_positions = context_len - num_queries + queries
    end = tl.minimum(lowest + BLOCK_Q, context_len)
    first_key_tile = 0
    first_whole = 0
    whole_tiles = (lowest + 1) // BLOCK_N
    if WINDOWED:
        first_key_tile = tl.maximum(lowest - window + 1, 0) // BLOCK_N
        # Where the last query's window has begun, those of all have.
        first_whole = tl.cdiv(tl.maximum(lowest + BLOCK_Q - window, 0), BLOCK_N)
        first_whole = tl.minimum(first_whole, whole_tiles)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = block_tables_ptr + (row - 1).to(tl.int64) * table_stride
    if k_scale_ptr is not None:
        k_scale_ptr += head
        v_scale_ptr += head
    # Tiles on the edge of the window, whole ones, and those on the diagonal.
    for PART in tl.static_range(0 if WINDOWED else 1, 3):
        acc, norm, peak = _attend(
            q,
            acc,
            norm,
            peak,
            qk_scale,
            query_positions,
            k_ptr + head * kv_stride_head,
            v_ptr + head * kv_stride_head,
            k_scale_ptr,
            v_scale_ptr,
            table,
            first_key_tile if PART == 0 else first_whole if PART == 1 else whole_tiles,
            first_whole if PART == 0 else whole_tiles if PART == 1 else tl.cdiv(end, BLOCK_N),
            context_len,
            kv_stride_token,
            scale_stride_token,
            window,
            cap,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_N,
            BLOCK_D,
            WINDOWED,
            CAPPED,
            NATIVE,
            HAS_BF16,
            PART != 1,
        )
    tl.store(out_ptrs, acc / norm[:, None], mask=query_mask)


@triton.jit
def _attend(
    q: tl.tensor,
    acc: tl.tensor,
    norm: tl.tensor,
    peak: tl.tensor,
    qk_scale: tl.tensor,
    query_positions: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor | None,
    v_scale_ptr: tl.tensor | None,
    table: tl.tensor,
    first_tile: tl.tensor,
    last_tile: tl.tensor,
    context_len: tl.tensor,
    kv_stride_token: tl.tensor,
    scale_stride_token: tl.tensor,
    window: tl.tensor,
    cap: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    NATIVE: tl.constexpr,
    HAS_BF16: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Fold key tiles ``first_tile .. last_tile - 1`` into the running softmax of the query tile."""
    INT8: tl.constexpr = k_scale_ptr is not None
    # With INT8 the weights carry V's scales, whose range FP16 has not.
    WEIGHT_DTYPE: tl.constexpr = tl.bfloat16 if HAS_BF16 else tl.float32
    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    # Block numbers are fetched a tile ahead: a load that waits for a load pipelines badly.
    blocks = load_blocks(table, first_tile, keys, context_len, BLOCK_N, BLOCK_SIZE)
    for tile in range(first_tile, last_tile):
        positions = tile * BLOCK_N + keys
        in_context = positions < context_len
        slots = slots_of(blocks, tile, keys, BLOCK_N, BLOCK_SIZE)
        kv_offsets = (slots * kv_stride_token)[:, None] + dims[None, :]
        if MASKED:
            kv_mask = in_context[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_ptr + kv_offsets, mask=kv_mask, other=0)
            v = tl.load(v_ptr + kv_offsets, mask=kv_mask, other=0)
        elif HEAD_DIM == BLOCK_D:
            k = tl.load(k_ptr + kv_offsets)
            v = tl.load(v_ptr + kv_offsets)
        else:
            k = tl.load(k_ptr + kv_offsets, mask=(dims < HEAD_DIM)[None, :], other=0)
            v = tl.load(v_ptr + kv_offsets, mask=(dims < HEAD_DIM)[None, :], other=0)
        if INT8:
            scale_offsets = slots * scale_stride_token
            k_scale = tl.load(k_scale_ptr + scale_offsets, mask=in_context, other=0.0).to(tl.float32)
            v_scale = tl.load(v_scale_ptr + scale_offsets, mask=in_context, other=0.0).to(tl.float32)
        blocks = load_blocks(table, tile + 1, keys, context_len, BLOCK_N, BLOCK_SIZE)

        if INT8:
            k = int8_to_float(k, q.dtype, NATIVE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if INT8:
            scores *= k_scale[None, :]
        to_log2 = qk_scale
        if CAPPED:
            scores = tanh(scores * qk_scale)
            to_log2 = cap
        if MASKED:
            visible = positions[None, :] <= query_positions[:, None]
            if WINDOWED:
                visible = visible & (positions[None, :] > query_positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * to_log2)
        base = new_peak
        if WINDOWED and MASKED:  # a row may have seen nothing yet
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores * to_log2 - base[:, None])
        shrink = tl.exp2(peak - base)
        norm = norm * shrink + tl.sum(weights, 1)
        if INT8:
            weights *= v_scale[None, :]
            v = int8_to_float(v, WEIGHT_DTYPE, NATIVE)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return acc, norm, peak
