"""Native linear maps of weights in 4 and 8 bits, of few rows and of many, and what brings weights into that form.

``T`` rows; weights are ``[N, K]``.
"""

from __future__ import annotations

import torch

from nanochat.kernels.native import library as c
from nanochat.kernels.native.emit import address, emit, require_whole, result_like, row_stride, type_of
from nanochat.kernels.native.library import Op
from nanochat.kernels.native.program import NotNative


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


def _pack(
    kind: int, weight: torch.Tensor, group_bytes: int, numbers: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[panels, K / 32, group_bytes]`` uint8, and ``numbers`` float32 for each panel."""
    size, columns = weight.shape
    panels = -(-size // c.PANEL)
    packed = torch.empty(panels, columns // c.GROUP, group_bytes, dtype=torch.uint8)
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


def linear_wide(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    num_outputs: int,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The same maps of many rows ``x [T, K]``, which are not quantised: ``[T, num_outputs]``.

    ``packed`` is a weight in 4 or, with ``scales``, 8 bits as above, or a plain one ``[N, K]``. Products of
    BF16 where the processor has such instructions, else of float32; sums are float32.

    Raises:
        NotNative: the processor would round float32 to BF16.
    """
    if x.dtype != torch.bfloat16 and c.rounds_to_bf16():
        raise NotNative("many rows of float32 aren't native here")
    is_plain = packed.dim() == 2
    kind = c.LINEAR_WIDE_FLOAT if is_plain else c.LINEAR_WIDE_INT4 if scales is None else c.LINEAR_WIDE_INT8
    if is_plain and bias is not None and bias.dtype != packed.dtype:
        raise NotNative("weight and bias differ in type")
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
