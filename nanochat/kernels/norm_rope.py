"""RMS norm with the residual add, and rotary embedding with the norms of q and k: one pass over memory each.

Knows nothing of models.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanochat.kernels.checks import check_dense
from nanochat.kernels.hadamard import hadamard, hadamard_size
from nanochat.kernels.normed import Normed
from nanochat.kernels.triton_utils import dependent_launch, enter, next_power_of_2

_NORM_ELEMENTS = 2048
"""Least work of a norm program: narrow rows share one."""


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `nanochat.kernels.rms_norm`."""
    check_dense(x=x, residual=residual, weight=weight)
    tokens, hidden = x.shape
    normed = torch.empty((tokens, hidden), dtype=weight.dtype, device=x.device)
    summed = x if residual is None else torch.empty_like(normed, dtype=residual.dtype)
    if normed.numel() == 0:
        return normed, summed
    block = next_power_of_2(hidden)
    block_rows = max(1, _NORM_ELEMENTS // block)
    dependent = dependent_launch(x.device)
    _norm_kernel[(triton.cdiv(tokens, block_rows),)](
        x,
        residual,
        weight,
        normed,
        summed,
        tokens,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        HIDDEN=hidden,
        PLUS_ONE=plus_one,
        BLOCK_ROWS=block_rows,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=min(16, max(4, block // 1024)),
        launch_pdl=dependent,
    )
    return normed, summed


@triton.jit(do_not_specialize=["num_tokens"])
def _norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor | None,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    summed_ptr: tl.tensor,
    num_tokens: int,
    x_stride: int,
    residual_stride: int,
    eps: float,
    HIDDEN: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    enter(DEPENDENT)
    tokens = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (tokens < num_tokens) & (cols < HIDDEN)
    x = tl.load(x_ptr + tokens * x_stride + cols, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + cols, mask=cols < HIDDEN, other=0.0).to(tl.float32)
    if PLUS_ONE:
        weight += 1.0
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + tokens * residual_stride + cols, mask=mask, other=0.0)
        # What is normed is the sum as stored.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + tokens * HIDDEN + cols, x, mask=mask)
    x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / HIDDEN + eps)
    tl.store(normed_ptr + tokens * HIDDEN + cols, x * inverse[:, None] * weight, mask=mask)


def divide_norm(x: Normed) -> torch.Tensor:
    """`Normed.finished` as one launch, of dense rows whose division is still to come."""
    values = x.values
    if x.squares is None:
        return values
    rows, hidden = values.shape
    out = torch.empty_like(values)
    dependent = dependent_launch(values.device)
    _divide_kernel[(rows,)](
        values,
        x.squares,
        out,
        rows,
        x.num_parts,
        x.eps,
        HIDDEN=hidden,
        BLOCK=next_power_of_2(hidden),
        PARTS=next_power_of_2(x.num_parts),
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )
    return out


@triton.jit(do_not_specialize=["rows", "parts"])
def _divide_kernel(
    values_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: int,
    parts: int,
    eps: float,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    part, cols = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    squares = tl.load(squares_ptr + part * rows + row, mask=part < parts, other=0.0)
    values = tl.load(values_ptr + row * HIDDEN + cols, mask=cols < HIDDEN, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(squares, 0) / HIDDEN + eps)
    tl.store(out_ptr + row * HIDDEN + cols, values * inverse, mask=cols < HIDDEN)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    spread: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `nanochat.kernels.rope`."""
    check_dense(q=q, k=k, cos_sin=cos_sin, q_norm=q_norm, k_norm=k_norm)
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    new_q = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    new_k = torch.empty((tokens, kv_heads, head_dim), dtype=k.dtype, device=k.device)
    if tokens == 0:
        return new_q, new_k
    half = (head_dim if cos_sin is None else cos_sin.shape[1]) // 2
    rest = head_dim - 2 * half
    spread_size = hadamard_size(head_dim) if spread else 1
    # Spread are the halves of a whole head. Where fewer dims turn, that is left to a second launch.
    again = spread_size > 1 and rest > 0
    dependent = dependent_launch(q.device)
    _rope_kernel[(tokens,)](
        q,
        k,
        new_q,
        new_k,
        q_norm,
        k_norm,
        positions,
        cos_sin,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        0 if cos_sin is None else cos_sin.stride(0),
        positions.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        SPREAD_SIZE=1 if again else spread_size,
        PLUS_ONE=plus_one,
        BLOCK_Q=next_power_of_2(heads),
        BLOCK_K=next_power_of_2(kv_heads),
        BLOCK_HALF=next_power_of_2(half),
        BLOCK_REST=next_power_of_2(rest) if rest else 0,
        DEPENDENT=dependent,
        num_warps=8,
        launch_pdl=dependent,
    )
    return rope(new_q, new_k, positions, None, spread=True) if again else (new_q, new_k)


@triton.jit
def _rope_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    new_q_ptr: tl.tensor,
    new_k_ptr: tl.tensor,
    q_norm_ptr: tl.tensor | None,
    k_norm_ptr: tl.tensor | None,
    positions_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor | None,
    q_stride_token: int,
    q_stride_head: int,
    k_stride_token: int,
    k_stride_head: int,
    cos_sin_stride: int,
    positions_stride: int,
    eps: float,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    SPREAD_SIZE: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    enter(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    q_ptr += token * q_stride_token
    k_ptr += token * k_stride_token
    new_q_ptr += token * (HEADS * HEAD_DIM)
    new_k_ptr += token * (KV_HEADS * HEAD_DIM)
    # Loads first, so that they wait for nothing: the angles' address depends on the position.
    if cos_sin_ptr is not None:
        position = tl.load(positions_ptr + token * positions_stride)
    q_first, q_second = load_halves(q_ptr, q_stride_head, HEADS, HALF, BLOCK_Q, BLOCK_HALF)
    k_first, k_second = load_halves(k_ptr, k_stride_head, KV_HEADS, HALF, BLOCK_K, BLOCK_HALF)
    cos, sin = None, None
    if cos_sin_ptr is not None:
        cols = tl.arange(0, BLOCK_HALF)
        angles = cos_sin_ptr + position * cos_sin_stride + cols
        cos = tl.load(angles, mask=cols < HALF, other=0.0)[None, :]
        sin = tl.load(angles + HALF, mask=cols < HALF, other=0.0)[None, :]
    norm_and_rotate(
        q_ptr, q_stride_head, new_q_ptr, q_norm_ptr, q_first, q_second, cos, sin, eps,
        HEADS, HEAD_DIM, HALF, SPREAD_SIZE, PLUS_ONE, BLOCK_Q, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip
    norm_and_rotate(
        k_ptr, k_stride_head, new_k_ptr, k_norm_ptr, k_first, k_second, cos, sin, eps,
        KV_HEADS, HEAD_DIM, HALF, SPREAD_SIZE, PLUS_ONE, BLOCK_K, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip


@triton.jit
def load_halves(
    x_ptr: tl.tensor,
    stride_head: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The two halves that turn into each other, ``[heads, half]`` float32, of all heads of one token."""
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    cols = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (heads < HEADS) & (cols < HALF)
    first = tl.load(x_ptr + heads * stride_head + cols, mask=mask, other=0.0)
    second = tl.load(x_ptr + heads * stride_head + HALF + cols, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def norm_and_rotate(
    x_ptr: tl.tensor,
    stride_head: tl.tensor,
    out_ptr: tl.tensor,
    weight_ptr: tl.tensor | None,
    first: tl.tensor,
    second: tl.tensor,
    cos: tl.tensor | None,
    sin: tl.tensor | None,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    SPREAD_SIZE: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """Norm, rotate and spread the heads of one token, and copy the dims after the rotated ones, normed."""
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    cols = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (heads < HEADS) & (cols < HALF)
    if BLOCK_REST > 0:
        rest_cols = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        rest_mask = (heads < HEADS) & (rest_cols < HEAD_DIM)
        rest = tl.load(x_ptr + heads * stride_head + rest_cols, mask=rest_mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        squares = tl.sum(first * first + second * second, 1)
        if BLOCK_REST > 0:
            squares += tl.sum(rest * rest, 1)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first *= inverse * load_weight(weight_ptr + cols, cols < HALF, PLUS_ONE)
        second *= inverse * load_weight(weight_ptr + HALF + cols, cols < HALF, PLUS_ONE)
        if BLOCK_REST > 0:
            rest *= inverse * load_weight(weight_ptr + rest_cols, rest_cols < HEAD_DIM, PLUS_ONE)
    out_ptrs = out_ptr + heads * HEAD_DIM + cols
    if cos is not None:
        first, second = first * cos - second * sin, second * cos + first * sin
    if SPREAD_SIZE > 1:
        root: tl.constexpr = SPREAD_SIZE**-0.5
        first, second = (first + second) * root, (first - second) * root
        first, second = hadamard(first, SPREAD_SIZE // 2), hadamard(second, SPREAD_SIZE // 2)
    tl.store(out_ptrs, first, mask=mask)
    tl.store(out_ptrs + HALF, second, mask=mask)
    if BLOCK_REST > 0:
        tl.store(out_ptr + heads * HEAD_DIM + rest_cols, rest, mask=rest_mask)


@triton.jit
def load_weight(weight_ptrs: tl.tensor, mask: tl.tensor, PLUS_ONE: tl.constexpr) -> tl.tensor:
    """A norm's weight as float32."""
    weight = tl.load(weight_ptrs, mask=mask, other=0.0).to(tl.float32)
    if PLUS_ONE:
        weight += 1.0
    return weight
