"""Write new K/V into the paged cache, quantising on the way when the cache is INT8: one launch for both.

Knows nothing of attention or requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanochat.kernels.attention_common import check_cache_layout
from nanochat.kernels.cache import LayerCache
from nanochat.kernels.checks import check_dense
from nanochat.kernels.triton_utils import dependent_launch, enter, next_power_of_2

_ELEMENTS = 8192
_ELEMENTS_INT8 = 2048
"""Of K, and as many of V, a program: quantising needs registers."""


def store_kv(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
    """See `nanochat.kernels.store_kv`."""
    check_cache_layout(cache)
    check_dense(k=k, v=v)
    tokens, kv_heads, head_dim = k.shape
    if tokens == 0:
        return
    block_d = next_power_of_2(head_dim)
    elements = _ELEMENTS if cache.k_scale is None else _ELEMENTS_INT8
    block_rows = max(1, elements // block_d)
    dependent = dependent_launch(k.device)
    _store_kernel[(triton.cdiv(tokens * kv_heads, block_rows),)](
        k,
        v,
        cache.k,
        cache.v,
        cache.k_scale,
        cache.v_scale,
        slots,
        tokens,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cache.k.stride(1),
        cache.k.stride(2),
        0 if cache.k_scale is None else cache.k_scale.stride(1),
        slots.stride(0),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=block_rows,
        BLOCK_D=block_d,
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _store_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    cache_k_ptr: tl.tensor,
    cache_v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor | None,
    v_scale_ptr: tl.tensor | None,
    slots_ptr: tl.tensor,
    num_tokens: int,
    k_stride_token: int,
    k_stride_head: int,
    v_stride_token: int,
    v_stride_head: int,
    stride_token: int,
    stride_head: int,
    scale_stride_token: int,
    slots_stride: int,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    enter(DEPENDENT)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens = (rows // KV_HEADS).to(tl.int64)
    heads = rows % KV_HEADS
    dims = tl.arange(0, BLOCK_D)[None, :]
    is_token = tokens < num_tokens
    mask = is_token[:, None] & (dims < HEAD_DIM)
    # Not masked by the slots: then these loads need not wait for those.
    slots = tl.load(slots_ptr + tokens * slots_stride, mask=is_token, other=-1)
    k = tl.load(k_ptr + (tokens * k_stride_token + heads * k_stride_head)[:, None] + dims, mask=mask, other=0)
    v = tl.load(v_ptr + (tokens * v_stride_token + heads * v_stride_head)[:, None] + dims, mask=mask, other=0)
    kept = slots >= 0
    mask &= kept[:, None]
    if k_scale_ptr is not None:
        k, k_scale = quantize(k)
        v, v_scale = quantize(v)
        tl.store(k_scale_ptr + slots * scale_stride_token + heads, k_scale, mask=kept)
        tl.store(v_scale_ptr + slots * scale_stride_token + heads, v_scale, mask=kept)
    targets = (slots * stride_token + heads * stride_head)[:, None] + dims
    tl.store(cache_k_ptr + targets, k, mask=mask)
    tl.store(cache_v_ptr + targets, v, mask=mask)


@triton.jit
def quantize(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """`reference.quantize` of ``x [rows, D]``: INT8 values and float16 scales, bit for bit."""
    SHORT: tl.constexpr = x.dtype.primitive_bitwidth == 16
    x = x.to(tl.float32)
    x = tl.where(x == x, x, 0.0)
    scale = tl.minimum(tl.div_rn(tl.max(tl.abs(x), 1), 127.0), 65504.0).to(tl.float16)
    divisor = tl.where(scale > 0, scale.to(tl.float32), 1.0)[:, None]
    x = tl.minimum(tl.maximum(x, -127.0 * divisor), 127.0 * divisor)
    if SHORT:
        # x and the divisor have 11 bits, so a quotient of at least 0.4 lies on a half (n + 0.5) or at least
        # 2 ** -14 from it: a product off by less than 3e-5, plus 0.5 and 3e-5, is cut off to the right integer.
        quotient = x * (1.0 / divisor)
        half_bits = 0x3F0001F7
    else:
        # With the rounded inverse, one correction gives the rounded quotient (P. Markstein, IBM J. Res. Dev.
        # 34, 1990). Added is the float just below 0.5: 0.5 itself would round 0.49999997 up.
        inverse = tl.div_rn(1.0, divisor)
        quotient = x * inverse
        quotient = tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)
        half_bits = 0x3EFFFFFF
    half = ((x.to(tl.int32, bitcast=True) & -0x80000000) | half_bits).to(tl.float32, bitcast=True)
    return (quotient + half).to(tl.int8), scale
