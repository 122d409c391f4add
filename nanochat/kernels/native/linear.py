"""Linear maps with native kernels for few rows, their weights in the order that these read.

``T`` rows; weights are ``[N, K]``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanochat.kernels.cpu_linear import EXACT_DEVIATION, GROUP, LinearKernel, linear
from nanochat.kernels.native import ops
from nanochat.kernels.native.library import PANEL, find
from nanochat.kernels.native.program import current_program

MAX_ROWS = 32
"""Up to here native kernels are faster than PyTorch's."""


def can_take(weight: torch.Tensor) -> bool:
    """Whether there are native kernels here, and they multiply by a weight of this shape and type."""
    fits = weight.shape[1] % GROUP == 0 and weight.dtype in (torch.float32, torch.bfloat16)
    return fits and find() is not None


class NativeLinear:
    """A `LinearKernel`: native where a program is recorded or rows are few, else ``many``."""

    def __init__(self, few: LinearKernel, many: LinearKernel) -> None:
        self._few = few
        self._many = many

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        is_native = current_program() is not None or x.shape[0] <= MAX_ROWS
        return (self._few if is_native else self._many)(x, dtype)


class PackedInt4(NamedTuple):
    """What `cpu_linear.Int4Weight` holds, in the order of ``linear.h``."""

    levels: torch.Tensor
    """``[panels, K / 32, 320]`` uint8; outputs that fill up the last panel are 0."""
    num_outputs: int
    deviation: float


def quantize_int4(weight: torch.Tensor) -> PackedInt4:
    """`cpu_linear.quantize_int4`."""
    levels, deviation = ops.pack_int4(weight)
    return PackedInt4(levels, weight.shape[0], deviation)


def four_bit(weight: torch.Tensor) -> PackedInt4 | None:
    """`cpu_linear.four_bit`."""
    if ops.pack_int4(weight[:PANEL])[1] > EXACT_DEVIATION:
        return None
    packed = quantize_int4(weight)
    return packed if packed.deviation <= EXACT_DEVIATION else None


def int4(weight: PackedInt4, bias: torch.Tensor | None, many: LinearKernel) -> LinearKernel:
    """Four bits a weight for few rows, ``many`` for more."""
    levels, size = weight.levels, weight.num_outputs
    return NativeLinear(lambda x, dtype=None: ops.linear_int4(x, levels, size, bias, dtype or x.dtype), many)


def int8(weight: torch.Tensor, bias: torch.Tensor | None, many: LinearKernel) -> LinearKernel:
    """Eight bits a weight for few rows, ``many`` for more."""
    (packed, scales), size = ops.pack_int8(weight), weight.shape[0]
    return NativeLinear(
        lambda x, dtype=None: ops.linear_int8(x, packed, scales, size, bias, dtype or x.dtype), many
    )


def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearKernel:
    """The weight as it is, float32 or bfloat16, which PyTorch multiplies by many rows."""

    def many(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        y = linear(x, weight, bias)
        return y if dtype is None else y.to(dtype)

    return NativeLinear(lambda x, dtype=None: ops.linear(x, weight, bias, dtype=dtype), many)
