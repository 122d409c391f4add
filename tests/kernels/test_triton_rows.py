"""What a recorded step's rows expand to, against the reference: see `conftest` for where."""

from __future__ import annotations

import random

import pytest
import torch

from nanochat.kernels import reference
from nanochat.kernels.row_expansion import expand_rows
from nanochat.kernels.rows import StepRows
from nanochat.kernels.triton_utils import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
WIDTH = 600


def random_rows(rng: random.Random, block_size: int, count: int, padding_tokens: int) -> StepRows:
    """Padding rows with and without tokens among real ones, which know any part of their table."""
    seats = rng.sample(range(count + 3), count)
    contexts, starts, first_new, new_starts, blocks, ids = [], [0], [], [0], [], []
    for _ in range(count):
        length = rng.choice([1, 1, 2, 5, 40, 700])
        context = min(length + rng.choice([0, 1, 15, 16, 300]), WIDTH * block_size)
        length = min(length, context)
        if rng.random() < 0.25:
            context, length = 0, rng.choice([0, 1])
        width = -(-context // block_size)
        known = rng.choice([width, max(width - 1, 0), 0, rng.randint(0, width)])
        contexts.append(context)
        starts.append(starts[-1] + length)
        first_new.append(known)
        blocks += [rng.randrange(1000) for _ in range(width - known)]
        new_starts.append(len(blocks))
        ids += [rng.choice([-1, rng.randrange(5000)]) for _ in range(length)]
    ids += [9] * padding_tokens
    columns = (seats, contexts, starts, first_new, new_starts, [*blocks, 5], ids)
    return StepRows(*(torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in columns))


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_as_the_reference(block_size: int, seed: int) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng, block_size, rng.randint(1, 9), rng.choice([0, 3, 600]))
    seats = rows.seats.shape[0] + 3
    last_ids = torch.randint(0, 5000, (seats,), device=DEVICE)
    tables = torch.randint(0, 1000, (seats, WIDTH), dtype=torch.int32, device=DEVICE)
    expected_tables = tables.clone()
    expected = reference.expand_rows(rows, last_ids, expected_tables, block_size)
    actual = expand_rows(rows, last_ids, tables, block_size)
    assert torch.equal(tables, expected_tables)
    for name in ("input_ids", "positions", "slots", "last_tokens", "next_positions"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    for row, context in enumerate(rows.context_lens.tolist()):
        width = -(-context // block_size)
        assert torch.equal(actual.block_tables[row, :width], expected.block_tables[row, :width])
