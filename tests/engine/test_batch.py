"""Steps that only decode are packed by a shorter way: against the general one, on random plans."""

from __future__ import annotations

import random

import numpy as np
import pytest

from nanochat.engine.batch import _pack_chunks, pack_batch
from nanochat.engine.config import SamplingParams
from nanochat.engine.request import Request
from nanochat.engine.step_plan import ScheduledChunk, StepPlan


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(20))
def test_decodes_are_packed_as_any_chunks_are(seed: int, block_size: int) -> None:
    rng = random.Random(seed)
    chunks = []
    for number in range(rng.choice([1, 2, 9])):
        length = rng.randint(1, 70)
        table = [rng.randrange(1000) for _ in range(-(-length // block_size) + rng.randrange(3))]
        # The last token's id may not be known yet.
        ids = [rng.randrange(500) for _ in range(length - rng.randrange(2))]
        request = Request(number, ids, SamplingParams(), block_table=table)
        chunks.append(ScheduledChunk(request, length - 1, 1, samples=True))
    packed = pack_batch(StepPlan(1, tuple(chunks), (), ()), block_size)
    for ours, theirs in zip(packed, _pack_chunks(chunks, block_size), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)
