"""Linear maps on the CPU: weights in the forms that its kernels read fastest, each chosen by the number of rows.

At few rows a linear map takes as long as its weights take to arrive from memory, so fewer bytes are faster;
at many rows, what counts is how fast the cores multiply. docs/kernels.md has the measurements behind the
constants. What a build of PyTorch or a processor lacks is found by trying it.

``T`` rows; weights are ``[N, K]``. Knows nothing of models or files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F


class LinearKernel(Protocol):
    """A linear map whose weight is prepared."""

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """``[T, K]`` to ``[T, N]``, of the same type or of ``dtype``."""


GROUP = 32
"""Weights, side by side in a row, that share a scale and a zero point."""
LEVELS = 16
MIDDLE = 8
"""The level that stands for the zero point."""
INT4_MAX_ROWS = 8
"""Up to here the 4-bit kernel is the fastest."""
INT8_MAX_ROWS = 4
"""The same of the 8-bit kernel."""
TURNED_MAX_ROWS = 8
"""Up to here a plain BF16 weight is faster as the left factor."""
EXACT_ROWS = 16
"""Up to here a product is computed with as many rows as there are."""
_CHUNK = 2**17
"""Weights quantised at a time: all that is needed for it stays in a core's own cache."""
_FIRST_ROWS = 16
"""Enough to tell that a weight has more than 16 levels."""
EXACT_DEVIATION = 0.2
"""A group is one of 16 levels if no weight is further than this from one, in steps between levels.

Rounding levels to BF16 moves them by 0.06 where the smallest and the largest have different signs."""


class Int4Weight(NamedTuple):
    """``weight[n, k]`` is about ``(levels[n, k] - 8) * scale + zero``, by its group's scale and zero."""

    levels: torch.Tensor
    """``[N, K]`` int32, 0 to 15."""
    scales_and_zeros: torch.Tensor
    """``[K / 32, N, 2]`` bfloat16."""
    deviation: float
    """How far a weight was from its level at most, in steps between levels."""


class Int8Weight(NamedTuple):
    """``weight[n, k]`` is about ``values[n, k] * scales[n]``."""

    values: torch.Tensor
    """``[N, K]`` int8."""
    scales: torch.Tensor
    """``[N]`` float32."""


def quantize_int4(weight: torch.Tensor) -> Int4Weight:
    """The nearest of 16 levels in each group of 32: exact, but for the rounding of scale and zero, if it has no more.

    Scale and zero are those of least squares for the levels found, the zero for the scale as rounded.
    """
    num_rows, num_columns = weight.shape
    levels = torch.empty(num_rows, num_columns, dtype=torch.int32)
    both = torch.empty(num_columns // GROUP, num_rows, 2, dtype=torch.bfloat16)
    deviation = 0.0
    step = max(1, _CHUNK // num_columns)
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        deviation = max(deviation, _quantize_rows(weight[rows], levels[rows], both[:, rows]))
    return Int4Weight(levels, both, deviation)


def _quantize_rows(weight: torch.Tensor, levels: torch.Tensor, both: torch.Tensor) -> float:
    """Fill ``levels`` and ``both`` for some rows; how far a weight is from its level at most, in steps."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    step = ((highest - lowest) / (LEVELS - 1)).clamp_(min=torch.finfo(torch.float32).tiny)
    places = (groups - lowest).div_(step)
    nearest = places.round()
    levels.copy_(nearest.flatten(1))
    deviation = float((places - nearest).abs_().max())
    level_mean = nearest.mean(-1, keepdim=True)
    centred = nearest.sub_(level_mean)
    spread = torch.linalg.vecdot(centred, centred).clamp_(min=1.0).unsqueeze(-1)
    scale = (torch.linalg.vecdot(centred, groups).unsqueeze(-1) / spread).bfloat16()
    zero = groups.mean(-1, keepdim=True) - scale.float() * (level_mean - MIDDLE)
    both[..., 0] = scale.squeeze(-1).t()
    both[..., 1] = zero.squeeze(-1).t()
    return deviation


def dequantize_int4(weight: Int4Weight) -> torch.Tensor:
    """``[N, K]`` float32."""
    scale, zero = weight.scales_and_zeros.float().transpose(0, 1).unsqueeze(-2).unbind(-1)
    groups = weight.levels.unflatten(1, (-1, GROUP)) - MIDDLE
    return (groups * scale + zero).flatten(1)


def four_bit(weight: torch.Tensor) -> Int4Weight | None:
    """The weight in 4 bits, if each group of 32 holds no more than 16 evenly spaced values, both ends among them.

    So it does if the weight was made from Q4_1 blocks, whatever type it has now.
    """
    if weight.shape[1] % GROUP or quantize_int4(weight[:_FIRST_ROWS]).deviation > EXACT_DEVIATION:
        return None
    quantized = quantize_int4(weight)
    return quantized if quantized.deviation <= EXACT_DEVIATION else None


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """A scale a row, and the nearest of 255 levels."""
    num_rows, num_columns = weight.shape
    values = torch.empty(num_rows, num_columns, dtype=torch.int8)
    scales = torch.empty(num_rows, dtype=torch.float32)
    step = max(1, _CHUNK // num_columns)
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        wide = weight[rows].float()
        highest = torch.linalg.vector_norm(wide, float("inf"), dim=1)
        scales[rows] = highest.div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
        values[rows] = (wide / scales[rows].unsqueeze(1)).round_()
    return Int8Weight(values, scales)


def dequantize_int8(weight: Int8Weight) -> torch.Tensor:
    """``[N, K]`` float32."""
    return weight.values * weight.scales.unsqueeze(1)


def rows_computed(num_rows: int) -> int:
    """How many rows a product is given, the last of them zeros: a sixteenth more than there are, or 15, at most.

    For every number of rows that a weight meets, oneDNN makes code and never gives all of it back: 0.6 MiB,
    for each shape of weights. Prompts of every length up to 2,048 would take gigabytes. Of these sizes, 79
    in all up to there, most are soon met.
    """
    if num_rows <= EXACT_ROWS:
        return num_rows
    step = max(EXACT_ROWS, 1 << (num_rows - 1).bit_length() - 5)
    return -(-num_rows // step) * step


def in_few_sizes(multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``multiply(x)``, which takes each row of ``x [T, K]`` by itself, computed with `rows_computed` rows."""
    num_rows = x.shape[0]
    size = rows_computed(num_rows)
    if size == num_rows:
        return multiply(x)
    padded = x.new_empty(size, x.shape[1])
    padded[:num_rows] = x
    padded[num_rows:].zero_()
    return multiply(padded)[:num_rows]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` of ``x [T, K]``: by MKL for float32, else by oneDNN, in few sizes."""
    if x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    return in_few_sizes(lambda rows: F.linear(rows, weight, bias), x)


def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearKernel:
    """The weight as it is, which another part of a model may hold as well."""
    if weight.dtype != torch.bfloat16:
        return _typed(lambda x: linear(x, weight, bias))

    def multiply(x: torch.Tensor) -> torch.Tensor:
        # F.linear would bring the whole weight into another order each time.
        rows = x.shape[0]
        if rows > TURNED_MAX_ROWS:
            return linear(x, weight, bias)
        if rows == 1:
            y = torch.mv(weight, x.view(-1)).unsqueeze(0)
        else:
            y = torch.mm(weight, x.t()).t().contiguous()
        return y if bias is None else y.add_(bias)

    return _typed(multiply)


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearKernel:
    """A copy in oneDNN's own order, where there is such a thing: the weight itself isn't needed any more."""
    if not _works(_try_packed, weight.dtype):
        return plain(weight, bias)
    ordered = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    multiply = torch.ops.mkldnn._linear_pointwise

    def product(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = multiply(x, ordered, bias, "none", [], "")
        return result

    return _typed(lambda x: in_few_sizes(product, x))


def int4(weight: Int4Weight, bias: torch.Tensor | None, many: LinearKernel) -> LinearKernel:
    """Four bits a weight for few rows, ``many`` for more, or where the build or the shape allows no four bits."""
    if weight.levels.shape[0] % 16 or not _works(_try_int4):
        return many
    ordered = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.levels, 1)
    scales_and_zeros = weight.scales_and_zeros
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu

    def few(x: torch.Tensor) -> torch.Tensor:
        # Of float types only BF16 has a fast kernel.
        y = multiply(x.to(torch.bfloat16), ordered, GROUP, scales_and_zeros).to(x.dtype)
        return y if bias is None else y.add_(bias)

    return _typed(lambda x: few(x) if x.shape[0] <= INT4_MAX_ROWS else many(x))


def int8(weight: torch.Tensor, bias: torch.Tensor | None, many: LinearKernel) -> LinearKernel:
    """Eight bits a weight for few rows, ``many`` for more."""
    if not _works(_try_int8, weight.dtype):
        return many
    values, wide_scales = quantize_int8(weight)
    scales = wide_scales.to(weight.dtype)
    multiply = torch.ops.aten._weight_int8pack_mm

    def few(x: torch.Tensor) -> torch.Tensor:
        y = multiply(x, values, scales)
        return y if bias is None else y.add_(bias)

    return _typed(lambda x: few(x) if x.shape[0] <= INT8_MAX_ROWS else many(x))


def _typed(multiply: Callable[[torch.Tensor], torch.Tensor]) -> LinearKernel:
    def kernel(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        y = multiply(x)
        return y if dtype is None else y.to(dtype)

    return kernel


@functools.cache
def _works(attempt: Callable[..., object], *arguments: torch.dtype) -> bool:
    try:
        attempt(*arguments)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True


def _try_packed(dtype: torch.dtype) -> None:
    ordered = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 32, dtype=dtype), None)
    torch.ops.mkldnn._linear_pointwise(torch.zeros(1, 32, dtype=dtype), ordered, None, "none", [], "")


def _try_int4() -> None:
    weight = quantize_int4(torch.zeros(16, GROUP))
    ordered = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.levels, 1)
    x = torch.zeros(1, GROUP, dtype=torch.bfloat16)
    torch.ops.aten._weight_int4pack_mm_for_cpu(x, ordered, GROUP, weight.scales_and_zeros)


def _try_int8(dtype: torch.dtype) -> None:
    x, scales = torch.zeros(1, 32, dtype=dtype), torch.zeros(16, dtype=dtype)
    torch.ops.aten._weight_int8pack_mm(x, torch.zeros(16, 32, dtype=torch.int8), scales)
