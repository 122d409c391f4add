"""Which calls into PyTorch a step's attention takes on the CPU, worked out once for all layers.

Every layer of a model reads the same slots, so what follows from block tables and lengths is kept in
``AttentionBatch.scratch``: grouping of decode rows, tiles, masks, and the buffers that K and V are copied to
where they can't be read in place. Does no arithmetic on Q, K or V. docs/kernels.md has the measurements
behind the constants.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from nanochat.kernels.cache import AttentionBatch, LayerCache

VIEW_MIN_TOKENS = 512
"""Contiguous contexts longer than this are read in place; copying shorter ones, to share a call, is faster."""
MAX_PADDING = 192
"""Padding a row by up to this many tokens costs less than another call."""
GROUP_TOKENS = 4096
"""Most tokens, padding included, that one group of decode rows copies."""
QUERY_TILE = 256
"""Queries that share one mask."""
KEY_TILE = 1024
"""Tokens that are converted from INT8 at a time: their float32 copy stays in a core's own cache."""

STEP = 16
"""16-bit prefills are filled up to a multiple of so many queries and keys, as many as AMX multiplies at once.

For every two numbers of them that it meets, PyTorch keeps the code for their products."""
MAX_COPIED_KEYS = 1024
"""More keys than that aren't copied to be filled up."""


@dataclass(slots=True)
class Buffers:
    """Memory that the contexts of a step take turns to use, a buffer for each purpose."""

    memory: dict[tuple[str, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def take(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor. An earlier one of this purpose is overwritten with it."""
        size = 1
        for n in shape:
            size *= n
        memory = self.memory.get((purpose, dtype))
        if memory is None or memory.numel() < size:
            memory = self.memory[purpose, dtype] = torch.empty(size, dtype=dtype)
        return memory[:size].view(shape)


@dataclass(slots=True)
class Context:
    """Cached tokens that one call reads: ``length`` of each of ``rows`` rows."""

    rows: int
    length: int
    start: int
    """First slot, if the tokens of the one row lie in slots side by side."""
    slots: torch.Tensor | None
    """``[rows * length]`` int64, if they don't."""
    buffers: Buffers
    targets: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """Views of the buffers, made for the first layer."""

    def part(self, begin: int, end: int) -> Context:
        """Tokens ``begin .. end - 1`` of a context of one row."""
        slots = None if self.slots is None else self.slots[begin:end]
        return Context(1, end - begin, self.start + begin, slots, self.buffers)

    def read(self, cache: LayerCache, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[rows, Hkv, length, D]`` in ``dtype``; valid until another context is read."""
        if cache.k_scale is None or cache.v_scale is None:
            return self._read(cache.k, "k"), self._read(cache.v, "v")
        k = self._convert(cache.k, cache.k_scale, "k", dtype)
        return k, self._convert(cache.v, cache.v_scale, "v", dtype)

    def _read(self, data: torch.Tensor, name: str) -> torch.Tensor:
        if self.slots is None:
            _, token, head, dim = data.stride()
            size = (1, data.shape[2], self.length, data.shape[3])
            first = data.storage_offset() + self.start * token
            return data.as_strided(size, (0, head, token, dim), first)
        target, by_head = self._targets(name, data, data.dtype)
        torch.index_select(data.view(-1, *data.shape[2:]), 0, self.slots, out=target)
        return by_head

    def _convert(
        self, data: torch.Tensor, scale: torch.Tensor, name: str, dtype: torch.dtype
    ) -> torch.Tensor:
        """``data * scale``, multiplied in float32 before it is rounded to ``dtype``."""
        data, scale = data.view(-1, *data.shape[2:]), scale.view(-1, scale.shape[2])
        wide, by_head = self._targets(name + "_wide", data, torch.float32)
        if self.slots is None:
            data, scale = (x.narrow(0, self.start, self.length) for x in (data, scale))
        else:
            narrow, _ = self._targets(name, data, data.dtype)
            data = torch.index_select(data, 0, self.slots, out=narrow)
            scale = scale.index_select(0, self.slots)
        wide.copy_(data).mul_(scale.unsqueeze(-1))
        if dtype == torch.float32:
            return by_head
        rounded, by_head = self._targets(name + "_rounded", data, dtype)
        rounded.copy_(wide)
        return by_head

    def _targets(
        self, name: str, data: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A buffer ``[rows * length, Hkv, D]``, and its view as ``[rows, Hkv, length, D]``."""
        targets = self.targets.get(name)
        if targets is None:
            heads, dim = data.shape[-2:]
            flat = self.buffers.take(name, (self.rows * self.length, heads, dim), dtype)
            by_head = flat.view(self.rows, self.length, heads, dim).transpose(1, 2)
            targets = self.targets[name] = (flat, by_head)
        return targets[0], targets[1]


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """Decode rows whose attention is computed together."""

    tiles: list[Context]
    """One context of all rows, or that of a single row in several pieces."""
    mask: torch.Tensor | None
    """``[rows, 1, 1, length]``, added to the scores: -inf on padding. None if nothing is padded."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """All decode rows that have a context."""

    calls: list[DecodeCall]
    order: torch.Tensor | None
    """``[rows]`` int64: the row of each of the calls' results. None: results are all rows in their order."""


@dataclass(frozen=True, slots=True)
class PrefillCall:
    """Consecutive queries of one row, and the keys that at least one of them sees."""

    first: int
    last: int
    """Packed tokens ``first .. last - 1``."""
    tiles: list[Context]
    queries: int
    """How many are computed: those that there are, and what fills them up."""
    keys: int
    """The same of the last tile's."""
    mask: torch.Tensor | None
    """``[queries, keys]``, added to the scores; the tiles before the last are seen by all."""
    is_causal: bool
    """Instead of a mask: queries and keys are the same tokens."""


@dataclass(slots=True)
class Planner:
    """Plans the layers of one step that share a window."""

    batch: AttentionBatch
    block_size: int
    window: int
    decode_dtype: torch.dtype
    prefill_dtype: torch.dtype
    in_tiles: bool
    """No tile longer than `KEY_TILE`, but for the keys of a window, which are bounded anyway."""
    fused: bool
    """A whole prompt may do without masks."""
    fills_up: bool
    """Prefills are filled up to few sizes."""
    buffers: Buffers = field(init=False)
    largest_mask: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.buffers = self.batch.scratch.setdefault("buffers", Buffers())

    def locate(self, rows: list[int], begins: list[int], ends: list[int]) -> Context:
        """Tokens ``begins[i] .. ends[i] - 1`` of each row, padded to the longest.

        Padding repeats a row's own last token, so that no slot is read that isn't written.
        """
        size = self.block_size
        length = max(end - begin for begin, end in zip(begins, ends, strict=True))
        if len(rows) == 1:
            blocks = self.batch.block_tables[rows[0], begins[0] // size : (ends[0] - 1) // size + 1].tolist()
            if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
                return Context(1, length, blocks[0] * size + begins[0] % size, None, self.buffers)
        positions = torch.arange(length) + torch.tensor(begins).unsqueeze(1)
        positions = positions.minimum(torch.tensor(ends).unsqueeze(1) - 1)
        blocks_of = self.batch.block_tables[rows].long().gather(1, positions // size)
        slots = (blocks_of * size + positions % size).flatten()
        return Context(len(rows), length, 0, slots, self.buffers)

    def decode(self) -> DecodePlan:
        """Few calls with little padding for all decode rows."""
        lens = self.batch.context_lens[: self.batch.num_decodes].tolist()
        sizes = [min(length, self.window) if self.window else length for length in lens]
        rows = sorted((r for r in range(len(lens)) if lens[r] > 0), key=lambda r: -sizes[r])
        group_tokens = KEY_TILE if self.in_tiles else GROUP_TOKENS
        calls: list[DecodeCall] = []
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
            calls += self._decode_calls(rows[first:last], lens, sizes)
            first = last
        in_order = rows == list(range(len(lens)))
        return DecodePlan(calls, None if in_order else torch.tensor(rows, dtype=torch.int64))

    def _decode_calls(self, rows: list[int], lens: list[int], sizes: list[int]) -> list[DecodeCall]:
        """One call for ``rows``, or one for each where all are long and lie in place."""

        def locate(some: list[int]) -> Context:
            return self.locate(some, [lens[r] - sizes[r] for r in some], [lens[r] for r in some])

        if len(rows) == 1 or sizes[rows[-1]] > VIEW_MIN_TOKENS:
            contexts = [locate([r]) for r in rows]
            if len(rows) == 1 or all(context.slots is None for context in contexts):
                step = KEY_TILE if self.in_tiles else contexts[0].length
                return [DecodeCall(_cut(context, step), None) for context in contexts]
        length = sizes[rows[0]]
        mask = None
        if sizes[rows[-1]] != length:
            padding = torch.arange(length) >= torch.tensor([sizes[r] for r in rows]).unsqueeze(1)
            mask = torch.zeros(padding.shape, dtype=self.decode_dtype).masked_fill_(padding, float("-inf"))
            mask = mask.view(len(rows), 1, 1, length)
        return [DecodeCall([locate(rows)], mask)]

    def prefill(self) -> list[PrefillCall]:
        """Calls for every row after the decodes that has a context."""
        lens = self.batch.context_lens.tolist()
        starts = self.batch.query_starts.tolist()
        calls = []
        for row in range(self.batch.num_decodes, self.batch.num_rows):
            if lens[row] > 0 and starts[row + 1] > starts[row]:
                calls += self._prefill_row(row, starts[row], starts[row + 1], lens[row])
        return calls

    def _prefill_row(self, row: int, first: int, last: int, length: int) -> list[PrefillCall]:
        window = self.window if self.window < length else 0
        prefix = length - (last - first)
        # Positions of the keys are counted from the first that any query sees.
        origin = max(0, prefix - window + 1) if window else 0
        context = self.locate([row], [origin], [length])
        if self.fused and prefix == 0 and not window and not (self.in_tiles and length > KEY_TILE):
            size = self._size(length)
            return [PrefillCall(first, last, [context], size, size, None, True)]
        calls = []
        for begin in range(first, last, QUERY_TILE):
            end = min(begin + QUERY_TILE, last)
            own = prefix - origin + begin - first
            keys = [max(0, own - window + 1) if window else 0, own + end - begin]
            if self.in_tiles and not window and keys[1] > KEY_TILE:
                # All queries see all that lies before their own tokens.
                keys = [*range(0, own, KEY_TILE), own, keys[1]]
            tiles = [context.part(a, b) for a, b in pairwise(keys)]
            queries, last_keys = self._size(end - begin), tiles[-1].length
            if last_keys <= MAX_COPIED_KEYS:
                last_keys = self._size(last_keys)
            mask = self._filled_mask(end - begin, tiles[-1].length, queries, last_keys)
            calls.append(PrefillCall(begin, end, tiles, queries, last_keys, mask, False))
        return calls

    def _size(self, count: int) -> int:
        return -(-count // STEP) * STEP if self.fills_up else count

    def _filled_mask(self, num_queries: int, num_keys: int, queries: int, keys: int) -> torch.Tensor | None:
        """`_mask`, as ``[queries, keys]``: nobody sees a key that only fills up."""
        mask = self._mask(num_queries, num_keys)
        if (queries, keys) == (num_queries, num_keys):
            return mask
        filled = torch.zeros(queries, keys, dtype=self.prefill_dtype)
        filled[:, num_keys:] = float("-inf")
        if mask is not None:
            filled[:num_queries, :num_keys] = mask
        return filled

    def _mask(self, num_queries: int, num_keys: int) -> torch.Tensor | None:
        """``[num_queries, num_keys]`` for queries that stand at the last of the keys.

        All such masks of a step are lower right corners of one.
        """
        if num_queries == 1:
            return None
        if self.largest_mask is None:
            rows = min(QUERY_TILE, self.batch.max_query_len)
            columns = self.batch.max_context_len
            if self.window:
                columns = min(columns, self.window + rows - 1)
            visible = torch.ones(rows, columns, dtype=torch.bool).tril_(columns - rows)
            if self.window:
                visible.triu_(columns - rows - self.window + 1)
            mask = torch.zeros(rows, columns, dtype=self.prefill_dtype)
            self.largest_mask = mask.masked_fill_(~visible, float("-inf"))
        rows, columns = self.largest_mask.shape
        return self.largest_mask[rows - num_queries :, columns - num_keys :]


def _cut(context: Context, step: int) -> list[Context]:
    """The context of one row in pieces of ``step`` tokens."""
    if context.length <= step:
        return [context]
    ends = [*range(0, context.length, step), context.length]
    return [context.part(a, b) for a, b in pairwise(ends)]
