"""Native linear maps of weights in 4 and 8 bits, of few rows and of many, and what brings weights into that form.

``T`` rows; weights are ``[N, K]``.
"""

from __future__ import annotations

import ctypes

import torch

from nanochat.kernels.native import library as c
from nanochat.kernels.native.emit import address, emit, require_whole, result_like, row_stride, type_of
from nanochat.kernels.native.huge_pages import ROOM
from nanochat.kernels.native.library import Op
from nanochat.kernels.native.program import NotNative, current_program

_PANELS_AT_ONCE = 16
"""Of a matrix that is brought into two forms one after the other, for less memory."""


def quantize(x: torch.Tensor) -> torch.Tensor:
    """``x [T, K]`` in 8 bits, for `linear_int4` and `linear_int8`: ``[T, bytes]`` uint8, a row as in ``op.h``."""
    size = x.shape[1]
    if size % c.GROUP:
        raise NotNative(f"rows of {size} aren't whole groups of {c.GROUP}")
    y = result_like((x.shape[0], size + size // c.GROUP * 12), torch.uint8, x)
    op = Op(kind=c.QUANTIZE, x_type=type_of(x), inner=size, n=size, x_stride=row_stride(x))
    op.x, op.y = address(x), address(y)
    emit(op, [x], [])
    return y


def pack_int4(weight: torch.Tensor) -> tuple[torch.Tensor, float]:
    """``weight [N, K]`` as `cpu_linear.quantize_int4` has it, for `linear_int4`, and its ``deviation``."""
    packed, deviations = _pack(c.PACK_INT4, weight, 320, 1)
    return packed, float(deviations.max())


def pack_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight [N, K]`` as `cpu_linear.quantize_int8` has it, and its scales, for `linear_int8`."""
    return _pack(c.PACK_INT8, weight, 512, c.PANEL)


def pack_halves(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers for `linear_largest`: ``[2, panels, K / 32, 256]`` uint8, and ``[panels, 4, 16]`` float32."""
    (size, columns), step = weight.shape, _PANELS_AT_ONCE * c.PANEL
    panels, groups = -(-size // c.PANEL), columns // c.GROUP
    halves, vectors = ROOM.empty((2, panels, groups, 256)), torch.empty(panels, 4, c.PANEL)
    for first in range(0, panels, _PANELS_AT_ONCE):
        rows = weight[first * c.PANEL : first * c.PANEL + step]
        packed, scales = _pack(c.PACK_INT8, rows, 512, c.PANEL)
        part = torch.empty(2, len(packed), groups, 256, dtype=torch.uint8)
        op = Op(kind=c.PACK_HALVES, n=rows.shape[0], inner=columns, x=address(packed), y=address(part))
        op.w_scales, op.summed = address(scales), address(vectors[first:])
        emit(op, [rows], [])
        halves[:, first : first + _PANELS_AT_ONCE] = part
    return halves, vectors


def _pack(
    kind: int, weight: torch.Tensor, group_bytes: int, numbers: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[panels, K / 32, group_bytes]`` uint8, and ``numbers`` float32 for each panel."""
    size, columns = weight.shape
    panels = -(-size // c.PANEL)
    shape = (panels, columns // c.GROUP, group_bytes)
    # What is less than a few panels is only looked at.
    packed = torch.empty(shape, dtype=torch.uint8) if panels <= _PANELS_AT_ONCE else ROOM.empty(shape)
    results = torch.empty(panels * numbers)
    op = Op(kind=kind, x_type=type_of(weight), n=size, inner=columns)
    op.x, op.y, op.summed = address(weight), address(packed), address(results)
    require_whole(weight)
    emit(op, [weight], [])
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


def linear_largest(
    x: torch.Tensor, halves: torch.Tensor, vectors: torch.Tensor, num_outputs: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """`linear_int8` where a row's largest result may be all that is wanted: ``[T, num_outputs]`` float32.

    Bit for bit the same, except in a run of a program whose ``wants_all`` is 0: then only those are that may be a row's
    largest. The others are what the upper halves of the weights' bytes give, which are all that is read for them: see
    ``linear_upper.h``.
    """
    levels = quantize(x)
    y = result_like((x.shape[0], num_outputs), torch.float32, x)
    bounds = result_like((x.shape[0], 2), torch.float32, x)
    program, always = current_program(), ctypes.c_int32(1)
    wants_all = ctypes.addressof(always) if program is None else program.wants_all.address
    for kind in (c.LINEAR_UPPER, c.BOUND, c.LINEAR_REST):
        op = Op(kind=kind, y_type=c.FLOAT32, inner=x.shape[1], n=num_outputs, summed=address(bounds))
        op.x, op.y, op.w, op.w_scales = address(levels), address(y), address(halves), address(vectors)
        op.batch_rows, op.bias, op.w_type = wants_all, address(bias), 0 if bias is None else type_of(bias)
        emit(op, [levels, y, bounds], [halves, vectors, bias])
    return y


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
    y = result_like((x.shape[0], num_outputs), dtype, x)
    op = Op(kind=kind, y_type=type_of(y), inner=x.shape[1], n=num_outputs)
    op.x, op.y, op.w = address(levels), address(y), address(packed)
    op.w_scales, op.bias = address(scales), address(bias)
    op.w_type = 0 if bias is None else type_of(bias)
    emit(op, [levels], [packed, scales, bias])
    return y


def _widened(x: torch.Tensor) -> torch.Tensor:
    """``x [T, K]`` in float32; once for all the weight's panels that meet it."""
    if x.dtype == torch.float32:
        return x
    y = result_like(tuple(x.shape), torch.float32, x)
    op = Op(kind=c.WIDEN, x_type=type_of(x), n=x.shape[1], x_stride=row_stride(x))
    op.x, op.y = address(x), address(y)
    emit(op, [x], [])
    return y


def linear_wide(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    num_outputs: int,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The same maps of many rows ``x [T, K]``, which are not quantised: ``[T, num_outputs]``.

    ``packed`` is a weight in 4 or, with ``scales``, 8 bits as above, or a plain one ``[N, K]``; or
    `pack_halves` made it, and ``scales`` are its vectors. Products of BF16 where the processor has such
    instructions, else of float32; sums are float32.

    Raises:
        NotNative: the processor would round float32 to BF16.
    """
    if x.dtype != torch.bfloat16 and c.rounds_to_bf16():
        raise NotNative("many rows of float32 aren't native here")
    is_plain = packed.dim() == 2
    kind = c.LINEAR_WIDE_INT8
    if is_plain:
        kind = c.LINEAR_WIDE_FLOAT
    elif scales is None:
        kind = c.LINEAR_WIDE_INT4
    elif packed.dim() == 4:
        kind = c.LINEAR_WIDE_HALVES
    if is_plain and bias is not None and bias.dtype != packed.dtype:
        raise NotNative("weight and bias differ in type")
    if not c.rounds_to_bf16():
        x = _widened(x)
    y = result_like((x.shape[0], num_outputs), dtype, x)
    op = Op(
        kind=kind,
        x_type=type_of(x),
        y_type=type_of(y),
        inner=x.shape[1],
        n=num_outputs,
        x_stride=row_stride(x),
    )
    op.x, op.y, op.w = address(x), address(y), address(packed)
    op.w_scales, op.bias = address(scales), address(bias)
    op.w_type = type_of(packed) if is_plain else 0 if bias is None else type_of(bias)
    require_whole(packed, scales, bias)
    if x.shape[1] % c.GROUP:
        raise NotNative(f"rows of {x.shape[1]} aren't whole groups of {c.GROUP}")
    emit(op, [x], [packed, scales, bias])
    return y
