"""A step as few numbers a row, and what they expand to on the device.

A row is a run of one request's tokens. The device keeps, for each *seat*, a request's block table and the
token it sampled last, so that a step is told only what is new. Knows nothing of requests or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StepRows:
    """``R`` rows of ``T`` packed tokens. A row with a context length of 0 is padding, whatever its tokens."""

    seats: torch.Tensor
    """``[R]`` int32. A padding row may have any."""
    context_lens: torch.Tensor
    """``[R]`` int32: tokens of the row's request once this step is done."""
    query_starts: torch.Tensor
    """``[R + 1]`` int32: row ``r`` owns packed tokens ``query_starts[r]:query_starts[r + 1]``."""
    first_new: torch.Tensor
    """``[R]`` int32: how many entries of the block table the device has."""
    new_starts: torch.Tensor
    """``[R + 1]`` int32: the entries it lacks are ``new_blocks[new_starts[r]:new_starts[r + 1]]``."""
    new_blocks: torch.Tensor
    """Int32, at least as long as needed."""
    token_ids: torch.Tensor
    """``[T]`` int32; -1 for the token that the seat sampled last."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a forward pass and the sampler read."""

    input_ids: torch.Tensor
    """``[T]`` int64; 0 for tokens of no row, and of padding."""
    positions: torch.Tensor
    """``[T]`` int64; likewise."""
    slots: torch.Tensor
    """``[T]`` int64: where each token's K/V goes; -1 likewise."""
    block_tables: torch.Tensor
    """``[R, M]`` int32, of which each row's context is written."""
    last_tokens: torch.Tensor
    """``[R]`` int64: index of the row's last packed token, at least 0."""
    next_positions: torch.Tensor
    """``[R]`` int64: position of the token after it."""


def allocate_tokens(rows: StepRows, table_width: int) -> StepTokens:
    """Uninitialised."""
    num_rows, num_tokens = rows.seats.shape[0], rows.token_ids.shape[0]

    def longs(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int64, device=rows.seats.device)

    return StepTokens(
        input_ids=longs(num_tokens),
        positions=longs(num_tokens),
        slots=longs(num_tokens),
        block_tables=torch.empty((num_rows, table_width), dtype=torch.int32, device=rows.seats.device),
        last_tokens=longs(num_rows),
        next_positions=longs(num_rows),
    )
