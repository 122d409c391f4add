"""What the paged attention kernels share: which layouts they read, how scores are scaled, INT8 to float.

Knows nothing of requests or models.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.checks import check_dense
from nanochat.kernels.triton_utils import LOG2_E, device_info

MAX_HEAD_DIM = 256
ROWS_OF_PREFILLS = ["block_tables_ptr", "context_lens_ptr", "query_starts_ptr"]
"""Begin with the first row that prefills, anywhere: a kernel compiled for aligned ones would be compiled again when
other chats decode beside it, and everybody wait for seconds."""


def check_layout(q: torch.Tensor, cache: LayerCache, batch: AttentionBatch) -> None:
    """Refuse what the kernels, and not the ops in general, cannot read.

    Raises:
        ValueError: names the argument and what was expected of it.
    """
    head_dim = q.shape[2]
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        raise ValueError(
            f"q must have a head dim that is a multiple of 8 up to {MAX_HEAD_DIM}; it is {head_dim}"
        )
    if q.dtype == torch.bfloat16 and device_info(q.device).capability < 80:
        raise ValueError("q must not be bfloat16 on a GPU of compute capability below 8.0; use float16 there")
    check_dense(
        q=q,
        block_tables=batch.block_tables,
        context_lens=batch.context_lens,
        query_starts=batch.query_starts,
    )
    check_cache_layout(cache)


def check_cache_layout(cache: LayerCache) -> None:
    """Refuse a cache whose slots are not evenly spaced, or whose K and V differ in layout."""
    for name, data, twin in (("k", cache.k, cache.v), ("k_scale", cache.k_scale, cache.v_scale)):
        if data is None:
            continue
        strides = data.stride()
        if (
            strides[-1] != 1
            or strides[0] != data.shape[1] * strides[1]
            or twin is None
            or twin.stride() != strides
        ):
            raise ValueError(
                f"cache.{name} must be dense in its last dim, with evenly spaced slots, and cache.v must have its "
                f"layout; they have shape {list(data.shape)} and strides {strides} "
                f"and {None if twin is None else twin.stride()}"
            )


def score_scales(scale: float, softcap: float) -> tuple[float, float]:
    """What raw scores, and then their tanh if capped, are multiplied by to give base-2 logits."""
    if softcap > 0:
        return scale / softcap, softcap * LOG2_E
    return scale * LOG2_E, 0.0


@triton.jit
def load_blocks(
    table: tl.tensor,
    tile: tl.tensor,
    keys: tl.tensor,
    context_len: tl.tensor,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """Block numbers of the keys of one tile; 0 past the context, where the table is not read."""
    positions = tile * BLOCK_N + keys
    if BLOCK_N % BLOCK_SIZE == 0:  # spares a division a key
        entries = tile * (BLOCK_N // BLOCK_SIZE) + keys // BLOCK_SIZE
    else:
        entries = positions // BLOCK_SIZE
    return tl.load(table + entries, mask=positions < context_len, other=0)


@triton.jit
def slots_of(
    blocks: tl.tensor, tile: tl.tensor, keys: tl.tensor, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """Slots of the keys of one tile, as int64: what strides of a token are multiplied by."""
    places = keys % BLOCK_SIZE if BLOCK_N % BLOCK_SIZE == 0 else (tile * BLOCK_N + keys) % BLOCK_SIZE
    return (blocks * BLOCK_SIZE + places).to(tl.int64)


@triton.jit
def split_to_int8(q: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """``q [M, D]`` as ``(256 * high + low) * scale``: INT8 ``high``, ``low`` ``[M, D]``, float32 ``scale [M]``.

    15 bits and a sign, more than BF16 has, so that queries can meet INT8 keys on the integer tensor cores
    and no key needs to be converted.
    """
    q = q.to(tl.float32)
    largest = tl.max(tl.abs(q), 1)
    scale = tl.where(largest > 0, largest / 32512.0, 1.0)  # 127 * 256
    wide = tl.floor(q / scale[:, None] + 0.5).to(tl.int32)
    high = (wide + 128) >> 8
    low = wide - high * 256
    return high.to(tl.int8), low.to(tl.int8), scale


@triton.jit
def unpack_int8_pairs(pairs: tl.tensor, NATIVE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """int16 words, each two INT8 values: their low and their high bytes as FP16, exactly.

    A pair is what `ldmatrix` moves, so the values arrive where the tensor cores want them, and bit tricks
    convert two at a time: the GPU's own converter would be slower than its memory.
    """
    if NATIVE:
        # 0x64uu is 1024 + u in FP16, and u is the value + 128.
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 u, a, b, bias;
            mov.b32 bias, 0x64806480;
            xor.b32 u, $2, 0x80808080;
            prmt.b32 a, u, 0x64646464, 0x4240;
            prmt.b32 b, u, 0x64646464, 0x4341;
            sub.f16x2 $0, a, bias;
            sub.f16x2 $1, b, bias;
            }
            """,
            constraints="=r,=r,r",
            args=[pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = (pairs << 8 >> 8).to(tl.float16)
        high = (pairs >> 8).to(tl.float16)
    return low, high


@triton.jit
def int8_to_float(values: tl.tensor, dtype: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    """INT8 as ``dtype``, exactly; as FP16 or BF16 four at a time. BF16 needs compute capability 8.0."""
    if NATIVE and dtype == tl.float16:
        # 0x64uu is 1024 + u in FP16, and u is the value + 128.
        result = tl.inline_asm_elementwise(
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
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    elif NATIVE and dtype == tl.bfloat16:
        # 0x43uu has room for 7 bits: 128 + (value & 127), less 128, or less 256 when the sign bit is set.
        result = tl.inline_asm_elementwise(
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
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        result = values.to(dtype)
    return result
