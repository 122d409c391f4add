"""Linear maps with native kernels, their weights in the order that these read.

``T`` rows; weights are ``[N, K]``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanochat.kernels.cpu_linear import EXACT_DEVIATION, GROUP, LinearKernel, linear
from nanochat.kernels.native import linear_ops, ops
from nanochat.kernels.native.library import MAX_FEW_ROWS, PANEL, find, rounds_to_bf16


def can_take(weight: torch.Tensor) -> bool:
    """Whether there are native kernels here, and they multiply by a weight of this shape and type."""
    fits = weight.shape[1] % GROUP == 0 and weight.dtype in (torch.float32, torch.bfloat16)
    return fits and find() is not None


def can_take_many_rows(weight: torch.Tensor) -> bool:
    """Whether they also multiply many rows of the weight's type, so that it isn't needed in another form."""
    return can_take(weight) and (weight.dtype == torch.bfloat16 or not rounds_to_bf16())


class NativeLinear:
    """A `LinearKernel`: one for few rows, another for more."""

    def __init__(self, few: LinearKernel, many: LinearKernel) -> None:
        self._few = few
        self._many = many

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (self._few if x.shape[0] <= MAX_FEW_ROWS else self._many)(x, dtype)


class PackedInt4(NamedTuple):
    """What `cpu_linear.Int4Weight` holds, in the order of ``linear.h``."""

    levels: torch.Tensor
    """``[panels, K / 32, 320]`` uint8; outputs that fill up the last panel are 0."""
    num_outputs: int
    deviation: float


def quantize_int4(weight: torch.Tensor) -> PackedInt4:
    """`cpu_linear.quantize_int4`."""
    levels, deviation = linear_ops.pack_int4(weight)
    return PackedInt4(levels, weight.shape[0], deviation)


def four_bit(weight: torch.Tensor) -> PackedInt4 | None:
    """`cpu_linear.four_bit`."""
    if linear_ops.pack_int4(weight[:PANEL])[1] > EXACT_DEVIATION:
        return None
    packed = quantize_int4(weight)
    return packed if packed.deviation <= EXACT_DEVIATION else None


def int4(weight: PackedInt4, bias: torch.Tensor | None, many: LinearKernel | None = None) -> LinearKernel:
    """Four bits a weight; ``many`` for more than few rows, if that shall be something else."""
    levels, size = weight.levels, weight.num_outputs
    return NativeLinear(
        lambda x, dtype=None: linear_ops.linear_int4(x, levels, size, bias, dtype or x.dtype),
        many or (lambda x, dtype=None: linear_ops.linear_wide(x, levels, None, size, bias, dtype or x.dtype)),
    )


def int8(weight: torch.Tensor, bias: torch.Tensor | None, many: LinearKernel | None = None) -> LinearKernel:
    """Eight bits a weight; the same."""
    (packed, scales), size = linear_ops.pack_int8(weight), weight.shape[0]
    return NativeLinear(
        lambda x, dtype=None: linear_ops.linear_int8(x, packed, scales, size, bias, dtype or x.dtype),
        many
        or (lambda x, dtype=None: linear_ops.linear_wide(x, packed, scales, size, bias, dtype or x.dtype)),
    )


def largest(
    weight: torch.Tensor, bias: torch.Tensor | None, many: LinearKernel | None = None
) -> LinearKernel:
    """`int8`, half of which is read for few rows where only a row's largest result is wanted: for logits."""
    (halves, vectors), size = linear_ops.pack_halves(weight), weight.shape[0]

    def few(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return linear_ops.linear_largest(x, halves, vectors, size, bias).to(dtype or x.dtype)

    return NativeLinear(
        few,
        many
        or (lambda x, dtype=None: linear_ops.linear_wide(x, halves, vectors, size, bias, dtype or x.dtype)),
    )


def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearKernel:
    """The weight as it is, float32 or bfloat16."""
    size = weight.shape[0]

    def many(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        if can_take_many_rows(weight):
            return linear_ops.linear_wide(x, weight, None, size, bias, dtype or x.dtype)
        y = linear(x, weight, bias)
        return y if dtype is None else y.to(dtype)

    return NativeLinear(lambda x, dtype=None: ops.linear(x, weight, bias, dtype=dtype), many)
