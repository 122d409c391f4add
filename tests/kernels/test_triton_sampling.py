"""Sampling on the GPU against the engine's sampler on the CPU, token for token: see `conftest` for where."""

from __future__ import annotations

import pytest
import torch

from nanochat.engine.sampler import SamplingBatch, sample
from nanochat.kernels import sampling
from nanochat.kernels.seen import SeenRows
from nanochat.kernels.triton_utils import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
INF = float("inf")
# temperature, top-k, top-p, min-p
ROWS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.0, 0, 0.5, 0.0),
    (1.5, 50, 0.8, 0.05),
    (1.0, 3, 1.0, 0.0),
    (0.5, 0, 0.3, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1.0, 0.1),
    (2.0, 40, 0.99, 0.0),
    (1.0, 10_000, 0.6, 0.0),
    (5.0, 0, 0.999, 0.0),
    (0.01, 0, 1.0, 0.0),
    (1.0, 0, 0.0, 0.0),
]


def expected_tokens(
    scores: torch.Tensor,
    columns: list[torch.Tensor],
    seeds: torch.Tensor,
    positions: torch.Tensor,
    penalized: tuple[torch.Tensor, SeenRows] | None = None,
) -> list[int]:
    temperature, top_k, top_p, min_p = columns
    batch = SamplingBatch(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=torch.ones_like(temperature) if penalized is None else penalized[0],
        seeds=seeds,
        positions=positions,
        seen=None if penalized is None else penalized[1],
        all_greedy=bool((temperature == 0).all()),
        any_greedy=bool((temperature == 0).any()),
        any_top_k=bool(top_k.any()),
        any_top_p=bool((top_p < 1).any()),
        any_min_p=bool((min_p > 0).any()),
        any_penalty=penalized is not None,
        num_logprobs=None,
    )
    return sample(scores, batch).token_ids.tolist()


@pytest.mark.parametrize("kind", ["smooth", "ties", "flat"])
def test_tokens_are_those_of_the_engine(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        # Several blocks a row, and candidates that hold some rows' tokens but not all.
        monkeypatch.setattr(sampling, "_BLOCK", 128)
        monkeypatch.setattr(sampling, "_CHUNK", 64)
    generator = torch.Generator().manual_seed(0)
    vocab_size = 600 if INTERPRETED else 151_936
    scores = (
        torch.randn(len(ROWS), vocab_size, generator=generator) * {"smooth": 3, "ties": 3, "flat": 0.01}[kind]
    )
    if kind == "ties":
        scores = scores.mul(2).round().div(2)
    columns = [torch.tensor([row[i] for row in ROWS]) for i in range(4)]
    columns[1] = columns[1].int()
    for round_ in range(1 if INTERPRETED else 20):
        seeds = torch.randint(-(2**62), 2**62, (len(ROWS),), generator=generator)
        positions = torch.arange(len(ROWS)) * 17 + round_
        got = sampling.sample_tokens(
            scores.to(DEVICE), *(c.to(DEVICE) for c in columns), seeds.to(DEVICE), positions.to(DEVICE)
        )
        assert got.tolist() == expected_tokens(scores, columns, seeds, positions)


@pytest.mark.parametrize(
    ("vocab_size", "odd"),
    [(1, None), (31, None), (33, INF), (33, 0.0), (2049, -INF), (2049, float("nan")), (4100, None)],
)
def test_penalties_are_those_of_the_definition(vocab_size: int, odd: float | None) -> None:
    """Steps that follow each other, each given the token that the one before it sampled."""
    generator, rows = torch.Generator().manual_seed(vocab_size), 5
    seats = torch.randperm(7, generator=generator)[:rows]
    words = torch.randint(-(2**31), 2**31, (7, -(-vocab_size // 32)), generator=generator).int()
    penalty = torch.tensor([1.0, 1.3, 0.5, 2.0])[torch.randint(4, (rows,), generator=generator)]
    kinds = [ROWS[int(kind)] for kind in torch.randint(len(ROWS), (rows,), generator=generator)]
    columns = [torch.tensor([row[i] for row in kinds]) for i in range(4)]
    columns[1] = columns[1].int()
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    token_ids = torch.randint(vocab_size, (rows,), generator=generator)
    theirs, ours = words.clone(), words.to(DEVICE)
    for step in range(3):
        positions = torch.arange(rows) * 17 + step
        scores = torch.randn(rows, vocab_size, generator=generator) * 3
        if odd is not None:
            scores.view(-1)[:: 3 + 4 * step] = odd
        penalized = (penalty.to(DEVICE), SeenRows(ours, seats.to(DEVICE), token_ids.to(DEVICE)))
        got = sampling.sample_tokens(
            scores.to(DEVICE, copy=True),
            *(c.to(DEVICE) for c in columns),
            seeds.to(DEVICE),
            positions.to(DEVICE),
            penalized,
        ).cpu()
        expected = expected_tokens(
            scores, columns, seeds, positions, (penalty, SeenRows(theirs, seats, token_ids))
        )
        assert got.tolist() == expected
        assert torch.equal(ours.cpu(), theirs)
        token_ids = got


def test_numbers_that_are_none() -> None:
    scores = torch.full((4, 50), -INF)
    scores[1, 5], scores[1, 7], scores[1, 9] = float("nan"), 1.0, 1.0
    scores[2, 3], scores[2, 4] = INF, INF
    scores[3, 20] = 0.0
    temperature = torch.tensor([1.0, 0.0, 1.0, 0.5])
    rest = [torch.zeros(4, dtype=torch.int32), torch.tensor([0.5, 1.0, 0.1, 0.9]), torch.zeros(4)]
    seeds = torch.arange(4)
    arguments = [tensor.to(DEVICE) for tensor in (scores, temperature, *rest, seeds, seeds)]
    assert sampling.sample_tokens(*arguments).tolist() == [0, 7, 3, 20]


def test_wrong_arguments_are_refused() -> None:
    row = torch.zeros(2, device=DEVICE)
    long = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="scores must be float32"):
        sampling.sample_tokens(torch.zeros(2, 8, device=DEVICE).half(), row, row.int(), row, row, long, long)
    scores, seen = torch.zeros(2, 8, device=DEVICE), SeenRows(long[:, None].int(), long, long)
    with pytest.raises(ValueError, match="penalty must be dense"):
        sampling.sample_tokens(scores, row, row.int(), row, row, long, long, (row.half(), seen))
    with pytest.raises(ValueError, match="top_k must be dense"):
        sampling.sample_tokens(torch.zeros(2, 8, device=DEVICE), row, row, row, row, long, long)
