"""What one rank is told is what another one meant."""

from __future__ import annotations

import numpy as np
import pytest

from nanochat.engine.batch import pack_batch
from nanochat.engine.step_inputs import StepShape
from nanochat.engine.step_message import PackedStep, RecordedStep, decode, encode
from tests.engine.test_step_graphs import BLOCK_SIZE, random_plans


@pytest.mark.parametrize("seed", range(5))
def test_packed_steps_arrive_as_they_were(seed: int) -> None:
    for plan in random_plans(seed):
        seats = np.arange(len(plan.sampling), dtype=np.int64)[::-1]
        step = PackedStep(pack_batch(plan, BLOCK_SIZE), seats, len(plan.decodes), seed % 2 == 0)
        copy = decode(encode(step))
        assert isinstance(copy, PackedStep)
        assert (copy.num_decodes, copy.has_pending_ids) == (step.num_decodes, step.has_pending_ids)
        for array, expected in zip([*copy.batch, copy.seats], [*step.batch, step.seats], strict=True):
            assert array.dtype == expected.dtype
            assert np.array_equal(array, expected)


def test_recorded_steps_arrive_as_they_were() -> None:
    step = RecordedStep(StepShape(4, 8, 32, 4096, 30_000), np.arange(200, dtype=np.uint8))
    copy = decode(encode(step))
    assert isinstance(copy, RecordedStep)
    assert copy.shape == step.shape
    assert np.array_equal(copy.inputs, step.inputs)
