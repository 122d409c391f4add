"""Where a step's rows find their context in the cache, worked out once a step for the CPU's attention.

All layers of a model read the same slots, so what this derives from block tables and lengths is kept in
``AttentionBatch.scratch`` and costs one layer in thirty. Knows nothing of K, V or arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanochat.kernels.cache import AttentionBatch

VIEW_MIN_TOKENS = 512
"""Contiguous contexts longer than this are read in place; copying shorter ones, to share a call, is faster."""
MAX_PADDING = 192
"""Padding a row by up to this many tokens costs less than another call."""
GROUP_TOKENS = 4096
"""Most tokens, padding included, that one group of decode rows copies."""


@dataclass(frozen=True, slots=True)
class Span:
    """Slots of consecutive context tokens: ``start .. start + length - 1``, or ``slots [length]`` int64."""

    start: int
    length: int
    slots: torch.Tensor | None = None

    def part(self, begin: int, end: int) -> Span:
        """Tokens ``begin .. end - 1`` of this span."""
        slots = None if self.slots is None else self.slots[begin:end]
        return Span(self.start + begin, end - begin, slots)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows that share one attention call, padded to ``length`` tokens each."""

    num_rows: int
    length: int
    span: Span
    mask: torch.Tensor | None
    """``[num_rows, 1, 1, length]``, added to the scores: -inf on padding. None if nothing is padded."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """All decode rows with a context, in the order of the groups' results."""

    groups: list[DecodeGroup]
    order: torch.Tensor | None
    """``[rows]`` int64: the row of each result. None: results are all rows in their own order."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row's queries, and the part of its context that any of them sees."""

    first_token: int
    """Of its queries, in the packed batch."""
    num_queries: int
    first_position: int
    """Of its queries, in its sequence."""
    first_key: int
    """Position of the first context token that a query sees; ``span`` starts here."""
    span: Span
    window: int
    """0 if the window hides nothing from this row."""


def locate(tables: torch.Tensor, block_size: int, begins: list[int], ends: list[int]) -> Span:
    """Tokens ``begins[r] .. ends[r] - 1`` of each row of ``tables [r, M]``, padded to the longest.

    Padding repeats a row's own last token, so that no slot is read that isn't written.
    """
    length = max(end - begin for begin, end in zip(begins, ends, strict=True))
    if len(begins) == 1:
        blocks = tables[0, begins[0] // block_size : (ends[0] - 1) // block_size + 1].tolist()
        if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
            return Span(blocks[0] * block_size + begins[0] % block_size, length)
    positions = torch.arange(length) + torch.tensor(begins).unsqueeze(1)
    positions = positions.minimum(torch.tensor(ends).unsqueeze(1) - 1)
    blocks_of = tables.long().gather(1, positions // block_size)
    return Span(0, length, (blocks_of * block_size + positions % block_size).flatten())


def plan_decode(
    batch: AttentionBatch, block_size: int, window: int, dtype: torch.dtype, group_tokens: int
) -> DecodePlan:
    """Group the decode rows so that few calls with little padding cover them."""
    lens = batch.context_lens[: batch.num_decodes].tolist()
    sizes = [min(length, window) if window else length for length in lens]
    rows = sorted((r for r in range(len(lens)) if lens[r] > 0), key=lambda r: -sizes[r])
    groups: list[DecodeGroup] = []
    first = 0
    while first < len(rows):
        longest = sizes[rows[first]]
        last = first + 1
        while (
            last < len(rows)
            and longest - sizes[rows[last]] <= MAX_PADDING
            and longest * (last + 1 - first) <= group_tokens
        ):
            last += 1
        groups += _decode_groups(batch, block_size, rows[first:last], lens, sizes, dtype)
        first = last
    identity = rows == list(range(len(lens)))
    return DecodePlan(groups, None if identity else torch.tensor(rows, dtype=torch.int64))


def _decode_groups(
    batch: AttentionBatch,
    block_size: int,
    rows: list[int],
    lens: list[int],
    sizes: list[int],
    dtype: torch.dtype,
) -> list[DecodeGroup]:
    """One group of ``rows``, or one for each where all are long and lie in place."""

    def span_of(some: list[int]) -> Span:
        ends = [lens[r] for r in some]
        return locate(batch.block_tables[some], block_size, [lens[r] - sizes[r] for r in some], ends)

    if len(rows) == 1 or sizes[rows[-1]] > VIEW_MIN_TOKENS:
        spans = [span_of([r]) for r in rows]
        if len(rows) == 1 or all(span.slots is None for span in spans):
            return [DecodeGroup(1, span.length, span, None) for span in spans]
    length = sizes[rows[0]]
    mask = None
    if sizes[rows[-1]] != length:
        padding = torch.arange(length) >= torch.tensor([sizes[r] for r in rows]).unsqueeze(1)
        mask = torch.zeros(padding.shape, dtype=dtype).masked_fill_(padding, float("-inf"))
        mask = mask.view(len(rows), 1, 1, length)
    return [DecodeGroup(len(rows), length, span_of(rows), mask)]


def plan_prefill(batch: AttentionBatch, block_size: int, window: int) -> list[PrefillRow]:
    """Locate the context of every row after the decodes that has any."""
    lens = batch.context_lens.tolist()
    starts = batch.query_starts.tolist()
    plan = []
    for row in range(batch.num_decodes, batch.num_rows):
        length, count = lens[row], starts[row + 1] - starts[row]
        if length == 0 or count == 0:
            continue
        row_window = window if window < length else 0
        first_position = length - count
        first_key = max(0, first_position - row_window + 1) if row_window else 0
        span = locate(batch.block_tables[row : row + 1], block_size, [first_key], [length])
        plan.append(PrefillRow(starts[row], count, first_position, first_key, span, row_window))
    return plan
