"""Where a tile of keys lies when the runs of all rows and KV heads are laid end to end, as decode attention cuts them.

A run is the keys of one row that one KV head reads, in tiles; runs are ordered by row, then by head.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def run_at(
    tile: tl.tensor,
    rows: tl.tensor,
    row_ends: tl.tensor,
    context_lens_ptr: tl.tensor,
    num_rows: int,
    window: int,
    KV_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The run that a tile belongs to: row, KV head, context length, its first tile of the row's, tiles, and which this is.

    Past all tiles, one of no tiles.
    """
    row = tl.sum((row_ends <= tile).to(tl.int32), 0)
    row_end = tl.sum(tl.where(rows == row, row_ends, 0), 0)
    context_len = tl.load(context_lens_ptr + row, mask=row < num_rows, other=0)
    first_tile = context_len * 0
    if WINDOWED:
        first_tile = tl.maximum(context_len - window, 0) // BLOCK_N
    run = tl.cdiv(context_len, BLOCK_N) - first_tile
    in_row = tile - (row_end - run * KV_HEADS)
    head = in_row // tl.maximum(run, 1)
    return row, head, context_len, first_tile, run, in_row - head * run


@triton.jit
def next_run(
    tile: tl.tensor, rows: tl.tensor, tiles: tl.tensor, row_ends: tl.tensor, KV_HEADS: tl.constexpr
) -> tl.tensor:
    """The first tile, from this one on, with which a run begins; at the end of all tiles, that end."""
    row = tl.sum((row_ends <= tile).to(tl.int32), 0)
    run = tl.maximum(tl.sum(tl.where(rows == row, tiles, 0), 0), 1)
    row_start = tl.sum(tl.where(rows == row, row_ends - tiles * KV_HEADS, 0), 0)
    return row_start + tl.cdiv(tile - row_start, run) * run
