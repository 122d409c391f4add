"""Linear maps with native kernels for few rows, their weights in the order that these read.

``T`` rows; weights are ``[N, K]``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanochat.kernels.cpu_linear import GROUP, Int4Weight, LinearKernel, quantize_int8
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


def int4(weight: Int4Weight, bias: torch.Tensor | None, many: LinearKernel) -> LinearKernel:
    """Four bits a weight for few rows, ``many`` for more."""
    packed, size = pack_int4(weight), weight.levels.shape[0]
    return NativeLinear(lambda x, dtype=None: ops.linear_int4(x, packed, size, bias, dtype or x.dtype), many)


def int8(weight: torch.Tensor, bias: torch.Tensor | None, many: LinearKernel) -> LinearKernel:
    """Eight bits a weight for few rows, ``many`` for more."""
    quantized, size = quantize_int8(weight), weight.shape[0]
    packed = pack_int8(quantized.values)
    scales = F.pad(quantized.scales, (0, -size % PANEL))
    return NativeLinear(
        lambda x, dtype=None: ops.linear_int8(x, packed, scales, size, bias, dtype or x.dtype), many
    )


def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearKernel:
    """The weight as it is, float32 or bfloat16, which PyTorch multiplies by many rows."""

    def many(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        y = F.linear(x, weight, bias)
        return y if dtype is None else y.to(dtype)

    return NativeLinear(lambda x, dtype=None: ops.linear(x, weight, bias, dtype=dtype), many)


def pack_int4(weight: Int4Weight) -> torch.Tensor:
    """``[panels, K / 32, 320]`` uint8, in the order of ``linear.h``; outputs that fill up the last panel are 0."""
    size, columns = weight.levels.shape
    padding = -size % PANEL
    levels = F.pad(weight.levels, (0, 0, 0, padding)).to(torch.uint8)
    # Panel, output, group, half, quad, byte.
    parts = levels.view(-1, PANEL, columns // GROUP, 2, 4, 4).permute(0, 2, 3, 4, 1, 5)
    levels = (parts[:, :, 0] | parts[:, :, 1] << 4).flatten(2)
    pairs = F.pad(weight.scales_and_zeros, (0, 0, 0, padding))
    pairs = pairs.view(columns // GROUP, -1, PANEL, 2).transpose(0, 1).contiguous()
    return torch.cat((levels, pairs.view(torch.uint8).flatten(2)), dim=2)


def pack_int8(values: torch.Tensor) -> torch.Tensor:
    """``[panels, K / 32, 512]`` uint8, likewise, of ``[N, K]`` int8."""
    size, columns = values.shape
    # Adding 128 turns the highest bit over.
    shifted = F.pad(values, (0, 0, 0, -size % PANEL)).view(torch.uint8) ^ 128
    parts = shifted.view(-1, PANEL, columns // GROUP, 8, 4).permute(0, 2, 3, 1, 4)
    return parts.flatten(2).contiguous()
