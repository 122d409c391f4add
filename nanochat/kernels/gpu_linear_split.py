"""Linear maps of 9 to 64 rows on Hopper: weights to shared memory early, products by warpgroups.

With more rows than the tensor cores' smallest tile, `gpu_linear`'s programs spend their time on loading rows: all
of them for every sixteen outputs. Here a program has 64 outputs. Its weights are on their way to shared memory before
it waits for the kernel before it, and cost no registers. Where shared memory can't hold all of them, several programs
share the inner dimension; whoever is done last (a semaphore a tile tells) adds up their partial sums, always in the
same order. The same program does what comes after the map: the division by the norm that is still to come (see
`Normed`), bias, SiLU and product, the residual's addition, and the next norm's weight and sums of squares.

In Gluon, for compute capability 9.0. Knows nothing of models.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy
from triton.language.extra import cuda

from nanochat.kernels.normed import Normed
from nanochat.kernels.triton_utils import dependent_launch, next_power_of_2
from nanochat.kernels.tuning import MAX_SHARED_TILES, SPLIT_TILE, SplitConfig

READ_EARLY = {"weight_ptr": None, "bias_ptr": None, "norm_ptr": None}
"""What is read before the kernel before this one has ended: weights alone, which no kernel writes."""

# Named differently before triton 3.7.
_load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def allocate_arrivals(device: torch.device) -> torch.Tensor:
    """How many of the programs that share a tile are done: ``[MAX_SHARED_TILES]`` int32 zeros, as launches leave them."""
    return torch.zeros(MAX_SHARED_TILES, dtype=torch.int32, device=device)


def launch_split_linear(
    x: Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: SplitConfig,
    arrivals: torch.Tensor | None,
    *,
    gated: bool = False,
    epilogue: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    plus_one: bool = False,
) -> None:
    """As `gpu_linear.launch_linear`; of squares there is a sum for every 64 outputs. Without checks.

    ``arrivals``: see `allocate_arrivals`; for the launches of one stream, and needed only where programs share tiles.
    """
    (rows, in_size), out_size = x.values.shape, out.shape[1]
    residual, norm_weight, summed, squares = epilogue or (None, None, None, None)
    tiles = (2 if gated else 1) * out_size // SPLIT_TILE
    steps = in_size // (config.splits * config.step)
    dependent = dependent_launch(weight.device)
    partial = None
    if config.splits > 1:
        size = (tiles, config.splits, SPLIT_TILE, config.row_tile)
        partial = torch.empty(size, dtype=torch.float32, device=weight.device)
    _split_kernel[(tiles * config.splits,)](
        x.values,
        x.squares,
        weight,
        bias,
        residual,
        norm_weight,
        out,
        summed,
        squares,
        partial,
        arrivals,
        rows,
        x.values.stride(0),
        0 if residual is None else residual.stride(0),
        x.eps,
        IN_SIZE=in_size,
        OUT_SIZE=out_size,
        SQUARES=x.num_parts,
        SQUARES_TILE=max(16, next_power_of_2(x.num_parts)),
        SPLITS=config.splits,
        STEP=config.step,
        STEPS=steps,
        RING=config.ring,
        ROW_TILE=config.row_tile,
        GATED=gated,
        PLUS_ONE=plus_one,
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )


@gluon.jit(do_not_specialize=["rows"])
def _split_kernel(
    x_ptr: gl.tensor,
    squares_ptr: gl.tensor,
    weight_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    residual_ptr: gl.tensor,
    norm_ptr: gl.tensor,
    out_ptr: gl.tensor,
    summed_ptr: gl.tensor,
    out_squares_ptr: gl.tensor,
    partial_ptr: gl.tensor,
    arrivals_ptr: gl.tensor,
    rows: int,
    x_stride: int,
    residual_stride: int,
    eps: float,
    IN_SIZE: gl.constexpr,
    OUT_SIZE: gl.constexpr,
    SQUARES: gl.constexpr,
    SQUARES_TILE: gl.constexpr,
    SPLITS: gl.constexpr,
    STEP: gl.constexpr,
    STEPS: gl.constexpr,
    RING: gl.constexpr,
    ROW_TILE: gl.constexpr,
    GATED: gl.constexpr,
    PLUS_ONE: gl.constexpr,
    DEPENDENT: gl.constexpr,
) -> None:
    TYPE: gl.constexpr = weight_ptr.dtype.element_ty
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROW_TILE, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // STEP, STEP // 8], [4, 1], [1, 0])
    # What is stored: rows with a tile's outputs side by side.
    WIDTH: gl.constexpr = 32 if GATED else 64
    SUM: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WIDTH, WIDTH // 4], [4, 1], [1, 0])
    COLS: gl.constexpr = gl.SliceLayout(0, SUM)
    ROWS: gl.constexpr = gl.SliceLayout(1, SUM)
    # A piece of x is replaced two products after its own.
    gl.static_assert(RING == STEPS or RING > 3)
    if DEPENDENT:
        cuda.gdc_launch_dependents()
    tile = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    first = split * (STEP * STEPS)

    outputs = gl.arange(0, 64, layout=gl.SliceLayout(1, COPY))
    inner = gl.arange(0, STEP, layout=gl.SliceLayout(0, COPY))
    weight_rows = tile * 64 + outputs
    if GATED:  # the gate's outputs and what they are multiplied by take turns
        weight_rows = tile * 32 + outputs // 2 + outputs % 2 * OUT_SIZE
    weight_ptrs = weight_ptr + (weight_rows.to(gl.int64) * IN_SIZE)[:, None] + (first + inner)[None, :]
    weight = gl.allocate_shared_memory(TYPE, [STEPS, 64, STEP], OPERAND)
    for step in gl.static_range(STEPS):
        _load_async(weight.index(step), weight_ptrs + step * STEP)
    async_copy.commit_group()
    cols = tile * WIDTH + gl.arange(0, WIDTH, layout=COLS)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + cols).to(gl.float32)
        if GATED:
            up_bias = gl.load(bias_ptr + OUT_SIZE + cols).to(gl.float32)
    if norm_ptr is not None:
        norm_weight = gl.load(norm_ptr + cols).to(gl.float32)
        if PLUS_ONE:
            norm_weight += 1.0

    x = gl.allocate_shared_memory(TYPE, [RING, ROW_TILE, STEP], OPERAND)
    x_rows = gl.arange(0, ROW_TILE, layout=gl.SliceLayout(1, COPY))
    x_ptrs = x_ptr + (x_rows * x_stride)[:, None] + (first + inner)[None, :]
    is_x = (x_rows < rows)[:, None] & (inner >= 0)[None, :]
    out_rows = gl.arange(0, ROW_TILE, layout=ROWS)
    is_row = (out_rows < rows)[:, None] & (cols >= 0)[None, :]
    if DEPENDENT:
        cuda.gdc_wait()

    for step in gl.static_range(RING):
        _load_async(x.index(step), x_ptrs + step * STEP, is_x)
        async_copy.commit_group()
    # Whoever turns out to be the last needs these at once.
    if squares_ptr is not None:
        parts = gl.arange(0, SQUARES_TILE, layout=COLS)
        squares = gl.load(
            squares_ptr + (parts * rows)[None, :] + out_rows[:, None],
            mask=(parts < SQUARES)[None, :] & (out_rows < rows)[:, None],
            other=0.0,
        )
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + (out_rows * residual_stride)[:, None] + cols[None, :]
        residual = gl.load(residual_ptrs, mask=is_row, other=0.0)

    acc = gl.zeros([64, ROW_TILE], gl.float32, layout=MMA)
    for step in gl.static_range(STEPS):
        async_copy.wait_group(_copies_begun(step, STEPS, RING) - 1 - step)
        hopper.fence_async_shared()
        _barrier()
        if RING < STEPS and step >= 2 and step - 2 + RING < STEPS:
            # All warps are done with the product before the last.
            _load_async(x.index((step - 2) % RING), x_ptrs + (step - 2 + RING) * STEP, is_x)
            async_copy.commit_group()
        acc = hopper.warpgroup_mma(
            weight.index(step), x.index(step % RING).permute((1, 0)), acc, use_acc=step > 0, is_async=True
        )
        if RING < STEPS:
            acc = hopper.warpgroup_mma_wait(1, deps=[acc])
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])

    is_last = True
    if SPLITS > 1:
        places = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))[:, None] * ROW_TILE
        places += gl.arange(0, ROW_TILE, layout=gl.SliceLayout(0, MMA))[None, :]
        partial_ptrs = partial_ptr + tile.to(gl.int64) * (SPLITS * 64 * ROW_TILE) + places
        gl.store(partial_ptrs + split * (64 * ROW_TILE), acc)
        # All threads' stores come before the one thread's release, and its acquire before their loads.
        _barrier()
        is_last = gl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
        _barrier()
    if is_last:
        if SPLITS > 1:
            gl.store(arrivals_ptr + tile, 0)
            acc = _add_up(partial_ptrs, 64 * ROW_TILE, SPLITS)
        sums = gl.permute(acc, (1, 0))
        if squares_ptr is not None:
            inverse = gl.rsqrt(gl.sum(squares, 1) / IN_SIZE + eps)[:, None]
        if GATED:
            pairs = gl.convert_layout(sums, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
            out, up = gl.split(gl.reshape(pairs, [ROW_TILE, 32, 2]))
            out, up = gl.convert_layout(out, SUM), gl.convert_layout(up, SUM)
            if squares_ptr is not None:
                out, up = out * inverse, up * inverse
            if bias_ptr is not None:
                out, up = out + bias[None, :], up + up_bias[None, :]
            out = out / (1.0 + gl.exp(-out)) * up
        else:
            out = gl.convert_layout(sums, SUM)
            if squares_ptr is not None:
                out = out * inverse
            if bias_ptr is not None:
                out = out + bias[None, :]
        offsets = (out_rows * OUT_SIZE)[:, None] + cols[None, :]
        if residual_ptr is not None:
            out = out + residual
            gl.store(summed_ptr + offsets, out, mask=is_row)
            gl.store(out_squares_ptr + tile * rows + out_rows, gl.sum(out * out, 1), mask=out_rows < rows)
            out = out * norm_weight[None, :]
        gl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=is_row)


@gluon.constexpr_function
def _copies_begun(step, steps, ring):  # type: ignore[no-untyped-def]
    """How many of x's pieces are on their way or there when a step begins."""
    return min(steps, ring + max(0, step - 2))


@gluon.jit
def _add_up(ptrs, STRIDE: gl.constexpr, SPLITS: gl.constexpr):  # type: ignore[no-untyped-def]
    """A tile's partial sums, in the order of the inner dimension. All are on their way before the first is used."""
    parts = (gl.load(ptrs),)
    for split in gl.static_range(1, SPLITS):
        parts = parts + (gl.load(ptrs + split * STRIDE),)  # type: ignore[assignment]  # noqa: RUF005
    total = parts[0]
    for split in gl.static_range(1, SPLITS):
        total = total + parts[split]
    return total
