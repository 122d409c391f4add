"""Prefill attention over an INT8 cache on compute capability 9.0, in Gluon: conversion hidden behind products.

Hopper's tensor cores take keys and values from shared memory only, and in 16 bits, so INT8 tiles must be read
from shared memory, converted and written back. Triton's own pipeline waits for each product before it goes
on, and that made INT8 prefill 1.6 times slower than BF16. Here V is converted while the scores' product runs,
and the next K while the output's product runs; otherwise this is `attention_prefill`'s kernel for rows
without window and soft cap. Gluon is part of the triton package; its names differ a little between versions.

Knows nothing of requests or models.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from nanochat.kernels.attention_common import ROWS_OF_PREFILLS, score_scales
from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.triton_utils import next_power_of_2
from nanochat.kernels.tuning import PrefillConfig

# Named differently before triton 3.7.
_load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def launch_prefill_int8(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    out: torch.Tensor,
    config: PrefillConfig,
    *,
    scale: float,
) -> None:
    """Launch for 16-bit ``q [T - num_decodes, H, D]`` and an INT8 cache, without checks.

    ``config``: 16 query rows a warp, and as many keys as query rows; its stages are two in any case. No more query
    heads may share a KV head than it has query rows.
    """
    tokens, heads, head_dim = q.shape
    first_row = batch.num_decodes
    rows = batch.num_rows - first_row
    kv_heads = cache.k.shape[2]
    group = heads // kv_heads
    block_q = config.block_m // group
    scale_stride = cache.k_scale.stride(1) if cache.k_scale is not None else 0
    _prefill_int8_kernel[((tokens // block_q + rows + 2) * kv_heads,)](
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
        scale_stride,
        batch.block_tables.stride(0),
        tokens,
        rows,
        first_row,
        score_scales(scale, 0.0)[0],
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.block_size,
        BLOCK_Q=block_q,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_R=max(32, next_power_of_2(rows + 2)),
        WARPS=config.num_warps,
        num_warps=config.num_warps,
    )


@gluon.jit(
    do_not_specialize=["table_stride", "num_tokens", "num_rows", "first_token"],
    do_not_specialize_on_alignment=ROWS_OF_PREFILLS,
)
def _prefill_int8_kernel(
    q_ptr: gl.tensor,
    k_ptr: gl.tensor,
    v_ptr: gl.tensor,
    k_scale_ptr: gl.tensor,
    v_scale_ptr: gl.tensor,
    block_tables_ptr: gl.tensor,
    context_lens_ptr: gl.tensor,
    query_starts_ptr: gl.tensor,
    out_ptr: gl.tensor,
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
    qk_scale: float,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_R: gl.constexpr,
    WARPS: gl.constexpr,
) -> None:
    VECTOR: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_DIM, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLS: gl.constexpr = gl.SliceLayout(0, SCORES)
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [512 // HEAD_DIM, HEAD_DIM // 16], [WARPS, 1], [1, 0])
    WORDS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    RAW: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    Q_TYPE: gl.constexpr = q_ptr.dtype.element_ty

    # Which row and tile this is: as in `attention_prefill`.
    head = gl.program_id(0) % KV_HEADS
    q_tile = gl.num_programs(0) // KV_HEADS - 1 - gl.program_id(0) // KV_HEADS
    rows = gl.arange(0, BLOCK_R, layout=VECTOR)
    is_real = (rows >= 1) & (rows <= num_rows)
    starts = gl.load(query_starts_ptr + rows - 1, mask=is_real, other=first_token) - first_token
    ends = (
        gl.load(query_starts_ptr + rows, mask=rows <= num_rows, other=num_tokens + first_token) - first_token
    )
    lens = gl.load(context_lens_ptr + rows - 1, mask=is_real, other=0)
    starts = gl.where(rows == num_rows + 1, gl.sum(gl.where(rows == num_rows, ends, 0), 0), starts)
    row_tiles = starts // BLOCK_Q + rows
    row = gl.sum(((row_tiles <= q_tile) & (rows <= num_rows + 1)).to(gl.int32), 0) - 1
    start = gl.sum(gl.where(rows == row, starts, 0), 0)
    num_queries = gl.sum(gl.where(rows == row, ends, 0), 0) - start
    context_len = gl.sum(gl.where(rows == row, lens, 0), 0)
    first_query = (q_tile - start // BLOCK_Q - row) * BLOCK_Q
    if first_query >= num_queries:
        return

    members = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, WORDS))
    words = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, WORDS))
    queries = first_query + members // GROUP
    heads = head * GROUP + members % GROUP
    is_query = (members < BLOCK_Q * GROUP) & (queries < num_queries)
    tokens = (start + queries).to(gl.int64)
    query_mask = is_query[:, None] & (words >= 0)[None, :]
    out_ptrs = out_ptr + (tokens * out_stride_token + heads * HEAD_DIM)[:, None] + words[None, :]
    if context_len == 0:
        gl.store(out_ptrs, gl.zeros([BLOCK_M, HEAD_DIM], Q_TYPE, layout=WORDS), mask=query_mask)
        return
    q_ptrs = q_ptr + (tokens * q_stride_token + heads * q_stride_head)[:, None] + words[None, :]
    q_smem = gl.allocate_shared_memory(Q_TYPE, [BLOCK_M, HEAD_DIM], OPERAND)
    q_smem.store(gl.load(q_ptrs, mask=query_mask, other=0.0))

    lowest = context_len - num_queries + first_query
    query_positions = lowest + gl.arange(0, BLOCK_M, layout=ROWS) // GROUP
    last_tile = gl.cdiv(gl.minimum(lowest + BLOCK_Q, context_len), BLOCK_N)
    whole_tiles = (lowest + 1) // BLOCK_N

    k_bytes = gl.allocate_shared_memory(gl.int8, [2, BLOCK_N, HEAD_DIM], RAW)
    v_bytes = gl.allocate_shared_memory(gl.int8, [2, BLOCK_N, HEAD_DIM], RAW)
    k_smem = gl.allocate_shared_memory(Q_TYPE, [2, BLOCK_N, HEAD_DIM], OPERAND)
    # The weights carry V's scales, whose range FP16 has not.
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, HEAD_DIM], OPERAND)
    scale_smem = gl.allocate_shared_memory(gl.float32, [2, 2 * BLOCK_N], FLAT)

    table = block_tables_ptr + (row - 1).to(gl.int64) * table_stride
    k_ptr += head * kv_stride_head
    v_ptr += head * kv_stride_head
    k_scale_ptr += head
    v_scale_ptr += head
    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, BYTES))
    cols = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, BYTES))
    key_cols = gl.arange(0, BLOCK_N, layout=COLS)

    # Two tiles are on their way at any time, and the block numbers of a third.
    for tile in gl.static_range(2):
        blocks = _load_blocks(table, tile, keys, context_len, BLOCK_N, BLOCK_SIZE)
        _copy_tile(
            k_ptr, v_ptr, k_bytes, v_bytes, tile, blocks, tile, keys, cols, context_len, kv_stride_token,
            BLOCK_N, BLOCK_SIZE,
        )  # fmt: skip
    blocks = _load_blocks(table, 2, keys, context_len, BLOCK_N, BLOCK_SIZE)
    scales = _load_scales(
        k_scale_ptr, v_scale_ptr, table, 0, context_len, scale_stride_token, BLOCK_N, BLOCK_SIZE, VECTOR
    )
    async_copy.wait_group(1)
    k_smem.index(0).store(_int8_to_float(k_bytes.index(0).load(BYTES), Q_TYPE))
    scale_smem.index(0).store(scales.to(gl.float32))
    scales = _load_scales(
        k_scale_ptr, v_scale_ptr, table, 1, context_len, scale_stride_token, BLOCK_N, BLOCK_SIZE, VECTOR
    )

    peak = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=ROWS)
    norm = gl.full([BLOCK_M], 0.0, gl.float32, layout=ROWS)
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES)
    output = hopper.warpgroup_mma_init(gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, layout=ACC))
    for tile in range(last_tile):
        stage = tile % 2
        hopper.fence_async_shared()
        _barrier()
        product = hopper.warpgroup_mma(
            q_smem, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        # While the scores are computed. `v_smem[stage]` was last read two tiles ago.
        v_smem.index(stage).store(_int8_to_float(v_bytes.index(stage).load(BYTES), gl.bfloat16))
        _copy_tile(
            k_ptr, v_ptr, k_bytes, v_bytes, stage, blocks, tile + 2, keys, cols, context_len, kv_stride_token,
            BLOCK_N, BLOCK_SIZE,
        )  # fmt: skip
        blocks = _load_blocks(table, tile + 3, keys, context_len, BLOCK_N, BLOCK_SIZE)
        scores, acc = hopper.warpgroup_mma_wait(0, deps=[product, output])

        scores = scores * scale_smem.index(stage).slice(0, BLOCK_N).load(COLS)[None, :]
        if tile >= whole_tiles:
            visible = (tile * BLOCK_N + key_cols)[None, :] <= query_positions[:, None]
            scores = gl.where(visible, scores, float("-inf"))
        new_peak = gl.maximum(peak, gl.max(scores, 1) * qk_scale)
        weights = gl.exp2(scores * qk_scale - new_peak[:, None])
        shrink = gl.exp2(peak - new_peak)
        norm = norm * shrink + gl.sum(weights, 1)
        peak = new_peak
        weights = weights * scale_smem.index(stage).slice(BLOCK_N, BLOCK_N).load(COLS)[None, :]
        operand = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(0, ACC, 2))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, ACC))[:, None]
        hopper.fence_async_shared()
        _barrier()
        output = hopper.warpgroup_mma(operand, v_smem.index(stage), acc, is_async=True)
        # While the output is computed.
        async_copy.wait_group(1)
        k_smem.index(1 - stage).store(_int8_to_float(k_bytes.index(1 - stage).load(BYTES), Q_TYPE))
        scale_smem.index(1 - stage).store(scales.to(gl.float32))
        scales = _load_scales(
            k_scale_ptr,
            v_scale_ptr,
            table,
            tile + 2,
            context_len,
            scale_stride_token,
            BLOCK_N,
            BLOCK_SIZE,
            VECTOR,
        )
    acc = hopper.warpgroup_mma_wait(0, deps=[output])
    async_copy.wait_group(0)
    acc = acc / gl.convert_layout(norm, gl.SliceLayout(1, ACC))[:, None]
    gl.store(out_ptrs, gl.convert_layout(acc.to(Q_TYPE), WORDS), mask=query_mask)


@gluon.jit
def _load_blocks(
    table: gl.tensor,
    tile: gl.tensor,
    keys: gl.tensor,
    context_len: gl.tensor,
    BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
) -> gl.tensor:
    """Block numbers of the keys of one tile; 0 past the context, where the table is not read."""
    positions = tile * BLOCK_N + keys
    return gl.load(table + positions // BLOCK_SIZE, mask=positions < context_len, other=0)


@gluon.jit
def _copy_tile(
    k_ptr: gl.tensor,
    v_ptr: gl.tensor,
    k_bytes: gl.tensor,
    v_bytes: gl.tensor,
    stage: gl.tensor,
    blocks: gl.tensor,
    tile: gl.tensor,
    keys: gl.tensor,
    cols: gl.tensor,
    context_len: gl.tensor,
    stride_token: gl.tensor,
    BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
) -> None:
    """Start to copy a tile of K and V; past the context nothing is read."""
    positions = tile * BLOCK_N + keys
    slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    offsets = (slots.to(gl.int64) * stride_token)[:, None] + cols[None, :]
    mask = (positions < context_len)[:, None] & (cols >= 0)[None, :]
    _load_async(k_bytes.index(stage), k_ptr + offsets, mask)
    _load_async(v_bytes.index(stage), v_ptr + offsets, mask)
    async_copy.commit_group()


@gluon.jit
def _load_scales(
    k_scale_ptr: gl.tensor,
    v_scale_ptr: gl.tensor,
    table: gl.tensor,
    tile: gl.tensor,
    context_len: gl.tensor,
    stride_token: gl.tensor,
    BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> gl.tensor:
    """Scales of a tile's keys, then of its values, ``[2 * BLOCK_N]``: one a thread; 0 past the context."""
    both = gl.arange(0, 2 * BLOCK_N, layout=LAYOUT)
    keys = both % BLOCK_N
    positions = tile * BLOCK_N + keys
    blocks = _load_blocks(table, tile, keys, context_len, BLOCK_N, BLOCK_SIZE)
    offsets = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).to(gl.int64) * stride_token
    pointers = gl.where(both < BLOCK_N, k_scale_ptr + offsets, v_scale_ptr + offsets)
    return gl.load(pointers, mask=positions < context_len, other=0.0)


@gluon.jit
def _int8_to_float(values: gl.tensor, dtype: gl.constexpr) -> gl.tensor:
    """`attention_common.int8_to_float`, which Gluon cannot call."""
    if dtype == gl.float16:
        result = gl.inline_asm_elementwise(
            """
            {
            .reg .b32 u, a, b, bias;
            mov.b32 bias, 0x64806480;
            xor.b32 u, $2, 0x80808080;
            prmt.b32 a, u, 0x64646464, 0x4140;
            prmt.b32 b, u, 0x64646464, 0x4342;
            sub.f16x2 $0, a, bias;
            sub.f16x2 $1, b, bias;
            }
            """,
            constraints="=r,=r,r",
            args=[values],
            dtype=gl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        result = gl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d, minus_one;
            mov.b32 minus_one, 0xbf80bf80;
            prmt.b32 a, $2, 0x43434343, 0x4140;
            prmt.b32 b, $2, 0x43434343, 0x4342;
            and.b32 c, a, 0xff80ff80;
            and.b32 d, b, 0xff80ff80;
            and.b32 a, a, 0xff7fff7f;
            and.b32 b, b, 0xff7fff7f;
            fma.rn.bf16x2 $0, c, minus_one, a;
            fma.rn.bf16x2 $1, d, minus_one, b;
            }
            """,
            constraints="=r,=r,r",
            args=[values],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return result
