"""Which tokens requests have had, a bit each, for the repetition penalty; on the device, so that no step asks the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

WORD = 32
"""Tokens a word of int32; the lowest bit is the lowest id's."""

LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True, slots=True)
class SeenRows:
    """What ``S`` rows have had."""

    words: torch.Tensor
    """``[N, W]`` int32: of seat ``n``, token ``t`` is bit ``t % 32`` of word ``t // 32``."""
    seats: torch.Tensor
    """``[S]`` int64: each row's."""
    token_ids: torch.Tensor
    """``[S]`` int64: the row's last token, whose bit may not be set yet."""


def penalize_seen(scores: torch.Tensor, penalty: torch.Tensor, seen: SeenRows) -> torch.Tensor:
    """The scores ``[S, V]`` float32 after a repetition penalty ``[S]`` float32, on the CPU; 1 is none.

    Positive scores of tokens that a row has had are divided by it, others multiplied (Keskar et al., "CTRL",
    2019, as transformers has it), and none exceeds the largest float. Of rows with a penalty, the bits of ``seen.token_ids`` are set. This is the
    definition; on a GPU `nanochat.kernels.sampling` does the same while it reads the scores.
    """
    penalties = penalty.numpy()
    rows = np.flatnonzero(penalties != 1)
    if not len(rows):
        return scores
    scores = scores.clone()
    values, words = scores.numpy(), seen.words.numpy().view(np.uint32)
    for row in rows:
        seat, token_id = int(seen.seats[row]), int(seen.token_ids[row])
        words[seat, token_id // WORD] |= np.uint32(1 << token_id % WORD)
        bits = np.unpackbits(words[seat].view(np.uint8), count=scores.shape[1], bitorder="little")
        ids = np.flatnonzero(bits.view(bool))
        had = values[row, ids]
        with np.errstate(over="ignore"):
            had = np.where(had > 0, had / penalties[row], had * penalties[row])
        values[row, ids] = np.minimum(had, LARGEST)
    return scores
