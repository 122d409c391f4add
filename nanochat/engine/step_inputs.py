"""What a recorded step reads: a buffer that stays where it is, filled from each plan by one small copy.

Knows nothing of models, graphs or schedules.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch

from nanochat.engine.packing import Packing, host_buffer
from nanochat.engine.sampler import SamplingBatch
from nanochat.engine.seats import Seats
from nanochat.engine.step_plan import StepPlan
from nanochat.kernels.rows import StepRows
from nanochat.kernels.seen import SeenRows


class StepShape(NamedTuple):
    """The room of a recorded step. Decode rows come first, and each has one token, also if it is padding."""

    decode_rows: int
    prefill_rows: int
    prefill_tokens: int
    max_context_len: int
    """Of a row that prefills, if any does."""
    max_prefill_context: int
    """Of all rows that prefill, added up."""

    @property
    def rows(self) -> int:
        return self.decode_rows + self.prefill_rows

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.prefill_tokens


@functools.lru_cache(maxsize=256)
def _packing(shape: StepShape) -> Packing:
    row, longs, ints, floats = (shape.rows,), torch.int64, torch.int32, torch.float32
    starts = (shape.rows + 1,)
    return Packing(
        [
            *[(row, longs)] * 2,
            *[(row, floats)] * 4,
            *[(row, ints)] * 4,
            *[(starts, ints)] * 2,
            ((shape.tokens,), ints),
        ]
    )


def input_bytes(shape: StepShape, table_width: int) -> int:
    """Size of the buffer that a step of this shape may need."""
    return _packing(shape).num_bytes + 4 * shape.rows * table_width


class StepInputs:
    """Views of a device's buffer for steps of one shape."""

    def __init__(self, shape: StepShape, buffer: torch.Tensor) -> None:
        """``buffer``: uint8, of at least :func:`input_bytes`. Several shapes may share one."""
        self.shape = shape
        self._buffer = buffer
        packing = _packing(shape)
        views = packing.views(buffer)
        seeds, self.sampling_seats, temperature, top_p, min_p, penalty, top_k, seats, contexts, *views = views
        first_new, query_starts, new_starts, token_ids = views
        new_blocks = buffer[packing.num_bytes :]
        new_blocks = new_blocks[: new_blocks.shape[0] // 4 * 4].view(torch.int32)
        self.rows = StepRows(
            seats=seats,
            context_lens=contexts,
            query_starts=query_starts,
            first_new=first_new,
            new_starts=new_starts,
            new_blocks=new_blocks,
            token_ids=token_ids,
        )
        self._sampling = (seeds, temperature, top_p, min_p, penalty, top_k)
        self.scratch: dict[Any, Any] = {}
        """Of the step's `AttentionBatch`: a recording needs what it used to stay where it is."""

    def sampling(self, positions: torch.Tensor, seen: SeenRows) -> SamplingBatch:
        """How the rows are sampled; ``positions [R]`` int64. Any kind of row may come."""
        seeds, temperature, top_p, min_p, penalty, top_k = self._sampling
        return SamplingBatch(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=penalty,
            seeds=seeds,
            positions=positions,
            seen=seen,
            all_greedy=False,
            any_greedy=True,
            any_top_k=True,
            any_top_p=True,
            any_min_p=True,
            any_penalty=True,
            num_logprobs=None,
        )

    def send(self, host: torch.Tensor) -> None:
        """Copy what :func:`pack_step` made to the device, asynchronously."""
        if self._buffer.device.type == "cpu":
            self.scratch.clear()  # what is derived from a batch there depends on its lengths
        self._buffer[: len(host)].copy_(host, non_blocking=True)


def pack_step(
    plan: StepPlan, shape: StepShape, seats: Seats, block_size: int, device: torch.device
) -> tuple[torch.Tensor, np.ndarray]:
    """A plan that fits a shape as bytes on the host, for :meth:`StepInputs.send`; its requests take their seats.

    Also returns ``[n]``: which of the shape's rows sample what the plan's ``n`` sampling chunks ask for.
    """
    chunks, taken = plan.chunks, seats.take(plan.chunks)
    num_decodes, count = len(plan.decodes), len(chunks)
    new_blocks: list[int] = []
    first_new, new_ends = [], []
    for chunk, seat in zip(chunks, taken, strict=True):
        first_new.append(seat.num_blocks)
        # Of its context alone: what is sent beyond it, a row forgets.
        needed = -(-(chunk.start + chunk.length) // block_size)
        if needed > seat.num_blocks:
            new_blocks += chunk.request.block_table[seat.num_blocks : needed]
            seat.num_blocks = needed
        new_ends.append(len(new_blocks))

    packing = _packing(shape)
    fixed = packing.num_bytes
    host = host_buffer(fixed + 4 * len(new_blocks), device)
    flat = host.numpy()
    seeds, sampling_seats, *fields = packing.arrays(flat)
    temperature, top_p, min_p, penalty, top_k, seat_rows, contexts, firsts, query_starts, starts, ids = fields
    rows = np.arange(count)  # of the shape, one a chunk
    rows[num_decodes:] += shape.decode_rows - num_decodes
    seat_rows[:] = seats.capacity
    seat_rows[rows] = [seat.index for seat in taken]
    own = seats.sampling
    seeds[:], temperature[:] = own.seeds[seat_rows], own.temperature[seat_rows]
    top_p[:], min_p[:], top_k[:] = own.top_p[seat_rows], own.min_p[seat_rows], own.top_k[seat_rows]
    penalty[:] = own.repetition_penalty[seat_rows]
    samples = np.array([chunk.samples for chunk in chunks], dtype=bool)
    sampling_seats[:] = seats.capacity
    sampling_seats[rows[samples]] = seat_rows[rows[samples]]
    contexts[:] = firsts[:] = 0
    contexts[rows] = [chunk.start + chunk.length for chunk in chunks]
    firsts[rows] = first_new
    # Padding rows own nothing, but for the one token of each decode row.
    query_starts[: shape.decode_rows + 1] = np.arange(shape.decode_rows + 1)
    lengths = np.zeros(shape.prefill_rows, dtype=np.int32)
    lengths[: count - num_decodes] = [chunk.length for chunk in plan.prefills]
    query_starts[shape.decode_rows + 1 :] = shape.decode_rows + np.cumsum(lengths)
    new_counts = np.zeros(shape.rows, dtype=np.int32)
    new_counts[rows] = np.diff(new_ends, prepend=0)
    starts[0] = 0
    np.cumsum(new_counts, out=starts[1:])
    ids[:] = 0
    ids[:num_decodes] = [_decode_id(request.token_ids, start) for request, start, _, _ in plan.decodes]
    prefill_ids: list[int] = []
    for request, start, length, _ in plan.prefills:
        prefill_ids += request.token_ids[start : start + length]
    ids[shape.decode_rows : shape.decode_rows + len(prefill_ids)] = prefill_ids
    flat[fixed:].view(np.int32)[:] = new_blocks
    return host, rows[samples]


def _decode_id(token_ids: list[int], position: int) -> int:
    return token_ids[position] if position < len(token_ids) else -1
