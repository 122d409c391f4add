"""Copies what prefill rows see of an INT8 cache to a small 16-bit one, once a layer, for `attention_prefill`.

Every tile of queries walks over every tile of keys, and where tensor cores take 16 bits from shared memory
alone, each of those walks would convert the same keys again. The copy is paged as the cache is, its blocks in
order, row after row; its size is bounded, and it lives for one layer's attention. Lengths are read on the device,
so that one launch serves every batch of its bounds. Knows nothing of requests or models.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from nanochat.kernels.attention_common import ROWS_OF_PREFILLS, int8_to_float
from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.triton_utils import (
    INTERPRETED,
    dependent_launch,
    device_info,
    enter,
    next_power_of_2,
)
from nanochat.kernels.tuning import MAX_KEY_TILE, converted_tokens, converts_prefill

_BLOCK_SIZE = 64
"""Tokens a block of the copy: whole key tiles, or evenly many of them."""
_VECTORS = 32
"""Of K, and as many of V, that a program copies at once: one of a token and KV head."""
_PROGRAMS_PER_SM = 8


def most_converted_tokens(cache: LayerCache, dtype: torch.dtype) -> int:
    """How much context of a step's prefill rows, added up, is converted for queries of ``dtype``; 0 if none ever."""
    if cache.k_scale is None or dtype.itemsize != 2:
        return 0
    _, _, kv_heads, head_dim = cache.k.shape
    return converted_tokens(device_info(cache.k.device).capability, 2 * kv_heads * head_dim * dtype.itemsize)


def most_converted_bytes(cache: LayerCache, dtype: torch.dtype, rows: int) -> int:
    """What the largest copy takes, of a step of so many rows."""
    tokens = most_converted_tokens(cache, dtype)
    _, _, kv_heads, head_dim = cache.k.shape
    return (tokens + rows * _BLOCK_SIZE) * 2 * kv_heads * head_dim * dtype.itemsize if tokens else 0


def is_worth_converting(q: torch.Tensor, cache: LayerCache, batch: AttentionBatch) -> bool:
    """For prefill queries ``q [T - num_decodes, H, D]``: whether the copy fits its bound and saves time."""
    if batch.prefill_context > most_converted_tokens(cache, q.dtype):
        return False
    longest = min(batch.max_context_len, batch.prefill_context)
    return converts_prefill(device_info(q.device).capability, q.shape[0], longest)


def convert_prefills(
    cache: LayerCache, batch: AttentionBatch, dtype: torch.dtype, window: int
) -> tuple[LayerCache, AttentionBatch]:
    """A copy of an INT8 ``cache`` in ``dtype`` that holds what the batch's prefill rows see, and the batch for it.

    Only rows from ``num_decodes`` on may be read with it, and with a ``window`` above 0 only with that one.
    """
    copy, tables = allocate_copy(cache, batch, dtype)
    launch_convert(cache, batch, copy, tables, window=window)
    return copy, dataclasses.replace(batch, block_tables=tables)


def allocate_copy(
    cache: LayerCache, batch: AttentionBatch, dtype: torch.dtype
) -> tuple[LayerCache, torch.Tensor]:
    """Room for the copy, ``[N, 64, Hkv, D]``, and for the block tables of all rows, ``[R, M]`` int32.

    In a graph that is captured it comes from the graph's memory, which all layers and graphs use again.
    """
    rows = batch.num_rows - batch.num_decodes
    _, _, kv_heads, head_dim = cache.k.shape
    # Few sizes, since the allocator keeps what it had for each. Every row's last block may be partly filled.
    tokens = batch.prefill_context
    tokens = max(tokens, min(next_power_of_2(tokens), most_converted_tokens(cache, dtype)))
    shape = (tokens // _BLOCK_SIZE + rows, _BLOCK_SIZE, kv_heads, head_dim)
    k, v = (torch.empty(shape, dtype=dtype, device=cache.k.device) for _ in range(2))
    width = triton.cdiv(batch.max_context_len, _BLOCK_SIZE)
    tables = torch.empty((batch.num_rows, max(width, 1)), dtype=torch.int32, device=cache.k.device)
    return LayerCache(k, v), tables


def launch_convert(
    cache: LayerCache, batch: AttentionBatch, copy: LayerCache, tables: torch.Tensor, *, window: int
) -> None:
    """Fill what :func:`allocate_copy` made, without checks."""
    first_row = batch.num_decodes
    rows = batch.num_rows - first_row
    _, _, kv_heads, head_dim = cache.k.shape
    # Each row's last piece may be partly filled.
    pieces = batch.prefill_context * kv_heads // _VECTORS + rows
    dependent = dependent_launch(cache.k.device)
    _convert_kernel[(min(pieces, device_info(cache.k.device).num_sms * _PROGRAMS_PER_SM),)](
        cache.k,
        cache.v,
        cache.k_scale,
        cache.v_scale,
        batch.block_tables[first_row:],
        batch.context_lens[first_row:],
        batch.query_starts[first_row:],
        copy.k,
        copy.v,
        tables[first_row:],
        cache.k.stride(1),
        cache.k.stride(2),
        0 if cache.k_scale is None else cache.k_scale.stride(1),
        batch.block_tables.stride(0),
        tables.stride(0),
        rows,
        window,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.block_size,
        COPY_BLOCK_SIZE=_BLOCK_SIZE,
        KEY_TILE=MAX_KEY_TILE,
        BLOCK_V=_VECTORS,
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_R=max(32, next_power_of_2(rows)),
        WINDOWED=window > 0,
        NATIVE=not INTERPRETED,
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )


@triton.jit(
    do_not_specialize=["table_stride", "copy_table_stride", "num_rows", "window"],
    do_not_specialize_on_alignment=[*ROWS_OF_PREFILLS, "copy_tables_ptr"],
)
def _convert_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    copy_k_ptr: tl.tensor,
    copy_v_ptr: tl.tensor,
    copy_tables_ptr: tl.tensor,
    kv_stride_token: int,
    kv_stride_head: int,
    scale_stride_token: int,
    table_stride: int,
    copy_table_stride: int,
    num_rows: int,
    window: int,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COPY_BLOCK_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WINDOWED: tl.constexpr,
    NATIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    enter(DEPENDENT)
    dtype: tl.constexpr = copy_k_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK_R)
    is_real = rows < num_rows
    lens = tl.load(context_lens_ptr + rows, mask=is_real, other=0)
    firsts = tl.zeros([BLOCK_R], tl.int32)
    if WINDOWED:  # from where a tile of keys may begin that some query sees a part of
        starts = tl.load(query_starts_ptr + rows, mask=is_real, other=0)
        ends = tl.load(query_starts_ptr + rows + 1, mask=is_real, other=0)
        firsts = tl.maximum(lens - (ends - starts) - window + 1, 0) // KEY_TILE * KEY_TILE
    copy_blocks = tl.cdiv(lens, COPY_BLOCK_SIZE)
    first_blocks = tl.cumsum(copy_blocks, 0) - copy_blocks
    pieces = tl.cdiv((lens - firsts) * KV_HEADS, BLOCK_V)
    piece_ends = tl.cumsum(pieces, 0)
    for piece in range(tl.program_id(0), tl.sum(pieces, 0), tl.num_programs(0)):
        row = tl.sum((piece_ends <= piece).to(tl.int32), 0)
        is_row = rows == row
        length = tl.sum(tl.where(is_row, lens, 0), 0)
        first = tl.sum(tl.where(is_row, firsts, 0), 0)
        first_block = tl.sum(tl.where(is_row, first_blocks, 0), 0)
        place = piece - tl.sum(tl.where(is_row, piece_ends - pieces, 0), 0)

        vectors = place * BLOCK_V + tl.arange(0, BLOCK_V)
        positions = first + vectors // KV_HEADS
        heads = vectors % KV_HEADS
        dims = tl.arange(0, BLOCK_D)[None, :]
        in_context = positions < length
        mask = in_context[:, None] & (dims < HEAD_DIM)
        table = block_tables_ptr + row.to(tl.int64) * table_stride
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=in_context, other=0)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        # Eight values a thread: as many as 16 bytes of the copy hold, so that the two need no shuffle.
        sources = tl.max_contiguous(
            (slots * kv_stride_token + heads * kv_stride_head)[:, None] + dims, [1, 8]
        )
        scales = slots * scale_stride_token + heads
        k = tl.load(k_ptr + sources, mask=mask, other=0)
        v = tl.load(v_ptr + sources, mask=mask, other=0)
        k_scale = tl.load(k_scale_ptr + scales, mask=in_context, other=0.0)
        v_scale = tl.load(v_scale_ptr + scales, mask=in_context, other=0.0)

        copy_slots = first_block.to(tl.int64) * COPY_BLOCK_SIZE + positions
        targets = ((copy_slots * KV_HEADS + heads) * HEAD_DIM)[:, None] + dims
        tl.store(copy_k_ptr + targets, _scaled(k, k_scale, dtype, NATIVE), mask=mask)
        tl.store(copy_v_ptr + targets, _scaled(v, v_scale, dtype, NATIVE), mask=mask)
        entries = positions // COPY_BLOCK_SIZE
        begins_block = in_context & (heads == 0) & (positions % COPY_BLOCK_SIZE == 0)
        copy_table = copy_tables_ptr + row.to(tl.int64) * copy_table_stride
        tl.store(copy_table + entries, first_block + entries, mask=begins_block)


@triton.jit
def _scaled(x: tl.tensor, scale: tl.tensor, dtype: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    """INT8 values ``x [n, D]`` times their ``scale [n]``, rounded to ``dtype``."""
    product = int8_to_float(x, dtype, NATIVE).to(tl.float32) * scale.to(tl.float32)[:, None]
    if dtype == tl.float16:  # a scale that was rounded up takes its largest value beyond the largest of all
        product = tl.minimum(tl.maximum(product, -65504.0), 65504.0)
    return product.to(dtype)
