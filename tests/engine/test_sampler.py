"""Sampling: exact where it must be, and the right distribution everywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.engine import sampler
from nanochat.engine.config import SamplingParams
from nanochat.engine.request import Request
from nanochat.engine.sampler import SamplingBatch, sample, uniforms
from nanochat.engine.seats import Seats
from nanochat.engine.seen_tokens import SeenTokens
from nanochat.engine.step_plan import ScheduledChunk
from tests.native import require_native

CPU = torch.device("cpu")
DRAWS = 20_000


@pytest.fixture(params=["native", "pytorch"], autouse=True, scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds for both."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "native":
            require_native()
        else:
            patch.setattr(sampler.native, "find", lambda: None)
        yield


def make_batch(
    params: SamplingParams | list[SamplingParams],
    rows: int = 1,
    *,
    token_ids: list[int] | None = None,
    seeds: list[int] | None = None,
    position: int | None = None,
) -> SamplingBatch:
    all_params = params if isinstance(params, list) else [params] * rows
    requests = []
    for row, row_params in enumerate(all_params):
        request = Request(row, list(token_ids or [0]), row_params)
        request.sampling_seed = seeds[row] if seeds else row
        requests.append(request)
    batch = SamplingBatch.from_requests(requests, CPU)
    chunks = [ScheduledChunk(request, 0, request.num_tokens, samples=True) for request in requests]
    state = SeenTokens(len(requests), 60_000, CPU)
    state.take_in(chunks, Seats(len(requests)).take(chunks))
    last_ids = torch.tensor([request.token_ids[-1] for request in requests])
    batch.seen = state.rows(torch.arange(len(requests)), last_ids)
    if position is not None:
        batch.positions = torch.full_like(batch.positions, position)
    return batch


def expected_distribution(
    logits: torch.Tensor, params: SamplingParams, seen: list[int] | None = None
) -> torch.Tensor:
    """``[V]`` float64 probabilities, token by token, in the order of transformers' processors."""
    scores = [float(x) for x in logits.double()]
    for token in set(seen or []):
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    scaled = torch.tensor(scores, dtype=torch.float64) / params.temperature
    ranked = sorted(range(len(scores)), key=lambda i: (-float(scaled[i]), i))
    if params.top_k:
        ranked = ranked[: params.top_k]
    kept_mass = torch.softmax(scaled[ranked], dim=0)
    before, nucleus = 0.0, []
    for token, mass in zip(ranked, kept_mass.tolist(), strict=True):
        if not nucleus or params.top_p >= 1 or before < params.top_p:
            nucleus.append(token)
        before += mass
    best = float(scaled[nucleus[0]])
    survivors = [i for i in nucleus if float(torch.exp(scaled[i] - best)) >= params.min_p or i == nucleus[0]]
    out = torch.zeros(len(scores), dtype=torch.float64)
    out[survivors] = torch.softmax(scaled[survivors], dim=0)
    return out


def check_distribution(logits: torch.Tensor, params: SamplingParams, seen: list[int] | None = None) -> None:
    """A chi-square test of ``DRAWS`` seeds at one position; nothing improbable may be drawn at all."""
    batch = make_batch(params, DRAWS, token_ids=seen)
    drawn = sample(logits.expand(DRAWS, -1), batch).token_ids
    counts = torch.bincount(drawn, minlength=logits.numel()).double()
    expected = expected_distribution(logits, params, seen) * DRAWS
    assert not counts[expected == 0].any()
    rare = expected < 5
    observed = torch.cat((counts[~rare], counts[rare].sum().view(1)))
    wanted = torch.cat((expected[~rare], expected[rare].sum().view(1)))
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = observed.numel() - 1
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    # Five standard deviations above the mean of the statistic's distribution.
    assert statistic <= degrees + 5 * (2 * max(degrees, 1)) ** 0.5


CASES = {
    "temperature": SamplingParams(temperature=1.0),
    "hot": SamplingParams(temperature=2.0),
    "cold": SamplingParams(temperature=0.3),
    "top_k": SamplingParams(temperature=1.0, top_k=7),
    "top_k above the vocabulary": SamplingParams(temperature=1.0, top_k=10**6),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1),
    "top_k and top_p": SamplingParams(temperature=1.0, top_k=20, top_p=0.7),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=1.5),
    "all": SamplingParams(temperature=0.8, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
}


@pytest.mark.parametrize("name", CASES)
def test_distribution(name: str) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(5)) * 2
    seen = [1, 2, 3, 3, 17] if CASES[name].repetition_penalty != 1 else None
    check_distribution(logits, CASES[name], seen)


def test_a_long_flat_tail_is_drawn_in_proportion() -> None:
    """The last blocks of a large vocabulary are as likely as the first ones."""
    logits = torch.zeros(1, 40_000)
    drawn = sample(logits.expand(2_000, -1), make_batch(SamplingParams(temperature=1.0), 2_000)).token_ids
    counts = torch.histc(drawn.float(), bins=10, min=0, max=40_000)
    assert int(counts.min()) > 140
    assert int(counts.max()) < 260


def test_a_token_of_no_weight_is_never_drawn() -> None:
    logits = torch.full((1, 300), float("-inf"))
    logits[0, 137] = 0.0
    batch = make_batch(SamplingParams(temperature=1.0), 500)
    assert sample(logits.expand(500, -1), batch).token_ids.unique().tolist() == [137]


@pytest.mark.parametrize("target", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_tokens_with_weight(target: float) -> None:
    weights = torch.zeros(1, 1000)
    weights[0, 200:300] = 0.1
    index = int(sampler._find_share(weights, torch.tensor([target], dtype=torch.float64), right=True))
    assert index == (200 if target == 0 else 299)


class TestExact:
    """Settings that leave one token."""

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1),
            SamplingParams(temperature=2.0, top_k=1),
            SamplingParams(temperature=2.0, top_p=0.0),
            SamplingParams(temperature=2.0, top_p=1e-6),
            SamplingParams(temperature=1e-6),
        ],
    )
    def test_greedy(self, params: SamplingParams) -> None:
        logits = torch.randn(16, 2000, generator=torch.Generator().manual_seed(1))
        drawn = sample(logits, make_batch(params, 16)).token_ids
        assert torch.equal(drawn, logits.argmax(dim=-1))

    @pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_k=1)])
    def test_a_tie_goes_to_the_lowest_id(self, params: SamplingParams) -> None:
        logits = torch.zeros(1, 6000)
        logits[0, [900, 17, 5000]] = 2.0
        assert sample(logits, make_batch(params)).token_ids.tolist() == [17]

    def test_ties_at_the_limit_of_top_k(self) -> None:
        logits = torch.zeros(1, 6000)
        logits[0, 4000] = 1.0
        batch = make_batch(SamplingParams(temperature=1.0, top_k=3), 400)
        assert sample(logits.expand(400, -1), batch).token_ids.unique().tolist() == [0, 1, 4000]

    def test_greedy_after_the_penalty(self) -> None:
        logits = torch.tensor([[3.0, 2.5, -1.0]])
        params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
        assert sample(logits, make_batch(params, token_ids=[0])).token_ids.tolist() == [1]
        assert sample(-logits, make_batch(params, token_ids=[2, 2])).token_ids.tolist() == [2]

    def test_logits_are_left_alone(self) -> None:
        logits = torch.randn(2, 300)
        before = logits.clone()
        sample(logits, make_batch(CASES["all"], 2, token_ids=[1, 2]))
        assert torch.equal(logits, before)


class TestSeeds:
    """A row's token follows from its seed, position and logits alone."""

    def test_same_seed_alone_and_in_any_company(self) -> None:
        logits = torch.randn(10, 5000, generator=torch.Generator().manual_seed(2)) * 3
        params = [*CASES.values()]
        together = sample(logits, make_batch(params, token_ids=[4, 5])).token_ids
        for row, row_params in enumerate(params):
            alone = make_batch(row_params, token_ids=[4, 5], seeds=[row])
            assert sample(logits[row : row + 1], alone).token_ids.tolist() == [int(together[row])]

    def test_the_order_of_rows_does_not_matter(self) -> None:
        logits = torch.randn(10, 5000, generator=torch.Generator().manual_seed(2)) * 3
        params = [*CASES.values()]
        seeds = list(range(10))
        forward = sample(logits, make_batch(params, token_ids=[4], seeds=seeds)).token_ids
        backward = sample(
            logits.flip(0), make_batch(params[::-1], token_ids=[4], seeds=seeds[::-1])
        ).token_ids
        assert torch.equal(forward, backward.flip(0))

    def test_positions_and_seeds_give_other_numbers(self) -> None:
        logits = torch.zeros(1, 5000)
        params = SamplingParams(temperature=1.0)
        tokens = {
            int(sample(logits, make_batch(params, seeds=[seed], position=position)).token_ids)
            for seed in (0, 1, -1, 2**63 - 1, -(2**63))
            for position in range(20)
        }
        assert len(tokens) > 90

    def test_the_hash_is_splitmix64(self) -> None:
        def mix(z: int) -> int:
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
            return z ^ (z >> 31)

        pairs = [(0, 0), (1, 0), (0, 1), (-1, 7), (2**63 - 1, 4095), (-(2**63), 1), (123456789, 987)]
        seeds, positions = torch.tensor(pairs).T
        expected = [
            (mix((mix(seed % 2**64) + (position + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) * 2.0**-53
            for seed, position in pairs
        ]
        assert uniforms(seeds, positions).tolist() == expected

    def test_numbers_are_uniform_over_seeds_and_over_positions(self) -> None:
        count = torch.arange(100_000)
        for seeds, positions in ((count, torch.zeros_like(count)), (torch.zeros_like(count), count)):
            numbers = uniforms(seeds, positions)
            histogram = torch.histc(numbers.float(), bins=100, min=0, max=1)
            assert float(((histogram - 1000) ** 2 / 1000).sum()) < 99 + 5 * 198**0.5
            assert abs(float(torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))[0, 1])) < 0.02


class TestBadLogits:
    """A sick row harms no other."""

    @pytest.mark.parametrize("params", [*CASES.values(), SamplingParams(temperature=0.0, logprobs=2)])
    def test_nan_and_infinities(self, params: SamplingParams) -> None:
        logits = torch.randn(5, 400, generator=torch.Generator().manual_seed(3))
        healthy = sample(logits[4:], make_batch(params, seeds=[4])).token_ids
        logits[0] = float("nan")
        logits[1, ::2] = float("nan")
        logits[2] = float("-inf")
        logits[3, 77] = float("inf")
        drawn = sample(logits, make_batch(params, 5)).token_ids
        assert drawn[0] == 0
        assert drawn[1] % 2 == 1
        assert drawn[2] == 0
        assert drawn[3] == 77
        assert drawn[4] == healthy[0]


class TestLogprobs:
    """They describe the model, not what the parameters made of it."""

    def test_of_the_unmodified_distribution(self) -> None:
        logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(4))
        params = [replace(CASES["all"], logprobs=n) for n in (None, 0, 4)]
        output = sample(logits, make_batch(params, token_ids=[1, 2, 3]))
        expected = torch.log_softmax(logits.double(), dim=-1)
        assert output.logprobs is not None
        chosen = expected.gather(1, output.token_ids.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(output.logprobs.chosen.double(), chosen, atol=1e-5, rtol=0)
        values, ids = expected.topk(4)
        torch.testing.assert_close(output.logprobs.top_values.double(), values, atol=1e-5, rtol=0)
        assert torch.equal(output.logprobs.top_ids, ids)

    def test_none_unless_asked_for(self) -> None:
        logits = torch.randn(2, 50)
        assert sample(logits, make_batch(SamplingParams(), 2)).logprobs is None
        output = sample(logits, make_batch(SamplingParams(logprobs=0), 2))
        assert output.logprobs is not None
        assert output.logprobs.top_ids.shape == (2, 0)

    def test_more_than_the_vocabulary(self) -> None:
        output = sample(torch.zeros(1, 5), make_batch(SamplingParams(temperature=0.0, logprobs=20)))
        assert output.logprobs is not None
        assert output.logprobs.top_ids.tolist() == [[0, 1, 2, 3, 4]]


def test_no_rows() -> None:
    batch = SamplingBatch.from_requests([], CPU)
    assert sample(torch.empty(0, 100), batch).token_ids.tolist() == []


def test_a_batch_is_what_the_requests_say() -> None:
    params = [
        SamplingParams(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, logprobs=2),
        SamplingParams(temperature=0.0, repetition_penalty=2.0),
    ]
    batch = make_batch(params, token_ids=[5, 3, 5], seeds=[-7, 9])
    assert batch.temperature.tolist() == [0.5, 0.0]
    assert (batch.top_k.tolist(), batch.top_k.dtype) == ([3, 0], torch.int32)
    assert batch.top_p.tolist() == [0.25, 1.0]
    assert batch.min_p.tolist() == [0.125, 0.0]
    assert batch.repetition_penalty.tolist() == [1.0, 2.0]
    assert batch.seeds.tolist() == [-7, 9]
    assert batch.positions.tolist() == [3, 3]
    assert batch.any_penalty
    assert not batch.all_greedy
    assert batch.any_greedy
    assert batch.any_top_k
    assert batch.any_top_p
    assert batch.any_min_p
    assert batch.num_logprobs == 2


@given(
    st.integers(1, 300),
    st.integers(0, 320),
    st.sampled_from([0.0, 0.3, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    st.sampled_from([0.1, 1.0, 2.0]),
    st.booleans(),
    st.integers(0, 10**6),
)
@settings(max_examples=100, deadline=None)
def test_drawn_tokens_follow_from_the_distribution(
    vocab_size: int, top_k: int, top_p: float, min_p: float, temperature: float, ties: bool, seed: int
) -> None:
    """A token is the one, in the order of ids, at which its row's number falls in the distribution."""
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(seed))
    if ties:
        logits = logits.round()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    batch = make_batch(params, 4, seeds=[seed + row for row in range(4)])
    drawn = sample(logits, batch).token_ids.tolist()
    for row, number in enumerate(uniforms(batch.seeds, batch.positions).tolist()):
        sums = expected_distribution(logits[row], params).cumsum(0)
        before = float(sums[drawn[row] - 1]) if drawn[row] else 0.0
        assert before - 1e-5 <= number <= float(sums[drawn[row]]) + 1e-5
        assert float(sums[drawn[row]]) > before
