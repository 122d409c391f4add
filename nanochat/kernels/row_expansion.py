"""The beginning of a recorded step on a GPU: from few numbers a row to all that the step reads, in one launch.

Knows nothing of requests or models.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanochat.kernels.rows import StepRows, StepTokens, allocate_tokens

_BLOCK = 512
"""Tokens, or entries of a block table, that a program moves at once."""


def expand_rows(
    rows: StepRows, last_ids: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> StepTokens:
    """See `nanochat.kernels.expand_rows`."""
    tokens = allocate_tokens(rows, block_tables.shape[1])
    num_rows = rows.seats.shape[0]
    _expand_kernel[(num_rows + 1,)](
        rows.seats,
        rows.context_lens,
        rows.query_starts,
        rows.first_new,
        rows.new_starts,
        rows.new_blocks,
        rows.token_ids,
        last_ids,
        block_tables,
        tokens.input_ids,
        tokens.positions,
        tokens.slots,
        tokens.block_tables,
        tokens.last_tokens,
        tokens.next_positions,
        num_rows,
        rows.token_ids.shape[0],
        block_tables.shape[1],
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return tokens


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "table_width"])
def _expand_kernel(
    seats_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    first_new_ptr: tl.tensor,
    new_starts_ptr: tl.tensor,
    new_blocks_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    last_ids_ptr: tl.tensor,
    state_tables_ptr: tl.tensor,
    input_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    next_positions_ptr: tl.tensor,
    num_rows: int,
    num_tokens: int,
    table_width: int,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    is_row = row < num_rows
    first = tl.load(query_starts_ptr + row)
    end = tl.load(query_starts_ptr + row + 1, mask=is_row, other=num_tokens)
    context_len = tl.load(context_lens_ptr + row, mask=is_row, other=0)
    tl.store(last_tokens_ptr + row, tl.maximum(end - 1, 0).to(tl.int64), mask=is_row)
    tl.store(next_positions_ptr + row, context_len.to(tl.int64), mask=is_row)
    if context_len == 0:
        # Padding, and in the last program the tokens after all rows.
        for start in range(first, end, BLOCK):
            index = start + lanes
            zeros = tl.zeros([BLOCK], tl.int64)
            tl.store(input_ids_ptr + index, zeros, mask=index < end)
            tl.store(positions_ptr + index, zeros, mask=index < end)
            tl.store(slots_ptr + index, zeros - 1, mask=index < end)
        return

    seat = tl.load(seats_ptr + row).to(tl.int64)
    first_new = tl.load(first_new_ptr + row)
    # So that column `c` of the table, if new, is at `new_ptr + c`.
    new_ptr = new_blocks_ptr + tl.load(new_starts_ptr + row) - first_new
    state_ptr = state_tables_ptr + seat * table_width
    table_ptr = block_tables_ptr + row.to(tl.int64) * table_width
    width = tl.cdiv(context_len, BLOCK_SIZE)
    for start in range(0, width, BLOCK):
        column = start + lanes
        old = tl.load(state_ptr + column, mask=column < first_new, other=0)
        is_new = (column >= first_new) & (column < width)
        new = tl.load(new_ptr + column, mask=is_new, other=0)
        tl.store(state_ptr + column, new, mask=is_new)
        tl.store(table_ptr + column, tl.where(is_new, new, old), mask=column < width)

    last_id = tl.load(last_ids_ptr + seat)
    first_position = context_len - (end - first)
    for start in range(first, end, BLOCK):
        index = start + lanes
        in_row = index < end
        token = tl.load(token_ids_ptr + index, mask=in_row, other=0).to(tl.int64)
        tl.store(input_ids_ptr + index, tl.where(token < 0, last_id, token), mask=in_row)
        position = first_position + index - first
        tl.store(positions_ptr + index, position.to(tl.int64), mask=in_row)
        column = position // BLOCK_SIZE
        old = tl.load(state_ptr + column, mask=in_row & (column < first_new), other=0)
        new = tl.load(new_ptr + column, mask=in_row & (column >= first_new), other=0)
        block = tl.where(column < first_new, old, new).to(tl.int64)
        tl.store(slots_ptr + index, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=in_row)
