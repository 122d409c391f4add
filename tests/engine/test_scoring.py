"""Scores of known tokens: exact on a model that can be computed by hand, and alike on every path."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanochat.engine import scoring
from nanochat.engine.config import EngineConfig, SamplingParams
from nanochat.engine.loading import LoadedModel, load_model
from nanochat.engine.memory import allocate_caches
from nanochat.engine.models.families import load_model_config
from nanochat.engine.models.weights import load_decoder
from nanochat.engine.progress import ignore_progress
from nanochat.engine.runner import Runner
from nanochat.engine.scoring import Scorer, TokenScores
from nanochat.engine.step_plan import StepPlan
from tests.engine.conftest import MakeEngine

BLOCK_SIZE = 8
BLOCKS_PER_ROW = 16
ROWS = 3


class BigramRunner:
    """A "model" whose prediction depends on the last token alone: a table ``[vocab, vocab]`` of logits."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        config = SimpleNamespace(vocab_size=logits.shape[0])
        self.decoder: Any = SimpleNamespace(compute_logits=lambda hidden: hidden, config=config)
        self.steps: list[tuple[int, int]] = []
        """Decode rows and tokens of every step."""

    def hidden_states(self, plan: StepPlan) -> torch.Tensor:
        tokens = [t for c in plan.chunks for t in c.request.token_ids[c.start : c.start + c.length]]
        self.steps.append((len(plan.decodes), len(tokens)))
        return self.logits[tokens]


def bigram_runners(count: int, vocab: int = 11) -> list[BigramRunner]:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(vocab, vocab, generator=generator)
    noise = [torch.randn(vocab, vocab, generator=generator) * 0.5 for _ in range(count - 1)]
    return [BigramRunner(first), *(BigramRunner(first + other) for other in noise)]


def by_hand(runners: Sequence[BigramRunner], tokens: Sequence[int], first: int) -> TokenScores:
    """The definitions of the three scores, in float64."""
    before = list(tokens[first - 1 : -1])
    probabilities = [torch.softmax(runner.logits.double(), dim=-1)[before].numpy() for runner in runners]
    reference = probabilities[0]
    places = np.arange(len(before))
    return TokenScores(
        nll=np.stack([-np.log(p[places, tokens[first:]]) for p in probabilities]),
        kl=np.stack([(reference * np.log(reference / p)).sum(axis=1) for p in probabilities]),
        same_top=np.stack([p.argmax(axis=1) == reference.argmax(axis=1) for p in probabilities]),
    )


def assert_close(got: TokenScores, expected: TokenScores, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(got.nll, expected.nll, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(got.kl, expected.kl, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(got.same_top, expected.same_top)


def random_tokens(length: int, vocab: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=length)


def bigram_scorer(runners: Sequence[Any], chunk_tokens: int = 7) -> Scorer:
    return Scorer(runners, blocks_per_row=BLOCKS_PER_ROW, chunk_tokens=chunk_tokens)


class TestByHand:
    @pytest.mark.parametrize("first", [1, 2, 7, 8, 9, 24])
    @pytest.mark.parametrize("chunk_tokens", [1, 7, 100])
    @pytest.mark.parametrize("logits_at_once", [1, 33, 2**20])
    def test_prefill(
        self, monkeypatch: pytest.MonkeyPatch, first: int, chunk_tokens: int, logits_at_once: int
    ) -> None:
        monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", logits_at_once)
        runners = bigram_runners(3)
        tokens = random_tokens(25, 11)
        scores = bigram_scorer(runners, chunk_tokens).prefill(tokens, first)
        assert_close(scores, by_hand(runners, tokens, first))
        assert all(decodes == 0 and size <= chunk_tokens for decodes, size in runners[0].steps)
        assert sum(size for _, size in runners[0].steps) == len(tokens) - 1

    @pytest.mark.parametrize("first", [1, 5, 24])
    def test_decode(self, first: int) -> None:
        runners = bigram_runners(2)
        rows = [random_tokens(25, 11, seed) for seed in range(3)]
        scorer = bigram_scorer(runners)
        scorer.fill([row[:first] for row in rows])
        runners[0].steps.clear()
        scores = scorer.decode(rows, first)
        expected = TokenScores.concatenate([by_hand(runners, row, first) for row in rows])
        assert_close(scores, expected)
        assert runners[0].steps == [(3, 3)] * (25 - first)

    def test_roll_out(self) -> None:
        runners = bigram_runners(2)
        prompts = [[1, 2, 3], [4, 5, 6]]
        scorer = bigram_scorer(runners)
        scorer.fill(prompts)
        answers = scorer.roll_out(prompts, 10)
        for runner, cache_answers in zip(runners, answers, strict=True):
            for prompt, answer in zip(prompts, cache_answers, strict=True):
                token, expected = prompt[-1], []
                for _ in range(10):
                    token = int(runner.logits[token].argmax())
                    expected.append(token)
                assert answer.tolist() == expected

    def test_never_more_logits_than_allowed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 50)
        runners = bigram_runners(2)
        sizes = []
        for runner in runners:
            runner.decoder.compute_logits = lambda hidden: (sizes.append(hidden.numel()), hidden)[1]
        bigram_scorer(runners).prefill(random_tokens(60, 11), 1)
        assert max(sizes) <= 50

    def test_take_and_concatenate(self) -> None:
        runners = bigram_runners(2)
        tokens = random_tokens(20, 11)
        scores = bigram_scorer(runners).prefill(tokens, 1)
        assert scores.num_tokens == 19
        assert_close(scores.take(slice(-5, None)), by_hand(runners, tokens, 15))
        halves = [scores.take(slice(0, 9)), scores.take(slice(9, None))]
        assert_close(TokenScores.concatenate(halves), scores)


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> LoadedModel:
    config = EngineConfig(
        model=str(tiny_llama),
        device="cpu",
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_kv_blocks=ROWS * BLOCKS_PER_ROW,
    )
    return load_model(config, ignore_progress)


def make_scorer(model: LoadedModel, *kv_dtypes: torch.dtype, chunk_tokens: int = 20) -> Scorer:
    """Caches hold NaN until they are written: reading a slot too many would show."""
    runners = []
    for kv_dtype in kv_dtypes:
        caches = allocate_caches(
            model.config, ROWS * BLOCKS_PER_ROW, BLOCK_SIZE, kv_dtype, torch.device("cpu")
        )
        for cache in caches:
            for tensor in (cache.k, cache.v) if cache.k_scale is None else (cache.k_scale, cache.v_scale):
                assert tensor is not None
                tensor.fill_(float("nan"))
        runners.append(Runner(model.runner.decoder, caches))
    return Scorer(runners, blocks_per_row=BLOCKS_PER_ROW, chunk_tokens=chunk_tokens)


def model_tokens(length: int, seed: int = 0) -> list[int]:
    return random_tokens(length, 256, seed)


class TestOnAModel:
    @pytest.mark.parametrize("length", [2, 17, 100, BLOCKS_PER_ROW * BLOCK_SIZE])
    def test_is_the_likelihood_that_transformers_gives(
        self, model: LoadedModel, tiny_llama: Path, length: int
    ) -> None:
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
        tokens = model_tokens(length)
        with torch.inference_mode():
            logits = theirs(torch.tensor([tokens])).logits[0, :-1]
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
        scores = make_scorer(model, torch.float32).prefill(tokens, 1)
        np.testing.assert_allclose(scores.nll[0], expected.numpy(), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
    @pytest.mark.parametrize("chunk_tokens", [1, 8, 13, 200])
    def test_chunks_change_nothing(
        self, model: LoadedModel, kv_dtype: torch.dtype, chunk_tokens: int
    ) -> None:
        tokens = model_tokens(90)
        whole = make_scorer(model, kv_dtype, chunk_tokens=200).prefill(tokens, 1)
        chunked = make_scorer(model, kv_dtype, chunk_tokens=chunk_tokens).prefill(tokens, 1)
        # Rounding may tip a value that lies between two INT8 steps.
        assert_close(chunked, whole, tolerance=1e-4 if kv_dtype == torch.float32 else 2e-2)

    @pytest.mark.parametrize("first", [1, 2, 40])
    @pytest.mark.parametrize("rows", [1, 3])
    def test_decode_gives_what_prefill_gives(self, model: LoadedModel, first: int, rows: int) -> None:
        scorer = make_scorer(model, torch.float32, torch.int8)
        texts = [model_tokens(70, seed) for seed in range(rows)]
        prefilled = TokenScores.concatenate([scorer.prefill(text, first) for text in texts])
        scorer = make_scorer(model, torch.float32, torch.int8)
        scorer.fill([text[:first] for text in texts])
        decoded = scorer.decode(texts, first)
        np.testing.assert_allclose(decoded.nll[0], prefilled.nll[0], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(decoded.nll[1], prefilled.nll[1], rtol=2e-2, atol=2e-2)
        np.testing.assert_allclose(decoded.kl.mean(axis=1), prefilled.kl.mean(axis=1), rtol=0.05)

    def test_int8_is_close_but_not_equal(self, model: LoadedModel) -> None:
        scores = make_scorer(model, torch.float32, torch.int8).prefill(model_tokens(128), 1)
        assert scores.kl[0].max() == 0
        assert 0 < scores.kl[1].mean() < 0.05
        assert scores.same_top[0].all()
        assert scores.same_top[1].mean() > 0.9
        assert abs(np.expm1(scores.nll[1].mean() - scores.nll[0].mean())) < 0.05

    def test_a_cache_against_itself(self, model: LoadedModel) -> None:
        scores = make_scorer(model, torch.int8, torch.int8).prefill(model_tokens(128), 1)
        assert scores.kl.max() == 0
        assert scores.same_top.all()
        np.testing.assert_array_equal(scores.nll[0], scores.nll[1])

    @pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
    def test_rolls_out_what_the_engine_answers(
        self, model: LoadedModel, make_engine: MakeEngine, kv_dtype: str
    ) -> None:
        prompts = [model_tokens(30, seed) for seed in range(ROWS)]
        scorer = make_scorer(model, torch.int8 if kv_dtype == "int8" else torch.float32)
        scorer.fill(prompts)
        answers = scorer.roll_out(prompts, 24)
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        handles = [make_engine(kv_dtype=kv_dtype).submit(prompt, params) for prompt in prompts]
        assert answers[0].tolist() == [handle.result(60).token_ids for handle in handles]

    def test_fill_is_kept_while_rolling_out(self, model: LoadedModel) -> None:
        """Greedy answers overwrite only what decoding writes again."""
        scorer = make_scorer(model, torch.float32)
        texts = [model_tokens(60, seed) for seed in range(ROWS)]
        prompts = [text[:30] for text in texts]
        scorer.fill(prompts)
        alone = scorer.decode(texts, 30)
        scorer.fill(prompts)
        scorer.roll_out(prompts, 30)
        assert_close(scorer.decode(texts, 30), alone)


def test_scores_in_bfloat16(tiny_llama: Path) -> None:
    config = load_model_config(tiny_llama)
    decoder = load_decoder(tiny_llama, config, torch.device("cpu"), torch.bfloat16, ignore_progress)
    caches = allocate_caches(config, BLOCKS_PER_ROW, BLOCK_SIZE, torch.bfloat16, torch.device("cpu"))
    scorer = Scorer([Runner(decoder, caches)], blocks_per_row=BLOCKS_PER_ROW, chunk_tokens=32)
    scores = scorer.prefill(model_tokens(100), 1)
    assert scores.nll.dtype == np.float32
    assert np.isfinite(scores.nll).all()
