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
from nanochat.kernels.native.library import Op
from nanochat.kernels.native.program import NotNative, current_program
from nanochat.kernels.normed import Normed

_TYPES = {torch.float32: c.FLOAT32, torch.bfloat16: c.BFLOAT16, torch.int8: c.INT8}


def _emit(op: Op, read: list[torch.Tensor], kept: list[Any]) -> None:
    """Append to the program that is recorded, or run. ``read``: tensors of a step, all with as many rows."""
    program = current_program()
    if program is not None:
        op.rows = program.counter(*read).address
        program.append(op, kept)
        return
    rows = ctypes.c_int32(read[0].shape[0])
    op.rows = ctypes.addressof(rows)
    found = c.find()
    if found is None:
        raise NotNative("there are no native kernels here")
    found.run((Op * 1)(op), 1, torch.get_num_threads())


def _result(shape: tuple[int, ...], dtype: torch.dtype, read: torch.Tensor) -> torch.Tensor:
    program = current_program()
    if program is None:
        return torch.empty(shape, dtype=dtype)
    return program.result(shape, dtype, program.counter(read))


def _type(tensor: torch.Tensor) -> int:
    known = _TYPES.get(tensor.dtype)
    if known is None or tensor.device.type != "cpu":
        raise NotNative(f"{tensor.dtype} on {tensor.device} isn't native")
    return known


def _rows(tensor: torch.Tensor) -> int:
    """Numbers from one row to the next; each row lies in one piece, of whole vectors."""
    size = 1
    for dim in range(tensor.dim() - 1, 0, -1):
        if tensor.stride(dim) != size and tensor.shape[dim] != 1:
            raise NotNative("a row doesn't lie in one piece")
        size *= tensor.shape[dim]
    if tensor.shape[-1] % c.LANES:
        raise NotNative(f"rows of {tensor.shape[-1]} aren't whole vectors")
    return tensor.stride(0) if tensor.shape[0] > 1 else size


def _whole(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise NotNative("a tensor isn't contiguous")


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def take_rows(
    table: torch.Tensor, rows: torch.Tensor, *, scale: float = 1.0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `nanochat.kernels.take_rows`."""
    size = table.shape[1]
    y = _result((rows.shape[0], size), dtype or table.dtype, rows)
    op = Op(kind=c.TAKE_ROWS, x_type=_type(table), y_type=_type(y), n=size, scale=scale)
    op.x_stride, op.x, op.y, op.index = _rows(table), _address(table), _address(y), _address(rows)
    _whole(rows)
    _emit(op, [rows], [table])
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
    y = _result(tuple(x.shape), weight.dtype, x)
    summed = x
    op = Op(kind=c.RMS_NORM, x_type=_type(x), y_type=_type(y), w_type=_type(weight), n=x.shape[1], eps=eps)
    op.plus_one = plus_one
    if residual is not None:
        if residual.dtype not in (x.dtype, torch.float32):
            raise NotNative("the residual is narrower than what is added to it")
        summed = _result(tuple(x.shape), residual.dtype, x)
        op.residual_type, op.residual, op.summed = _type(residual), _address(residual), _address(summed)
    op.x_stride, op.x, op.y, op.w = _rows(x), _address(x), _address(y), _address(weight)
    _whole(weight, residual)
    _emit(op, [x] if residual is None else [x, residual], [weight])
    return y, summed


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `nanochat.kernels.silu_mul`."""
    return _gated(gate_up, c.GATED_SILU)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `nanochat.kernels.gelu_tanh_mul`."""
    return _gated(gate_up, c.GATED_GELU)


def _gated(gate_up: torch.Tensor, kind: int) -> torch.Tensor:
    size = gate_up.shape[1] // 2
    y = _result((gate_up.shape[0], size), gate_up.dtype, gate_up)
    op = Op(kind=kind, x_type=_type(gate_up), y_type=_type(y), n=size, x_stride=_rows(gate_up))
    op.x, op.y = _address(gate_up), _address(y)
    _rows(y)
    _emit(op, [gate_up], [])
    return y


def quantize(x: torch.Tensor) -> torch.Tensor:
    """``x [T, K]`` in 8 bits, for `linear_int4` and `linear_int8`: ``[T, bytes]`` uint8, a row as in ``op.h``."""
    size = x.shape[1]
    if size % c.GROUP:
        raise NotNative(f"rows of {size} aren't whole groups of {c.GROUP}")
    y = _result((x.shape[0], size + size // c.GROUP * 12), torch.uint8, x)
    op = Op(kind=c.QUANTIZE, x_type=_type(x), inner=size, n=size, x_stride=_rows(x))
    op.x, op.y = _address(x), _address(y)
    _emit(op, [x], [])
    return y


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Place of each row's largest number, of ``x [T, n]`` float32: ``[T]`` int64.

    The first of equal ones. NaN counts as -inf, and a row with nothing above that gives 0.
    """
    if x.dtype != torch.float32 or x.stride(1) != 1:
        raise NotNative("only rows of float32 are compared")
    y = _result((x.shape[0],), torch.int64, x)
    op = Op(kind=c.ARGMAX, n=x.shape[1], x_stride=x.stride(0), x=_address(x), y=_address(y))
    _emit(op, [x], [])
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
    y = _result((scores.shape[0],), torch.int64, scores)
    weights = _result(tuple(scores.shape), torch.float32, scores)
    op = Op(kind=c.SAMPLE, n=scores.shape[1], x_stride=scores.stride(0), x=_address(scores), y=_address(y))
    op.summed, op.index, op.seeds = _address(weights), _address(positions), _address(seeds)
    op.temperature, op.top_p, op.min_p = _address(temperature), _address(top_p), _address(min_p)
    op.top_k = _address(top_k)
    _whole(temperature, top_k, top_p, min_p, seeds, positions)
    _emit(op, [scores], [])
    return y


def pack_int4(weight: torch.Tensor) -> tuple[torch.Tensor, float]:
    """``weight [N, K]`` as `cpu_linear.quantize_int4` has it, for `linear_int4`, and its ``deviation``."""
    packed, deviations = _pack(c.PACK_INT4, weight, 320, 1)
    return packed, float(deviations.max())


def pack_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight [N, K]`` as `cpu_linear.quantize_int8` has it, and its scales, for `linear_int8`."""
    return _pack(c.PACK_INT8, weight, 512, c.PANEL)


def _pack(
    kind: int, weight: torch.Tensor, group_bytes: int, numbers: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[panels, K / 32, group_bytes]`` uint8, and ``numbers`` float32 for each panel."""
    size, columns = weight.shape
    panels = -(-size // c.PANEL)
    packed = torch.empty(panels, columns // c.GROUP, group_bytes, dtype=torch.uint8)
    results = torch.empty(panels * numbers)
    op = Op(kind=kind, x_type=_type(weight), n=size, inner=columns)
    op.x, op.y, op.summed = _address(weight), _address(packed), _address(results)
    _whole(weight)
    _emit(op, [weight], [])
    return packed, results


def linear_int4(
    x: torch.Tensor, packed: torch.Tensor, num_outputs: int, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """``x [T, K]`` by weights in the order of ``linear.h``, quantised first: ``[T, num_outputs]``."""
    return _compact(c.LINEAR_INT4, x, packed, None, num_outputs, bias, dtype)


def linear_int8(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    num_outputs: int,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The same of 8-bit weights, with ``scales`` float32 for each output, in whole panels."""
    return _compact(c.LINEAR_INT8, x, packed, scales, num_outputs, bias, dtype)


def _compact(
    kind: int,
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    num_outputs: int,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    levels = quantize(x)
    y = _result((x.shape[0], num_outputs), dtype, x)
    op = Op(kind=kind, y_type=_type(y), inner=x.shape[1], n=num_outputs)
    op.x, op.y, op.w = _address(levels), _address(y), _address(packed)
    op.w_scales, op.bias = _address(scales), _address(bias)
    op.w_type = 0 if bias is None else _type(bias)
    _emit(op, [levels], [packed, scales, bias])
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
    y = _result((rows.shape[0], weight.shape[0]), dtype or weight.dtype, rows)
    op = Op(kind=c.LINEAR_FLOAT, x_type=_type(rows), y_type=_type(y), w_type=_type(weight))
    op.inner, op.n, op.x_stride = weight.shape[1], weight.shape[0], _rows(rows)
    op.x, op.y, op.w, op.bias = _address(rows), _address(y), _address(weight), _address(bias)
    _whole(weight, bias)
    _emit(op, [rows], [weight, bias])
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
    _emit(op, [k, v, slots], [cache])


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
    y = _result(tuple(q.shape), q.dtype, q)
    op.y_type, op.heads, op.rotary_dim, op.eps, op.plus_one = (
        _type(y),
        q.shape[1],
        0 if cos_sin is None else cos_sin.shape[1],
        eps,
        plus_one,
    )
    op.x_stride, op.x, op.y = _rows(q), _address(q), _address(y)
    op.index, op.cos_sin = _address(positions), _address(cos_sin)
    op.q_norm, op.k_norm = _address(q_norm), _address(k_norm)
    _whole(positions, cos_sin, q_norm, k_norm)
    _emit(op, [q, k, v, slots, positions], [cos_sin, q_norm, k_norm, cache])
    return y


def _store(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> Op:
    op = Op(kind=c.ROPE_STORE, x_type=_type(k), **_of_cache(cache))
    op.k_stride, op.v_stride, op.k, op.v = _rows(k), _rows(v), _address(k), _address(v)
    op.slots = _address(slots)
    _whole(slots)
    return op


def _of_cache(cache: LayerCache) -> dict[str, Any]:
    _whole(cache.k, cache.v, cache.k_scale, cache.v_scale)
    _, block_size, kv_heads, dim = cache.k.shape
    if dim % c.LANES or dim > c.MAX_HEAD_DIM:
        raise NotNative(f"heads of {dim} dims aren't native")
    return {
        "cache_type": _type(cache.k),
        "block_size": block_size,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "k_cache": _address(cache.k),
        "v_cache": _address(cache.v),
        "k_scale": _address(cache.k_scale),
        "v_scale": _address(cache.v_scale),
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
    """See `nanochat.kernels.attention`. Every token reads its context by itself, decode or not."""
    if q.shape[1] // cache.k.shape[2] > c.MAX_GROUP_HEADS:
        raise NotNative(f"more than {c.MAX_GROUP_HEADS} query heads share a KV head")
    y = _result(tuple(q.shape), q.dtype, q)
    op = Op(kind=c.ATTENTION, x_type=_type(q), y_type=_type(y), heads=q.shape[1], **_of_cache(cache))
    op.scale, op.window, op.softcap = scale, window, softcap
    op.x_stride, op.x, op.y = _rows(q), _address(q), _address(y)
    op.block_tables, op.table_width = _address(batch.block_tables), batch.block_tables.shape[1]
    op.context_lens, op.query_starts = _address(batch.context_lens), _address(batch.query_starts)
    _whole(batch.block_tables, batch.context_lens, batch.query_starts)
    program = current_program()
    num_rows = ctypes.c_int32(batch.num_rows)
    op.batch_rows = ctypes.addressof(num_rows)
    if program is not None:
        op.batch_rows = program.counter(batch.context_lens, batch.query_starts, batch.block_tables).address
    _emit(op, [q], [cache, batch])
    return y
