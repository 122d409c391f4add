"""The ops of `nanochat.kernels` as native operations: recorded where a program is, else run at once.

Same arguments and results as there. What the C code can't do is refused before anything is touched.

``T`` rows, ``H`` query heads, ``Hkv`` KV heads, ``D`` head dim.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.native import library as c
from nanochat.kernels.native.emit import address, emit, require_whole, result_like, row_stride, type_of
from nanochat.kernels.native.library import Op
from nanochat.kernels.native.program import NotNative, current_program
from nanochat.kernels.normed import Normed


def take_rows(
    table: torch.Tensor, rows: torch.Tensor, *, scale: float = 1.0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `nanochat.kernels.take_rows`."""
    size = table.shape[1]
    y = result_like((rows.shape[0], size), dtype or table.dtype, rows)
    op = Op(kind=c.TAKE_ROWS, x_type=type_of(table), y_type=type_of(y), n=size, scale=scale)
    op.x_stride, op.x, op.y, op.index = row_stride(table), address(table), address(y), address(rows)
    require_whole(rows)
    emit(op, [rows], [table])
    return y


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `nanochat.kernels.rms_norm`."""
    y = result_like(tuple(x.shape), weight.dtype, x)
    summed = x
    op = Op(
        kind=c.RMS_NORM, x_type=type_of(x), y_type=type_of(y), w_type=type_of(weight), n=x.shape[1], eps=eps
    )
    op.plus_one = plus_one
    if residual is not None:
        if residual.dtype not in (x.dtype, torch.float32):
            raise NotNative("the residual is narrower than what is added to it")
        summed = result_like(tuple(x.shape), residual.dtype, x)
        op.residual_type, op.residual, op.summed = type_of(residual), address(residual), address(summed)
    op.x_stride, op.x, op.y, op.w = row_stride(x), address(x), address(y), address(weight)
    require_whole(weight, residual)
    emit(op, [x] if residual is None else [x, residual], [weight])
    return y, summed


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `nanochat.kernels.silu_mul`."""
    return _gated(gate_up, c.GATED_SILU)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `nanochat.kernels.gelu_tanh_mul`."""
    return _gated(gate_up, c.GATED_GELU)


def _gated(gate_up: torch.Tensor, kind: int) -> torch.Tensor:
    size = gate_up.shape[1] // 2
    y = result_like((gate_up.shape[0], size), gate_up.dtype, gate_up)
    op = Op(kind=kind, x_type=type_of(gate_up), y_type=type_of(y), n=size, x_stride=row_stride(gate_up))
    op.x, op.y = address(gate_up), address(y)
    row_stride(y)
    emit(op, [gate_up], [])
    return y


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Place of each row's largest number, of ``x [T, n]`` float32: ``[T]`` int64.

    The first of equal ones. NaN counts as -inf, and a row with nothing above that gives 0.
    """
    if x.dtype != torch.float32 or x.stride(1) != 1:
        raise NotNative("only rows of float32 are compared")
    y = result_like((x.shape[0],), torch.int64, x)
    op = Op(kind=c.ARGMAX, n=x.shape[1], x_stride=x.stride(0), x=address(x), y=address(y))
    emit(op, [x], [])
    return y


def sample_tokens(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """``[S]`` int64 tokens drawn from ``scores [S, V]`` float32: see `nanochat.engine.sampler.sample`.

    ``temperature``, ``top_p``, ``min_p`` ``[S]`` float32, ``top_k`` int32, ``seeds`` and ``positions`` int64.
    NaN counts as -inf, and +inf as the largest float.
    """
    if scores.dtype != torch.float32 or scores.stride(1) != 1:
        raise NotNative("only from rows of float32 can be drawn")
    y = result_like((scores.shape[0],), torch.int64, scores)
    weights = result_like(tuple(scores.shape), torch.float32, scores)
    op = Op(kind=c.SAMPLE, n=scores.shape[1], x_stride=scores.stride(0), x=address(scores), y=address(y))
    op.summed, op.index, op.seeds = address(weights), address(positions), address(seeds)
    op.temperature, op.top_p, op.min_p = address(temperature), address(top_p), address(min_p)
    op.top_k = address(top_k)
    require_whole(temperature, top_k, top_p, min_p, seeds, positions)
    emit(op, [scores], [])
    return y


def linear(
    x: torch.Tensor | Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `nanochat.kernels.linear`."""
    rows = x.finished() if isinstance(x, Normed) else x
    if rows.dtype != weight.dtype or weight.shape[1] % c.GROUP:
        raise NotNative("x must have the weight's type, and rows of whole groups")
    y = result_like((rows.shape[0], weight.shape[0]), dtype or weight.dtype, rows)
    op = Op(kind=c.LINEAR_FLOAT, x_type=type_of(rows), y_type=type_of(y), w_type=type_of(weight))
    op.inner, op.n, op.x_stride = weight.shape[1], weight.shape[0], row_stride(rows)
    op.x, op.y, op.w, op.bias = address(rows), address(y), address(weight), address(bias)
    require_whole(weight, bias)
    emit(op, [rows], [weight, bias])
    return y


def silu_linear(
    x: torch.Tensor | Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See `nanochat.kernels.silu_linear`."""
    return silu_mul(linear(x, weight, bias))


def linear_add_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
) -> tuple[Normed, torch.Tensor]:
    """See `nanochat.kernels.linear_add_norm`."""
    normed, summed = rms_norm(linear(x, weight, bias), norm_weight, eps, residual, plus_one=plus_one)
    return Normed(normed), summed


def store_kv(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
    """See `nanochat.kernels.store_kv`."""
    op = _store(k, v, cache, slots)
    emit(op, [k, v, slots], [cache])


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
    scratch: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """See `nanochat.kernels.rope_store`; needs no scratch."""
    op = _store(k, v, cache, slots)
    y = result_like(tuple(q.shape), q.dtype, q)
    op.y_type, op.heads, op.rotary_dim, op.eps, op.plus_one = (
        type_of(y),
        q.shape[1],
        0 if cos_sin is None else cos_sin.shape[1],
        eps,
        plus_one,
    )
    op.x_stride, op.x, op.y = row_stride(q), address(q), address(y)
    op.index, op.cos_sin = address(positions), address(cos_sin)
    op.q_norm, op.k_norm = address(q_norm), address(k_norm)
    require_whole(positions, cos_sin, q_norm, k_norm)
    emit(op, [q, k, v, slots, positions], [cos_sin, q_norm, k_norm, cache])
    return y


def _store(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> Op:
    op = Op(kind=c.ROPE_STORE, x_type=type_of(k), **_of_cache(cache))
    op.k_stride, op.v_stride, op.k, op.v = row_stride(k), row_stride(v), address(k), address(v)
    op.slots = address(slots)
    require_whole(slots)
    return op


def _of_cache(cache: LayerCache) -> dict[str, Any]:
    require_whole(cache.k, cache.v, cache.k_scale, cache.v_scale)
    _, block_size, kv_heads, dim = cache.k.shape
    if dim % c.LANES or dim > c.MAX_HEAD_DIM:
        raise NotNative(f"heads of {dim} dims aren't native")
    return {
        "cache_type": type_of(cache.k),
        "block_size": block_size,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "k_cache": address(cache.k),
        "v_cache": address(cache.v),
        "k_scale": address(cache.k_scale),
        "v_scale": address(cache.v_scale),
    }


def attention(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """See `nanochat.kernels.attention`.

    In steps of few tokens each reads its context by itself, decode or not; in others those that follow each other
    read it together.
    """
    is_wide = q.shape[0] > c.MAX_FEW_ROWS
    if is_wide and c.rounds_to_bf16() and torch.float32 in (q.dtype, cache.k.dtype):
        raise NotNative("many rows of float32 aren't native here")
    if q.shape[1] // cache.k.shape[2] > c.MAX_GROUP_HEADS:
        raise NotNative(f"more than {c.MAX_GROUP_HEADS} query heads share a KV head")
    y = result_like(tuple(q.shape), q.dtype, q)
    kind = c.ATTENTION_WIDE if is_wide else c.ATTENTION
    op = Op(kind=kind, x_type=type_of(q), y_type=type_of(y), heads=q.shape[1], **_of_cache(cache))
    op.scale, op.window, op.softcap = scale, window, softcap
    op.x_stride, op.x, op.y = row_stride(q), address(q), address(y)
    op.block_tables, op.table_width = address(batch.block_tables), batch.block_tables.shape[1]
    op.context_lens, op.query_starts = address(batch.context_lens), address(batch.query_starts)
    require_whole(batch.block_tables, batch.context_lens, batch.query_starts)
    program = current_program()
    num_rows = ctypes.c_int32(batch.num_rows)
    op.batch_rows = ctypes.addressof(num_rows)
    if program is not None:
        op.batch_rows = program.counter(batch.context_lens, batch.query_starts, batch.block_tables).address
    emit(op, [q], [cache, batch])
    return y
