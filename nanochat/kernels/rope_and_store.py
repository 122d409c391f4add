"""Norms and rotation of q and k, and the store of k and v into the cache, as one launch for a few tokens.

For an INT8 cache q and k are spread as well, by a Hadamard rotation. A program has one head of one token: at a
few tokens a step waits for latency, not for memory. What was there before the layers began (positions, slots,
angles, norm weights) is read before the wait for the kernel before this one; so whatever writes positions and
slots must not itself start early. Knows nothing of models.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanochat.kernels.attention_common import check_cache_layout
from nanochat.kernels.cache import LayerCache
from nanochat.kernels.checks import check_dense
from nanochat.kernels.composed import rope_then_store
from nanochat.kernels.hadamard import hadamard
from nanochat.kernels.kv_store import quantize, store_kv
from nanochat.kernels.norm_rope import load_weight, rope
from nanochat.kernels.triton_utils import dependent_launch

_MAX_TOKENS = 128
"""Of one launch; more are rotated and stored by kernels that read memory in larger pieces."""
READ_EARLY = {
    "positions_ptr": "_expand_kernel",
    "slots_ptr": "_expand_kernel",
    "cos_sin_ptr": None,
    "q_norm_ptr": None,
    "k_norm_ptr": None,
}
"""What is read before the kernel before this one has ended, and the kernel that writes it; None: nobody does."""


def rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    cache: LayerCache,
    slots: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
) -> torch.Tensor:
    """See `nanochat.kernels.rope_store`."""
    check_dense(
        q=q, k=k, v=v, positions=positions, cos_sin=cos_sin, slots=slots, q_norm=q_norm, k_norm=k_norm
    )
    tokens, heads, head_dim = q.shape
    half = head_dim // 2
    # Heads are read as two halves that turn into each other; what else there is is left to the other kernels.
    if cos_sin is None or not 0 < tokens <= _MAX_TOKENS or cos_sin.shape[1] != head_dim or half & (half - 1):
        return rope_then_store(
            rope,
            store_kv,
            q,
            k,
            v,
            positions,
            cos_sin,
            cache,
            slots,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            plus_one=plus_one,
        )
    check_cache_layout(cache)
    kv_heads = k.shape[1]
    new_q = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    dependent = dependent_launch(q.device)
    _rope_store_kernel[(tokens, heads + 2 * kv_heads)](
        q,
        k,
        v,
        new_q,
        q_norm,
        k_norm,
        positions,
        cos_sin,
        cache.k,
        cache.v,
        cache.k_scale,
        cache.v_scale,
        slots,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cos_sin.stride(0),
        cache.k.stride(1),
        cache.k.stride(2),
        0 if cache.k_scale is None else cache.k_scale.stride(1),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        PLUS_ONE=plus_one,
        DEPENDENT=dependent,
        num_warps=1,
        launch_pdl=dependent,
    )
    return new_q


@triton.jit
def _rope_store_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    new_q_ptr: tl.tensor,
    q_norm_ptr: tl.tensor | None,
    k_norm_ptr: tl.tensor | None,
    positions_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    cache_k_ptr: tl.tensor,
    cache_v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor | None,
    v_scale_ptr: tl.tensor | None,
    slots_ptr: tl.tensor,
    q_stride_token: int,
    q_stride_head: int,
    k_stride_token: int,
    k_stride_head: int,
    v_stride_token: int,
    v_stride_head: int,
    cos_sin_stride: int,
    cache_stride_token: int,
    cache_stride_head: int,
    scale_stride_token: int,
    eps: float,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    # [2, half]: the two halves that turn into each other.
    sides = tl.arange(0, 2)[:, None]
    cols = tl.arange(0, HALF)[None, :]
    dims = sides * HALF + cols
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    cos = tl.load(cos_sin_ptr + position * cos_sin_stride + cols)
    sin = tl.load(cos_sin_ptr + position * cos_sin_stride + HALF + cols)
    if q_norm_ptr is not None:
        q_weight = load_weight(q_norm_ptr + dims, dims >= 0, PLUS_ONE)
    if k_norm_ptr is not None:
        k_weight = load_weight(k_norm_ptr + dims, dims >= 0, PLUS_ONE)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()  # for q, k and v alone

    if head < HEADS:
        q = tl.load(q_ptr + token * q_stride_token + head * q_stride_head + dims).to(tl.float32)
        if q_norm_ptr is not None:
            q *= tl.rsqrt(tl.sum(q * q) / (2 * HALF) + eps) * q_weight
        out = new_q_ptr + token * (HEADS * 2 * HALF) + head * (2 * HALF)
        tl.store(out + dims, _rotate(q, cos, sin, k_scale_ptr is not None))
    elif head < HEADS + KV_HEADS:
        kv_head = head - HEADS
        k = tl.load(k_ptr + token * k_stride_token + kv_head * k_stride_head + dims).to(tl.float32)
        if k_norm_ptr is not None:
            k *= tl.rsqrt(tl.sum(k * k) / (2 * HALF) + eps) * k_weight
        rotated = _rotate(k, cos, sin, k_scale_ptr is not None).to(k_ptr.dtype.element_ty)
        target = slot * cache_stride_token + kv_head * cache_stride_head
        scale = slot * scale_stride_token + kv_head
        _store_head(rotated, cache_k_ptr + target, k_scale_ptr, scale, slot, dims, HALF)
    else:
        kv_head = head - HEADS - KV_HEADS
        v = tl.load(v_ptr + token * v_stride_token + kv_head * v_stride_head + dims)
        target = slot * cache_stride_token + kv_head * cache_stride_head
        scale = slot * scale_stride_token + kv_head
        _store_head(v, cache_v_ptr + target, v_scale_ptr, scale, slot, dims, HALF)


@triton.jit
def _rotate(x: tl.tensor, cos: tl.tensor, sin: tl.tensor, SPREAD: tl.constexpr) -> tl.tensor:
    """``x [2, half]``, rotated, and spread for an INT8 cache."""
    HALF: tl.constexpr = x.shape[1]
    first, second = tl.split(tl.trans(x))
    cos, sin = tl.sum(cos, 0), tl.sum(sin, 0)
    x = tl.trans(tl.join(first * cos - second * sin, second * cos + first * sin))
    if SPREAD:
        root: tl.constexpr = (2 * HALF) ** -0.5
        x = tl.reshape(hadamard(tl.reshape(x * root, [1, 2 * HALF]), 2 * HALF), [2, HALF])
    return x


@triton.jit
def _store_head(
    x: tl.tensor,
    target_ptr: tl.tensor,
    scale_ptr: tl.tensor | None,
    scale_offset: tl.tensor,
    slot: tl.tensor,
    dims: tl.tensor,
    HALF: tl.constexpr,
) -> None:
    """Write one token's head, unless its slot is negative."""
    if scale_ptr is not None:
        x, scale = quantize(tl.reshape(x, [1, 2 * HALF]))
        x = tl.reshape(x, [2, HALF])
        one = tl.arange(0, 1)
        tl.store(scale_ptr + scale_offset + one, scale, mask=one <= slot)
    tl.store(target_ptr + dims, x, mask=dims * 0 <= slot)
