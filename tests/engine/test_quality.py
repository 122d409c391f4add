"""Figures over a whole text: against ``transformers``, and what their options mean."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanochat.engine.config import EngineConfig
from nanochat.engine.progress import Progress
from nanochat.engine.quality import PathQuality, QualityMeter, QualityOptions
from nanochat.engine.scoring import TokenScores
from nanochat.errors import InvalidOption, NanochatError, NotEnoughMemory
from tests.tiny_model import write_tiny_llama

TEXT = "".join(random.Random(0).choices("abcdefghij klmnop\n", k=600))
"""One token a character, for the tiny model."""


def make_meter(folder: Path, *, config: dict[str, Any] | None = None, **options: Any) -> QualityMeter:
    engine = {"device": "cpu", "dtype": "float32", **(config or {})}
    usual = {"ctx": 64, "decode_tokens": 128}
    return QualityMeter(EngineConfig(model=str(folder), **engine), QualityOptions(**{**usual, **options}))


@pytest.fixture(scope="module")
def meter(tiny_llama: Path) -> QualityMeter:
    return make_meter(tiny_llama, compare=True)


def transformers_perplexity(folder: Path, tokens: list[int], ctx: int, stride: int) -> float:
    """The loop of https://huggingface.co/docs/transformers/perplexity, from ``transformers``' own loss."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, count, previous_end = 0.0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + ctx, len(tokens))
        ids = torch.tensor([tokens[begin:end]])
        labels = ids.clone()
        labels[:, : -(end - previous_end)] = -100
        num_labels = int((labels[:, 1:] != -100).sum())
        with torch.inference_mode():
            total += float(model(ids, labels=labels).loss) * num_labels
        count += num_labels
        previous_end = end
        if end == len(tokens):
            break
    return math.exp(total / count)


class TestPerplexity:
    @pytest.mark.parametrize(("ctx", "stride"), [(64, 32), (64, 64), (50, 7), (600, 600)])
    def test_is_that_of_transformers(self, tiny_llama: Path, ctx: int, stride: int) -> None:
        meter = make_meter(tiny_llama, ctx=ctx, stride=stride, decode_tokens=0)
        report = meter.measure(TEXT)
        expected = transformers_perplexity(tiny_llama, meter.model.tokenizer.encode(TEXT), ctx, stride)
        assert report.prefill.caches[0].perplexity == pytest.approx(expected, rel=1e-4)
        assert report.tokens == len(TEXT)

    def test_of_a_single_kv_dtype(self, meter: QualityMeter, tiny_llama: Path) -> None:
        both = meter.measure(TEXT).prefill
        for index, kv_dtype in enumerate(("auto", "int8")):
            alone = make_meter(tiny_llama, config={"kv_dtype": kv_dtype}).measure(TEXT).prefill
            assert len(alone.caches) == 1
            assert alone.caches[0].perplexity == both.caches[index].perplexity
            assert alone.caches[0].perplexity_change is None

    def test_comparing_does_not_depend_on_the_kv_dtype_asked_for(self, tiny_llama: Path) -> None:
        options = {"compare": True, "limit_tokens": 200}
        reports = [
            make_meter(tiny_llama, config={"kv_dtype": kv_dtype}, **options).measure(TEXT)
            for kv_dtype in ("auto", "int8")
        ]
        assert reports[0] == reports[1]


class TestComparison:
    def test_int8_costs_bytes_and_little_else(self, meter: QualityMeter) -> None:
        full, int8 = meter.measure(TEXT).prefill.caches
        assert (full.kv_dtype, int8.kv_dtype) == ("float32", "int8")
        assert (full.kv_bytes_per_token, int8.kv_bytes_per_token) == (512, 144)
        assert full.perplexity_change is full.kl_mean is full.kl_p99 is full.top1_agreement is None
        assert int8.perplexity_change == pytest.approx(int8.perplexity / full.perplexity - 1)
        assert abs(int8.perplexity_change) < 0.05
        assert int8.kl_mean is not None
        assert int8.kl_p99 is not None
        assert int8.top1_agreement is not None
        assert 0 < int8.kl_mean < int8.kl_p99 < 1
        assert 0.9 < int8.top1_agreement < 1

    def test_decode_agrees_with_prefill(self, meter: QualityMeter) -> None:
        report = meter.measure(TEXT)
        assert report.decode is not None
        assert report.prefill_of_decoded is not None
        assert report.decode.tokens == report.prefill_of_decoded.tokens == 128
        for decoded, prefilled in zip(report.decode.caches, report.prefill_of_decoded.caches, strict=True):
            close = 1e-4 if decoded.kv_dtype == "float32" else 1e-2
            assert decoded.perplexity == pytest.approx(prefilled.perplexity, rel=close)
        assert report.rollout is not None
        assert (report.rollout.prompts, report.rollout.tokens) == (4, 32)
        assert 0 <= report.rollout.identical <= report.rollout.agreement <= 1

    def test_the_same_again(self, meter: QualityMeter) -> None:
        assert meter.measure(TEXT) == meter.measure(TEXT)

    def test_json_holds_every_figure(self, meter: QualityMeter) -> None:
        report = meter.measure(TEXT)
        written = json.loads(json.dumps(report.to_json(), allow_nan=False))
        assert set(written) == {field.name for field in dataclasses.fields(report)}
        assert written["prefill"]["caches"][1]["kl_mean"] == report.prefill.caches[1].kl_mean

    def test_the_same_answers_agree_wholly(
        self, meter: QualityMeter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(meter, "_scorer", _SameCaches(meter._scorer))
        report = meter.measure(TEXT)
        assert report.rollout is not None
        assert report.rollout.agreement == report.rollout.identical == 1

    def test_figures_of_scores_made_up(self, meter: QualityMeter) -> None:
        scores = TokenScores(
            nll=np.array([[1.0, 3.0], [1.5, 3.5]], dtype=np.float32),
            kl=np.array([[0, 0], [0.1, 0.3]], dtype=np.float32),
            same_top=np.array([[True, True], [True, False]]),
        )
        quality: PathQuality = meter._summarise(scores)
        assert quality.tokens == 2
        assert quality.caches[0].perplexity == pytest.approx(math.exp(2))
        assert quality.caches[1].perplexity_change == pytest.approx(math.exp(0.5) - 1)
        assert quality.caches[1].kl_mean == pytest.approx(0.2)
        assert quality.caches[1].kl_p99 == pytest.approx(0.298)
        assert quality.caches[1].top1_agreement == 0.5


class _SameCaches:
    """A scorer whose greedy answers are those of the first cache, for all caches."""

    def __init__(self, scorer: Any) -> None:
        self._scorer = scorer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def roll_out(self, *arguments: Any) -> np.ndarray:
        answers = self._scorer.roll_out(*arguments)
        return np.stack([answers[0]] * len(answers))


class TestShapes:
    def test_windows_are_cut_to_the_models_limit(self, tmp_path: Path) -> None:
        folder = write_tiny_llama(tmp_path / "short", max_position_embeddings=96)
        meter = make_meter(folder, ctx=None)
        assert (meter.ctx, meter.stride) == (96, 48)
        assert meter.measure(TEXT).prefill.tokens == len(TEXT) - 1

    def test_windows_are_cut_to_max_model_len(self, tiny_llama: Path) -> None:
        meter = make_meter(tiny_llama, ctx=None, config={"max_model_len": 80})
        assert meter.ctx == 80

    def test_a_window_takes_several_chunks(self, tiny_llama: Path) -> None:
        assert make_meter(tiny_llama).measure(TEXT).chunk_tokens == 16
        small = make_meter(tiny_llama, config={"max_num_batched_tokens": 5}, decode_tokens=0)
        assert small.measure(TEXT[:100]).chunk_tokens == 5

    @pytest.mark.parametrize("config", [{"max_num_seqs": 1}, {"num_kv_blocks": 4}, {"num_kv_blocks": 11}])
    def test_how_many_rows_decode_together_changes_nothing(
        self, meter: QualityMeter, tiny_llama: Path, config: dict[str, Any]
    ) -> None:
        usual = meter.measure(TEXT)
        other = make_meter(tiny_llama, compare=True, config=config).measure(TEXT)
        assert usual.decode is not None
        assert other.decode is not None
        assert other.decode.caches[1].perplexity == pytest.approx(usual.decode.caches[1].perplexity, rel=1e-3)
        assert other.prefill == usual.prefill

    def test_progress_names_both_paths(self, tiny_llama: Path) -> None:
        seen: list[Progress] = []
        config = EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32")
        QualityMeter(config, QualityOptions(ctx=64), seen.append).measure(TEXT)
        stages = [progress.stage for progress in seen if progress.stage.startswith("Scoring")]
        assert set(stages) == {"Scoring by prefill", "Scoring by decode"}
        assert all(progress.done <= progress.total for progress in seen if progress.total)
        decoded = [
            (progress.done, progress.total) for progress in seen if progress.stage == "Scoring by decode"
        ]
        assert decoded == sorted(decoded)
        assert decoded[-1][0] == decoded[-1][1]  # token by token: one window may take minutes


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"ctx": 1}, "--ctx must be at least 2, not 1"),
            ({"stride": 0}, "--stride must be at least 1, not 0"),
            ({"limit_tokens": 1}, "--limit-tokens must be at least 2, not 1"),
            ({"decode_tokens": -1}, "--decode-tokens must be at least 0, not -1"),
            ({"stride": 65}, "--stride must be between 1 and the window's 64 tokens, not 65"),
            ({"ctx": 5000}, "over this model's limit of 2,048"),
            ({"ctx": 700}, "600 tokens, fewer than one window of 700"),
            ({"limit_tokens": 63}, "63 tokens, fewer than one window of 64"),
            ({"decode_tokens": 10_000}, "between 1 and 544"),
        ],
    )
    def test_options_that_can_not_work(
        self, tiny_llama: Path, options: dict[str, Any], sentence: str
    ) -> None:
        with pytest.raises(InvalidOption, match=sentence):
            make_meter(tiny_llama, **options).measure(TEXT)

    def test_as_many_threads_as_asked_for(self, tiny_llama: Path) -> None:
        before = torch.get_num_threads()
        try:
            make_meter(tiny_llama, config={"threads": before + 1})
            assert torch.get_num_threads() == before + 1
        finally:
            torch.set_num_threads(before)

    def test_a_window_over_max_model_len(self, tiny_llama: Path) -> None:
        with pytest.raises(InvalidOption, match="--ctx 64 is over --max-model-len 32"):
            make_meter(tiny_llama, config={"max_model_len": 32})

    def test_a_divided_model(self, tiny_llama: Path) -> None:
        with pytest.raises(InvalidOption, match="leave out --tp"):
            make_meter(tiny_llama, config={"tensor_parallel_size": 2})

    def test_a_window_over_the_blocks(self, tiny_llama: Path) -> None:
        with pytest.raises(NotEnoughMemory, match="takes 4 KV blocks and there are 3"):
            make_meter(tiny_llama, config={"num_kv_blocks": 3})

    def test_a_model_that_overflows_says_so(self, tiny_llama: Path) -> None:
        meter = make_meter(tiny_llama)
        meter.model.runner.decoder.norm.weight.fill_(float("inf"))
        with pytest.raises(NanochatError, match="no finite probabilities in float32"):
            meter.measure(TEXT)
