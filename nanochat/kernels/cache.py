"""The KV cache of one layer, and which part of it a step reads: what every attention kernel is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class LayerCache:
    """Paged K and V of one layer. One tensor each: a stacked tensor of all layers was far slower on CPUs.

    ``N`` blocks of ``B`` tokens; a token's slot is ``block * B + offset``.
    """

    k: torch.Tensor
    """``[N, B, Hkv, D]``; in an INT8 cache spread, as `nanochat.kernels.rope_store` says, and so fit only for its q."""
    v: torch.Tensor
    """``[N, B, Hkv, D]``"""
    k_scale: torch.Tensor | None = None
    """``[N, B, Hkv]`` float16 for an INT8 cache: one scale a token and head; else None."""
    v_scale: torch.Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    @property
    def num_blocks(self) -> int:
        return self.k.shape[0]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.k, self.v, self.k_scale, self.v_scale) if x is not None)


@dataclass(slots=True)
class AttentionBatch:
    """Which tokens of the packed batch attend to which blocks. Rows: decodes first, then prefill chunks.

    ``R`` rows, of which the first ``num_decodes`` have one query token each. The context length counts
    everything a row may see once this step's K/V is stored: its last query sits at ``context_len - 1``.
    """

    num_decodes: int
    block_tables: torch.Tensor
    """``[R, M]`` int32; entries past a row's last block are 0 and never read."""
    context_lens: torch.Tensor
    """``[R]`` int32."""
    query_starts: torch.Tensor
    """``[R + 1]`` int32: row ``r`` owns packed tokens ``query_starts[r]:query_starts[r + 1]``."""
    max_query_len: int
    max_context_len: int
    scratch: dict[Any, Any] = field(default_factory=dict)
    """What kernels make once and use in every layer: index tensors, groupings, counters.

    Recorded steps of a shape share one: nothing that depends on lengths may stay in it on a GPU.
    """
    max_prefill_context: int | None = None
    """Upper bound of the prefill rows' context lengths, added up; None if that of each is all that's known."""
    plans: dict[Any, torch.Tensor] = field(default_factory=dict)
    """What a GPU works out from this batch's lengths once, on the device, and uses in every layer."""

    @property
    def num_rows(self) -> int:
        return self.context_lens.shape[0]

    @property
    def prefill_context(self) -> int:
        """What `max_prefill_context` says, or the other fields."""
        if self.max_prefill_context is not None:
            return self.max_prefill_context
        return (self.num_rows - self.num_decodes) * self.max_context_len
