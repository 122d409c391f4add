"""Which part of a model each of several ranks holds: arithmetic only, no torch.

Query heads, inner dimensions and the vocabulary are divided; whatever doesn't divide evenly is filled up with
zeros, which change no result. A rank holds the KV heads that its query heads read; where several ranks need
one, each has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from nanochat.engine.models.families import ModelConfig
from nanochat.errors import InvalidOption

_UNEVEN_MULTIPLE = 16
"""Parts of what doesn't divide evenly are multiples of this, as matrix products want their sizes."""

Ranges = list[tuple[int, int]]
"""Half-open ranges of a stored dimension, one after the other."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1

    def part(self, total: int) -> int:
        """Elements that each rank has room for, of ``total``."""
        if total % self.size == 0:
            return total // self.size
        needed = -(-total // self.size)
        return -(-needed // _UNEVEN_MULTIPLE) * _UNEVEN_MULTIPLE

    def own(self, total: int, rank: int | None = None) -> tuple[int, int]:
        """The half-open range of ``total`` that this rank holds, or ``rank``; it may be short or empty."""
        part = self.part(total)
        begin = min((self.rank if rank is None else rank) * part, total)
        return begin, min(begin + part, total)

    def config(self, model: ModelConfig) -> ModelConfig:
        """The sizes of what one rank holds.

        Raises:
            InvalidOption: the query heads can't be divided among so many; the message says by what they can.
        """
        if self.size == 1:
            return model
        if model.num_heads % self.size:
            fitting = [str(n) for n in range(1, model.num_heads + 1) if model.num_heads % n == 0]
            raise InvalidOption(
                f"--tp {self.size} doesn't divide this model's {model.num_heads} query heads; "
                f"{' or '.join([', '.join(fitting[:-1]), fitting[-1]][-min(2, len(fitting)) :])} would."
            )
        moe = model.moe
        return replace(
            model,
            vocab_size=self.part(model.vocab_size),
            intermediate_size=self.part(model.intermediate_size),
            num_heads=model.num_heads // self.size,
            num_kv_heads=len(self.kv_heads(model)),
            moe=moe and replace(moe, intermediate_size=self.part(moe.intermediate_size)),
        )

    def kv_heads(self, model: ModelConfig) -> list[int]:
        """For each of this rank's KV heads, which of the model's it is.

        Each is read by equally many of the rank's query heads, which takes some twice where the ranks' heads
        and the groups that share a KV head don't line up.
        """
        shared = model.num_heads // model.num_kv_heads
        own = model.num_heads // self.size
        together = gcd(shared, own)
        first = self.rank * own
        return [(first + head) // shared for head in range(0, own, together)]

    def head_ranges(self, heads: list[int], head_dim: int) -> Ranges:
        """Where these heads' elements are; neighbours are joined."""
        ranges: Ranges = []
        for head in heads:
            begin, end = head * head_dim, (head + 1) * head_dim
            if ranges and ranges[-1][1] == begin:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((begin, end))
        return ranges


WHOLE = Shard()
