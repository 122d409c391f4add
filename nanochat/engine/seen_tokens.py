"""What each seat's request has had of tokens, kept where it is sampled; only repetition penalties ask for it.

The host sends what it knows once, when a request is first sampled in its seat. From then on each step adds the
token that it is given, so that steps can follow each other without a word from the host. Knows nothing of
schedules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nanochat.engine.packing import upload
from nanochat.engine.seats import Seat
from nanochat.engine.step_plan import ScheduledChunk
from nanochat.kernels.seen import WORD, SeenRows


def seen_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """What :class:`SeenTokens` keeps on the device."""
    return (max_num_seqs + 1) * -(-vocab_size // WORD) * 4


class SeenTokens:
    """A bit a token, for ``max_num_seqs`` seats and one more that nobody looks at."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._num_words = -(-vocab_size // WORD)
        self._words = torch.zeros((max_num_seqs + 1, self._num_words), dtype=torch.int32, device=device)

    def take_in(self, chunks: Sequence[ScheduledChunk], seats: Sequence[Seat]) -> None:
        """Before these chunks sample, each in its seat: send what the device can't know.

        A request that sits down anew has all its tokens known: it computes them from the start.
        """
        new = []
        for chunk, seat in zip(chunks, seats, strict=True):
            if chunk.request.params.repetition_penalty != 1 and not seat.has_seen:
                seat.has_seen = True
                new.append((seat.index, self._packed(chunk.request.token_ids)))
        if new:
            indices, words = zip(*new, strict=True)
            where, rows = upload([np.array(indices), np.stack(words)], self._words.device)
            self._words.index_copy_(0, where, rows)

    def rows(self, seats: torch.Tensor, token_ids: torch.Tensor) -> SeenRows:
        """Of rows in these seats ``[S]`` int64, whose last tokens are ``token_ids [S]`` int64."""
        return SeenRows(self._words, seats, token_ids)

    def _packed(self, token_ids: list[int]) -> np.ndarray:
        has = np.zeros(self._num_words * WORD, dtype=bool)
        has[token_ids] = True
        return np.packbits(has, bitorder="little").view(np.int32)
