"""Linear maps of a few rows on the GPU, their weights on the way before the kernel before them has ended.

A decode step of few rows reads every weight once and does next to nothing with it, so all that counts is that
memory never rests. Weights don't depend on the step: under programmatic dependent launch a program loads its whole
tile of them into registers, in the layout in which the tensor cores take their left operand, and only then waits for
the kernel before it. What is left after the wait is short: load the rows (right operand, straight from the
L2), multiply, add up over the warps, which each have a part of the inner dimension, store. Neighbours are
part of it: SiLU and product, the residual's addition, and the RMS norm, whose weight is multiplied in here
while its division is left to the next map (see `Normed`).

Every program has ``16 * repeat`` outputs. What this module's functions leave to others: more rows to
`gpu_linear_split` on Hopper; larger batches, other types and shapes to cuBLAS. In Gluon, which lets a kernel
choose its layouts; it is part of the triton package.

Knows nothing of models.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra import cuda

from nanochat.kernels.activation import silu_mul
from nanochat.kernels.gpu_linear_split import allocate_arrivals, launch_split_linear
from nanochat.kernels.norm_rope import divide_norm, rms_norm
from nanochat.kernels.normed import Normed
from nanochat.kernels.triton_utils import INTERPRETED, dependent_launch, device_info, next_power_of_2
from nanochat.kernels.tuning import SPLIT_TILE, LinearConfig, SplitConfig, linear_config, split_config

READ_EARLY = {"weight_ptr": None, "bias_ptr": None, "norm_ptr": None}
"""What is read before the kernel before this one has ended: weights alone, which no kernel writes."""


def linear(
    x: torch.Tensor | Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    scratch: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """See `nanochat.kernels.linear`."""
    normed = x if isinstance(x, Normed) else Normed(x)
    config = _config(normed.values, weight, bias, 1)
    if config is None:
        if dtype == torch.float32 != weight.dtype and bias is None and weight.is_cuda:
            return torch.mm(divide_norm(normed), weight.T, out_dtype=dtype)
        out = F.linear(divide_norm(normed), weight, bias)
        return out if dtype is None else out.to(dtype)
    out = torch.empty(
        (normed.values.shape[0], weight.shape[0]), dtype=dtype or weight.dtype, device=weight.device
    )
    _launch(normed, weight, bias, out, config, scratch)
    return out


def silu_linear(
    x: torch.Tensor | Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scratch: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """See `nanochat.kernels.silu_linear`."""
    normed = x if isinstance(x, Normed) else Normed(x)
    config = _config(normed.values, weight, bias, 2)
    if config is None:
        return silu_mul(linear(normed, weight, bias, scratch=scratch))
    shape = (normed.values.shape[0], weight.shape[0] // 2)
    out = torch.empty(shape, dtype=weight.dtype, device=weight.device)
    _launch(normed, weight, bias, out, config, scratch, gated=True)
    return out


def linear_add_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    scratch: dict[Any, Any] | None = None,
) -> tuple[Normed, torch.Tensor]:
    """See `nanochat.kernels.linear_add_norm`."""
    config = _config(x, weight, bias, 1)
    # Undivided rows may be too large for FP16.
    types = (weight.dtype, norm_weight.dtype, residual.dtype)
    fits = types == (torch.bfloat16, torch.bfloat16, torch.float32)
    dense = residual.stride(1) == 1 and norm_weight.stride(0) == 1
    joins = isinstance(config, SplitConfig) or (config is not None and config.joins_norm)
    if config is None or not (joins and fits and dense):
        y = linear(x, weight, bias, scratch=scratch)
        normed, summed = rms_norm(y, norm_weight, eps, residual, plus_one=plus_one)
        return Normed(normed), summed
    rows, out_size = x.shape[0], weight.shape[0]
    values = torch.empty((rows, out_size), dtype=weight.dtype, device=weight.device)
    summed = torch.empty((rows, out_size), dtype=torch.float32, device=weight.device)
    programs = out_size // (SPLIT_TILE if isinstance(config, SplitConfig) else 16 * config.repeat)
    squares = torch.empty((programs, rows), dtype=torch.float32, device=weight.device)
    epilogue = (residual, norm_weight, summed, squares)
    _launch(Normed(x), weight, bias, values, config, scratch, epilogue=epilogue, plus_one=plus_one)
    return Normed(values, squares, eps), summed


def _config(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: int
) -> LinearConfig | SplitConfig | None:
    """How to launch for these rows and ``parts`` weights side by side; None: leave it to cuBLAS."""
    if (
        INTERPRETED  # which doesn't know Gluon
        or weight.dtype not in (torch.bfloat16, torch.float16)
        or x.dtype != weight.dtype
        or x.stride(1) != 1
        or x.stride(0) % 8
        or not weight.is_contiguous()
        or (bias is not None and bias.stride(0) != 1)
        or x.data_ptr() % 16
        or weight.data_ptr() % 16
    ):
        return None
    info = device_info(x.device)
    out_size, in_size = weight.shape
    sizes = (x.shape[0], in_size, out_size // parts, parts)
    # Asynchronous copies need to know when they are compiled that rows begin at multiples of 16 bytes.
    split = None if x.stride(0) % 16 else split_config(info.capability, info.num_sms, *sizes)
    return split or linear_config(info.capability, *sizes)


def _launch(
    x: Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: LinearConfig | SplitConfig,
    scratch: dict[Any, Any] | None,
    **options: Any,
) -> None:
    if isinstance(config, LinearConfig):
        launch_linear(x, weight, bias, out, config, **options)
        return
    arrivals = None
    if config.splits > 1:
        key, kept = "linear_arrivals", {} if scratch is None else scratch
        if key not in kept:
            kept[key] = allocate_arrivals(weight.device)
        arrivals = kept[key]
    launch_split_linear(x, weight, bias, out, config, arrivals, **options)


def launch_linear(
    x: Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: LinearConfig,
    *,
    gated: bool = False,
    epilogue: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    plus_one: bool = False,
) -> None:
    """Launch for ``x.values [T, in]``, ``weight [out, in]`` (``[2 out, in]`` if gated) into ``out [T, out]``.

    ``epilogue``: residual ``[T, out]`` float32, norm weight ``[out]``, and where their results go: the sum
    ``[T, out]`` float32 and the sums of its squares ``[out / (16 * repeat), T]``. Without checks.
    """
    (rows, in_size), out_size = x.values.shape, out.shape[1]
    residual, norm_weight, summed, squares = epilogue or (None, None, None, None)
    dependent = dependent_launch(weight.device)
    row_tile = config.row_tile
    _linear_kernel[(out_size // (16 * config.repeat),)](
        x.values,
        x.squares,
        weight,
        bias,
        residual,
        norm_weight,
        out,
        summed,
        squares,
        rows,
        x.values.stride(0),
        0 if residual is None else residual.stride(0),
        x.eps,
        IN_SIZE=in_size,
        OUT_SIZE=out_size,
        SQUARES=x.num_parts,
        SQUARES_TILE=max(16, next_power_of_2(x.num_parts)),
        SPLIT=config.split,
        STEP=config.step,
        REPEAT=config.repeat,
        ROW_TILE=row_tile,
        ROW_TILES=triton.cdiv(rows, row_tile),
        GATED=gated,
        PLUS_ONE=plus_one,
        DEPENDENT=dependent,
        num_warps=config.split,
        launch_pdl=dependent,
    )


@gluon.jit
def _load_steps(ptrs, WIDTH: gl.constexpr, STEPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of weights: one tensor for each step along the inner dimension."""
    tiles = (gl.load(ptrs),)
    for step in gl.static_range(1, STEPS):
        tiles = tiles + (gl.load(ptrs + step * WIDTH),)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@gluon.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr: gl.tensor,
    squares_ptr: gl.tensor,
    weight_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    residual_ptr: gl.tensor,
    norm_ptr: gl.tensor,
    out_ptr: gl.tensor,
    summed_ptr: gl.tensor,
    out_squares_ptr: gl.tensor,
    rows: int,
    x_stride: int,
    residual_stride: int,
    eps: float,
    IN_SIZE: gl.constexpr,
    OUT_SIZE: gl.constexpr,
    SQUARES: gl.constexpr,
    SQUARES_TILE: gl.constexpr,
    SPLIT: gl.constexpr,
    STEP: gl.constexpr,
    REPEAT: gl.constexpr,
    ROW_TILE: gl.constexpr,
    ROW_TILES: gl.constexpr,
    GATED: gl.constexpr,
    PLUS_ONE: gl.constexpr,
    DEPENDENT: gl.constexpr,
) -> None:
    # Tiles are [warp, output, inner] and [warp, inner, row]: each warp multiplies its part of the inner
    # dimension. With eight neighbours of it to a thread, instead of the instruction's two, loads are 16 bytes
    # wide; both operands then have the inner dimension in the same other order, and a sum has no order.
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SPLIT, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    OUT: gl.constexpr = gl.SliceLayout(0, MMA)
    WIDTH: gl.constexpr = SPLIT * STEP
    STEPS: gl.constexpr = IN_SIZE // WIDTH
    TILE: gl.constexpr = 16 * REPEAT
    if DEPENDENT:
        cuda.gdc_launch_dependents()
    program = gl.program_id(0)

    warps = gl.arange(0, SPLIT, layout=gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))
    outputs = gl.arange(0, TILE, layout=gl.SliceLayout(1, gl.SliceLayout(0, LEFT)))
    inner = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(0, LEFT)))
    weight_ptrs = weight_ptr + program.to(gl.int64) * (TILE * IN_SIZE)
    weight_ptrs += gl.expand_dims(gl.expand_dims(outputs, 1), 0) * IN_SIZE
    weight_ptrs += gl.expand_dims(gl.expand_dims(warps, 1), 2) * STEP
    weight_ptrs += gl.expand_dims(gl.expand_dims(inner, 0), 0)
    weight = _load_steps(weight_ptrs, WIDTH, STEPS)
    if GATED:
        up_weight = _load_steps(weight_ptrs + OUT_SIZE * IN_SIZE, WIDTH, STEPS)
    out_cols = program * TILE + gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(1, OUT)), 1)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + out_cols).to(gl.float32)
        if GATED:
            up_bias = gl.load(bias_ptr + OUT_SIZE + out_cols).to(gl.float32)
    if norm_ptr is not None:
        norm_weight = gl.load(norm_ptr + out_cols).to(gl.float32)
        if PLUS_ONE:
            norm_weight += 1.0
    warps_right = gl.arange(0, SPLIT, layout=gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))
    inner_right = gl.arange(0, STEP, layout=gl.SliceLayout(1, gl.SliceLayout(0, RIGHT)))
    rows_right = gl.arange(0, ROW_TILE, layout=gl.SliceLayout(0, gl.SliceLayout(0, RIGHT)))
    rows_right = gl.expand_dims(gl.expand_dims(rows_right, 0), 0)
    x_cols = gl.expand_dims(gl.expand_dims(warps_right, 1), 2) * STEP
    x_cols += gl.expand_dims(gl.expand_dims(inner_right, 1), 0)
    parts = gl.expand_dims(gl.arange(0, SQUARES_TILE, layout=gl.SliceLayout(1, OUT)), 1)
    if DEPENDENT:
        cuda.gdc_wait()

    for row_tile in gl.static_range(ROW_TILES):
        x_rows = row_tile * ROW_TILE + rows_right
        out_rows = row_tile * ROW_TILE + gl.expand_dims(
            gl.arange(0, ROW_TILE, layout=gl.SliceLayout(0, OUT)), 0
        )
        is_row = out_rows < rows
        # Two sums by turns, so that products need not wait for each other.
        zeros = gl.zeros([SPLIT, TILE, ROW_TILE], gl.float32, MMA)
        acc, acc_odd = zeros, zeros
        up_acc, up_acc_odd = zeros, zeros
        for step in gl.static_range(STEPS):
            x = gl.load(x_ptr + x_rows * x_stride + x_cols + step * WIDTH, mask=x_rows < rows, other=0.0)
            if step % 2 == 0:
                acc = mma_v2(weight[step], x, acc)
                if GATED:
                    up_acc = mma_v2(up_weight[step], x, up_acc)
            else:
                acc_odd = mma_v2(weight[step], x, acc_odd)
                if GATED:
                    up_acc_odd = mma_v2(up_weight[step], x, up_acc_odd)
        if squares_ptr is not None:
            squares = gl.load(
                squares_ptr + parts * rows + out_rows, mask=(parts < SQUARES) & is_row, other=0.0
            )
            inverse = gl.expand_dims(gl.rsqrt(gl.sum(squares, 0) / IN_SIZE + eps), 0)
        if residual_ptr is not None:
            residual = gl.load(residual_ptr + out_rows * residual_stride + out_cols, mask=is_row, other=0.0)
        out = gl.sum(acc + acc_odd, 0)
        if squares_ptr is not None:
            out = out * inverse
        if bias_ptr is not None:
            out = out + bias
        if GATED:
            up = gl.sum(up_acc + up_acc_odd, 0)
            if squares_ptr is not None:
                up = up * inverse
            if bias_ptr is not None:
                up = up + up_bias
            out = out / (1.0 + gl.exp(-out)) * up
        if residual_ptr is not None:
            out = out + residual
            gl.store(summed_ptr + out_rows * OUT_SIZE + out_cols, out, mask=is_row)
            sums = gl.expand_dims(gl.sum(out * out, 0), 0)
            gl.store(out_squares_ptr + program * rows + out_rows, sums, mask=is_row)
            out = out * norm_weight
        gl.store(out_ptr + out_rows * OUT_SIZE + out_cols, out.to(out_ptr.dtype.element_ty), mask=is_row)
