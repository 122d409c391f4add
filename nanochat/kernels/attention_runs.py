"""Which part of a batch's decode attention each program of the static grid computes: worked out once a step.

The keys of one row that one KV head reads are a run of tiles. Runs are laid end to end, by row and then by KV
head, and programs take equal shares of all tiles; see `attention_decode`. Working that out from the lengths
takes as long as attending to a short context, and it is the same in every layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanochat.kernels.cache import AttentionBatch
from nanochat.kernels.triton_utils import next_power_of_2
from nanochat.kernels.tuning import DecodeConfig

PLAN_WIDTH = tl.constexpr(16)
"""Numbers a program: its first tile and the end of its share; the row, KV head and context length of its first run,
and which of the run's tiles it begins with; the share; and whether runs stay whole. The rest is padding."""


def plan_runs(
    batch: AttentionBatch, programs: int, kv_heads: int, config: DecodeConfig, *, window: int, int8: bool
) -> torch.Tensor:
    """``[programs, PLAN_WIDTH]`` int32, on the device, of the batch's decode rows."""
    rows = batch.num_decodes
    plan = torch.empty((programs, PLAN_WIDTH.value), dtype=torch.int32, device=batch.context_lens.device)
    _plan_kernel[(programs,)](
        batch.context_lens,
        plan,
        rows,
        config.min_tiles,
        window,
        KV_HEADS=kv_heads,
        BLOCK_N=config.block_n,
        BLOCK_R=max(64, next_power_of_2(rows)),
        WINDOWED=window > 0,
        INT8=int8,
        num_warps=1,
    )
    return plan


@triton.jit(do_not_specialize=["num_rows", "min_tiles", "window"])
def _plan_kernel(
    context_lens_ptr: tl.tensor,
    plan_ptr: tl.tensor,
    num_rows: int,
    min_tiles: int,
    window: int,
    KV_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WINDOWED: tl.constexpr,
    INT8: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    rows = tl.arange(0, BLOCK_R)
    lens = tl.load(context_lens_ptr + rows, mask=rows < num_rows, other=0)
    tiles = tl.cdiv(lens, BLOCK_N)
    if WINDOWED:
        tiles -= tl.maximum(lens - window, 0) // BLOCK_N
    row_ends = tl.cumsum(tiles, 0) * KV_HEADS
    total = tl.max(row_ends, 0)
    share = tl.maximum(tl.cdiv(total, num_programs), min_tiles)
    # A merge costs as much as some 128 keys, or 256 when most multiprocessors are busy copying anyway: where
    # splitting spares the longest run no more than that, runs stay whole.
    num_runs = tl.sum((tiles > 0).to(tl.int32), 0) * KV_HEADS
    longest = tl.max(tiles, 0)
    is_busy = (4 * num_runs >= num_programs) & (not INT8)
    spared = longest - share
    whole = (spared >= 0) & (spared < tl.where(is_busy, 256 // BLOCK_N, 128 // BLOCK_N))
    if whole & (total == num_runs * longest):
        share = longest  # equal runs: the first programs take one each, and so all multiprocessors have some
    tile = tl.minimum(program * share, total)
    stop = tl.minimum(tile + share, total)
    if whole:
        tile = _run_from(tile, rows, tiles, row_ends, KV_HEADS)
        stop = _run_from(stop, rows, tiles, row_ends, KV_HEADS)

    row = tl.sum((row_ends <= tile).to(tl.int32), 0)
    run = tl.sum(tl.where(rows == row, tiles, 0), 0)
    in_row = tile - tl.sum(tl.where(rows == row, row_ends, 0), 0) + run * KV_HEADS
    head = in_row // tl.maximum(run, 1)
    plan = plan_ptr + program * PLAN_WIDTH
    tl.store(plan, tile)
    tl.store(plan + 1, stop)
    tl.store(plan + 2, row)
    tl.store(plan + 3, head)
    tl.store(plan + 4, tl.sum(tl.where(rows == row, lens, 0), 0))
    tl.store(plan + 5, in_row - head * run)
    tl.store(plan + 6, share)
    tl.store(plan + 7, whole.to(tl.int32))


@triton.jit
def _run_from(
    tile: tl.tensor, rows: tl.tensor, tiles: tl.tensor, row_ends: tl.tensor, KV_HEADS: tl.constexpr
) -> tl.tensor:
    """The first tile, from this one on, with which a run begins; at the end of all tiles, that end."""
    row = tl.sum((row_ends <= tile).to(tl.int32), 0)
    run = tl.maximum(tl.sum(tl.where(rows == row, tiles, 0), 0), 1)
    row_start = tl.sum(tl.where(rows == row, row_ends - tiles * KV_HEADS, 0), 0)
    return row_start + tl.cdiv(tile - row_start, run) * run


@triton.jit
def next_run(
    row: tl.tensor,
    head: tl.tensor,
    context_len: tl.tensor,
    context_lens_ptr: tl.tensor,
    KV_HEADS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Row, KV head and context length of the run after this one, which is not the last."""
    head += 1
    if head == KV_HEADS:
        head = head * 0
        row += 1
        context_len = tl.load(context_lens_ptr + row)
        while context_len == 0:  # padding
            row += 1
            context_len = tl.load(context_lens_ptr + row)
    return row, head, context_len
