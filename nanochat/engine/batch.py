"""A step's plan as the tensors one forward pass reads. Knows shapes and devices, not models.

Everything here is known on the CPU before launch: nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from nanochat.engine.packing import upload
from nanochat.engine.scheduler import ScheduledChunk, StepPlan
from nanochat.kernels.cache import AttentionBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """``T`` packed tokens, decode rows first; ``S`` of them sample."""

    input_ids: torch.Tensor
    """``[T]`` int64; -1 for an id that a step in flight will bring, which only decode rows have."""
    positions: torch.Tensor
    """``[T]`` int64."""
    slots: torch.Tensor
    """``[T]`` int64: where each token's K/V goes."""
    attention: AttentionBatch
    sample_rows: torch.Tensor
    """``[S]`` int64: indices of packed tokens whose logits are needed."""


class HostBatch(NamedTuple):
    """What a `StepBatch` holds, still on the host. ``R`` rows, ``M`` blocks of the longest one's table."""

    input_ids: np.ndarray
    """``[T]`` int64; -1 for an id that a step in flight will bring."""
    positions: np.ndarray
    """``[T]`` int64."""
    slots: np.ndarray
    """``[T]`` int64."""
    block_tables: np.ndarray
    """``[R, M]`` int32."""
    context_lens: np.ndarray
    """``[R]`` int32."""
    query_starts: np.ndarray
    """``[R + 1]`` int32."""
    sample_rows: np.ndarray
    """``[S]`` int64."""


def upload_batch(host: HostBatch, num_decodes: int, device: torch.device) -> StepBatch:
    """The batch on the device; its first ``num_decodes`` rows are decodes."""
    input_ids, positions, slots, tables, context_lens, query_starts, sample_rows = upload(host, device)
    attention = AttentionBatch(
        num_decodes=num_decodes,
        block_tables=tables,
        context_lens=context_lens,
        query_starts=query_starts,
        max_query_len=int(np.diff(host.query_starts).max()),
        max_context_len=int(host.context_lens.max()),
        max_prefill_context=int(host.context_lens[num_decodes:].sum()),
    )
    return StepBatch(
        input_ids=input_ids,
        positions=positions,
        slots=slots,
        attention=attention,
        sample_rows=sample_rows,
    )


def pack_batch(plan: StepPlan, block_size: int) -> HostBatch:
    """Pack a plan whose requests' block tables cover their chunks."""
    return _pack_chunks(plan.chunks, block_size) if plan.prefills else _pack_decodes(plan.decodes, block_size)


def _pack_chunks(chunks: Sequence[ScheduledChunk], block_size: int) -> HostBatch:
    lengths = np.array([chunk.length for chunk in chunks], dtype=np.int32)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    context_lens = starts + lengths
    tables = _block_tables(chunks, context_lens, block_size)

    row_of_token = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    slots = tables[row_of_token, positions // block_size].astype(np.int64) * block_size
    slots += positions % block_size
    samples = np.array([chunk.samples for chunk in chunks])
    return HostBatch(
        input_ids=np.array(_input_ids(chunks), dtype=np.int64),
        positions=positions.astype(np.int64, copy=False),
        slots=slots,
        block_tables=tables,
        context_lens=context_lens,
        query_starts=np.concatenate([np.zeros(1, np.int32), ends]),
        sample_rows=ends[samples].astype(np.int64) - 1,
    )


def _pack_decodes(chunks: Sequence[ScheduledChunk], block_size: int) -> HostBatch:
    """`_pack_chunks` of chunks of one token that all sample, with fewer calls of NumPy: each counts at one row."""
    count = len(chunks)
    starts = [chunk.start for chunk in chunks]
    tables = np.zeros((count, max(starts) // block_size + 1), dtype=np.int32)
    slots = []
    for row, (request, start, _, _) in enumerate(chunks):
        last, offset = divmod(start, block_size)
        tables[row, : last + 1] = request.block_table[: last + 1]
        slots.append(request.block_table[last] * block_size + offset)
    positions, rows = np.array(starts, dtype=np.int64), np.arange(count + 1)
    return HostBatch(
        input_ids=np.array(_input_ids(chunks), dtype=np.int64),
        positions=positions,
        slots=np.array(slots, dtype=np.int64),
        block_tables=tables,
        context_lens=(positions + 1).astype(np.int32),
        query_starts=rows.astype(np.int32),
        sample_rows=rows[:-1],
    )


def has_pending_ids(plan: StepPlan) -> bool:
    """Whether steps in flight sample some of the tokens that this one decodes."""
    return any(chunk.start >= len(chunk.request.token_ids) for chunk in plan.decodes)


def _input_ids(chunks: Sequence[ScheduledChunk]) -> list[int]:
    ids: list[int] = []
    for request, start, length, _ in chunks:
        ids += request.token_ids[start : start + length] or [-1]
    return ids


def _block_tables(chunks: Sequence[ScheduledChunk], context_lens: np.ndarray, block_size: int) -> np.ndarray:
    """``[R, M]`` int32: the blocks each row may read, padded with 0."""
    widths = -(-context_lens // block_size)
    tables = np.zeros((len(chunks), int(widths.max())), dtype=np.int32)
    for row, (chunk, width) in enumerate(zip(chunks, widths, strict=True)):
        tables[row, :width] = chunk.request.block_table[:width]
    return tables
