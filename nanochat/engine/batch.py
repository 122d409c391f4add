"""A step's plan as the tensors one forward pass reads. Knows shapes and devices, not models.

Everything here is known on the CPU before launch: nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nanochat.engine.sampler import SamplingBatch
from nanochat.engine.scheduler import ScheduledChunk, StepPlan
from nanochat.kernels.cache import AttentionBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """``T`` packed tokens, decode rows first; ``S`` of them sample."""

    input_ids: torch.Tensor
    """``[T]`` int64."""
    positions: torch.Tensor
    """``[T]`` int64."""
    slots: torch.Tensor
    """``[T]`` int64: where each token's K/V goes."""
    attention: AttentionBatch
    sample_rows: torch.Tensor
    """``[S]`` int64: indices of packed tokens whose logits are needed."""
    sampling: SamplingBatch


def build_batch(plan: StepPlan, block_size: int, device: torch.device) -> StepBatch:
    """Pack a plan whose requests' block tables cover their chunks."""
    chunks = plan.chunks
    lengths = np.array([chunk.length for chunk in chunks], dtype=np.int32)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    context_lens = starts + lengths
    tables = _block_tables(chunks, context_lens, block_size)

    row_of_token = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    slots = tables[row_of_token, positions // block_size].astype(np.int64) * block_size
    slots += positions % block_size
    input_ids = np.fromiter(
        (
            token
            for chunk in chunks
            for token in chunk.request.token_ids[chunk.start : chunk.start + chunk.length]
        ),
        dtype=np.int64,
        count=int(ends[-1]),
    )
    sample_rows = np.array([end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples])

    def put(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype, non_blocking=True)

    attention = AttentionBatch(
        num_decodes=len(plan.decodes),
        block_tables=put(tables, torch.int32),
        context_lens=put(context_lens, torch.int32),
        query_starts=put(np.concatenate([[0], ends]), torch.int32),
        max_query_len=int(lengths.max()),
        max_context_len=int(context_lens.max()),
    )
    return StepBatch(
        input_ids=put(input_ids, torch.int64),
        positions=put(positions, torch.int64),
        slots=put(slots, torch.int64),
        attention=attention,
        sample_rows=put(sample_rows, torch.int64),
        sampling=SamplingBatch.from_requests([chunk.request for chunk in plan.sampling], device),
    )


def _block_tables(chunks: Sequence[ScheduledChunk], context_lens: np.ndarray, block_size: int) -> np.ndarray:
    """``[R, M]`` int32: the blocks each row may read, padded with 0."""
    widths = -(-context_lens // block_size)
    tables = np.zeros((len(chunks), int(widths.max())), dtype=np.int32)
    for row, (chunk, width) in enumerate(zip(chunks, widths, strict=True)):
        tables[row, :width] = chunk.request.block_table[:width]
    return tables
