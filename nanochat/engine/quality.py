"""How well a model predicts a text, and what a KV cache of fewer bits changes about it.

Loads the model, cuts the text into windows and turns scores of tokens into figures. Knows nothing of files
or terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from nanochat.engine.config import EngineConfig
from nanochat.engine.cpu_threads import choose_threads
from nanochat.engine.device import dtype_name
from nanochat.engine.loading import load_model
from nanochat.engine.memory import allocate_caches, kv_bytes_per_token
from nanochat.engine.panics import panics_refused
from nanochat.engine.progress import Progress, ProgressCallback, ignore_progress
from nanochat.engine.runner import Runner
from nanochat.engine.scoring import Scorer, TokenScores
from nanochat.engine.windows import DecodeSpans, Window, decode_spans, sliding_windows
from nanochat.errors import InvalidOption, NanochatError, NotEnoughMemory, WrongUsage

USUAL_CTX = 2048
CHUNKS_PER_WINDOW = 4
"""So that most tokens are predicted from K/V of earlier chunks, as with a long prompt in a busy engine."""
ROWS = 8
"""Rows that decode together."""
ROLLOUT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions:
    """What to measure; lengths in tokens."""

    compare: bool = False
    """Measure a cache of the model's own type and an INT8 one, side by side."""
    ctx: int | None = None
    """Length of a window. None: 2,048, or the model's limit or the whole text if that is less."""
    stride: int | None = None
    """From one window to the next. None: half a window."""
    limit_tokens: int | None = None
    """Use only so many tokens of the text."""
    decode_tokens: int | None = None
    """Tokens to score by decoding too. 0: none. None: 1,024, or as many as there are."""

    def __post_init__(self) -> None:
        lowest = {"ctx": 2, "stride": 1, "limit_tokens": 2, "decode_tokens": 0}
        for name, low in lowest.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise InvalidOption(f"--{name.replace('_', '-')} must be at least {low}, not {value}.")


@dataclass(frozen=True, slots=True)
class CacheQuality:
    """One cache's figures over some tokens; those that compare it with the first cache are None for that."""

    kv_dtype: str
    kv_bytes_per_token: int
    perplexity: float
    """exp of the mean of minus the log-probability."""
    perplexity_change: float | None = None
    """Share by which it is above the first cache's perplexity."""
    kl_mean: float | None = None
    """Divergence from the first cache's distribution, in nats."""
    kl_p99: float | None = None
    """What 99 % of the tokens stay below."""
    top1_agreement: float | None = None
    """Share of tokens for which the likeliest one is the first cache's."""


@dataclass(frozen=True, slots=True)
class PathQuality:
    """Figures over tokens that went one way through the engine."""

    tokens: int
    caches: tuple[CacheQuality, ...]


@dataclass(frozen=True, slots=True)
class RolloutQuality:
    """Greedy answers with the second cache against those with the first."""

    prompts: int
    tokens: int
    """Length of an answer."""
    agreement: float
    """Share of all places that hold the same token; after a first difference few do."""
    identical: float
    """Share of answers that are the same throughout."""


@dataclass(frozen=True, slots=True)
class QualityReport:
    """Everything measured, and how."""

    model: str
    device: str
    dtype: str
    tokens: int
    """Tokens of the text that were used."""
    ctx: int
    stride: int
    chunk_tokens: int
    prefill: PathQuality
    """All tokens, by chunked prefill."""
    decode: PathQuality | None
    """Some tokens, decoded one by one with the right ones before them."""
    prefill_of_decoded: PathQuality | None
    """Those same tokens as prefill scored them."""
    rollout: RolloutQuality | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class QualityMeter:
    """A loaded model, and a cache of each type that is to be measured."""

    def __init__(
        self,
        config: EngineConfig,
        options: QualityOptions | None = None,
        progress: ProgressCallback = ignore_progress,
    ) -> None:
        """Load the model; only then is its own limit of the window's length known.

        Raises:
            NanochatError: a subclass whose message says what to do.
        """
        self.options = options or QualityOptions()
        self._progress = progress
        if config.tensor_parallel_size != 1:
            raise WrongUsage("Perplexity is measured on one device; leave out --tp.")
        longest = _longest_window(config, self.options)
        blocks_per_row = -(-longest // config.block_size)
        decodes = self.options.decode_tokens != 0
        rows = min(ROWS, config.max_num_seqs, config.max_num_batched_tokens) if decodes else 1
        num_blocks = config.num_kv_blocks or rows * blocks_per_row
        if num_blocks < blocks_per_row:
            raise NotEnoughMemory(
                f"A window of {longest:,} tokens takes {blocks_per_row:,} KV blocks and there are "
                f"{num_blocks:,}; leave out --kv-blocks, or ask for shorter windows with --ctx."
            )
        self._rows = min(rows, num_blocks // blocks_per_row)
        # Graphs include sampling, and nothing is sampled here.
        fitted = replace(config, num_kv_blocks=num_blocks, max_model_len=None, cuda_graphs=False)
        self.model = load_model(fitted, progress)
        if self.model.device.type == "cpu":
            torch.set_num_threads(choose_threads(config.threads))
        self.ctx = self._within_limit(longest)
        self.stride = self.options.stride or max(1, self.ctx // 2)
        self._kv_dtypes = [self.model.dtype, torch.int8] if self.options.compare else [self.model.kv_dtype]
        self._chunk_tokens = min(-(-self.ctx // CHUNKS_PER_WINDOW), config.max_num_batched_tokens)
        self._scorer = Scorer(
            [self._runner(kv_dtype, config.block_size) for kv_dtype in self._kv_dtypes],
            blocks_per_row=blocks_per_row,
            chunk_tokens=self._chunk_tokens,
        )

    def measure(self, text: str) -> QualityReport:
        """Score a text window by window, and the ends of some windows once more by decoding them.

        Raises:
            InvalidOption: the text is too short for the options.
            NanochatError: the model gives no finite probabilities.
        """
        with panics_refused():
            tokens: list[int] = self.model.tokenizer.encode(text)[: self.options.limit_tokens]
        ctx, stride = self.ctx, self.stride
        if self.options.ctx is None and len(tokens) < ctx:
            ctx = max(2, len(tokens))
            stride = self.options.stride or ctx // 2
        windows = sliding_windows(len(tokens), ctx, stride)
        wanted = self.options.decode_tokens
        spans = None if wanted == 0 else decode_spans(windows, wanted)
        scores = self._prefill(tokens, windows)
        decode = prefill_of_decoded = rollout = None
        if spans is not None:
            decoded, answers = self._decode(tokens, spans)
            decode = self._summarise(decoded)
            prefilled = [scores[window].take(slice(-spans.length, None)) for window in spans.windows]
            prefill_of_decoded = self._summarise(TokenScores.concatenate(prefilled))
            rollout = _compare_answers(answers) if self.options.compare else None
        return QualityReport(
            model=self.model.name,
            device=self.model.device.type,
            dtype=dtype_name(self.model.dtype),
            tokens=len(tokens),
            ctx=ctx,
            stride=stride,
            chunk_tokens=self._chunk_tokens,
            prefill=self._summarise(TokenScores.concatenate(list(scores.values()))),
            decode=decode,
            prefill_of_decoded=prefill_of_decoded,
            rollout=rollout,
        )

    def _within_limit(self, longest: int) -> int:
        limit = self.model.config.max_position_embeddings
        if longest <= limit:
            return longest
        if self.options.ctx is not None:
            raise InvalidOption(
                f"--ctx {longest:,} is over this model's limit of {limit:,} tokens; ask for that or less."
            )
        return limit

    def _runner(self, kv_dtype: torch.dtype, block_size: int) -> Runner:
        model = self.model
        if kv_dtype == model.kv_dtype:
            return model.runner
        caches = allocate_caches(model.config, model.num_kv_blocks, block_size, kv_dtype, model.device)
        return Runner(model.runner.decoder, caches)

    def _prefill(self, tokens: Sequence[int], windows: Sequence[Window]) -> dict[Window, TokenScores]:
        scores: dict[Window, TokenScores] = {}
        for number, window in enumerate(windows):
            self._progress(Progress("Scoring by prefill", number, len(windows)))
            begin, end, first_scored = window
            scores[window] = self._scorer.prefill(tokens[begin:end], first_scored - begin)
        return scores

    def _decode(self, tokens: Sequence[int], spans: DecodeSpans) -> tuple[TokenScores, np.ndarray]:
        """Scores of the spans' tokens, and greedy answers ``[C, windows, n]`` to what comes before them."""
        scores, answers = [], []
        total = len(spans.windows) * spans.length
        for first in range(0, len(spans.windows), self._rows):

            def report(scored: int, before: int = first * spans.length) -> None:
                self._progress(Progress("Scoring by decode", before + scored, total, "tokens"))

            report(0)
            rows = [tokens[window.begin : window.end] for window in spans.windows[first : first + self._rows]]
            prompts = [row[: -spans.length] for row in rows]
            self._scorer.fill(prompts)
            if self.options.compare:
                answers.append(self._scorer.roll_out(prompts, min(ROLLOUT_TOKENS, spans.length)))
            scores.append(self._scorer.decode(rows, len(prompts[0]), report))
        return TokenScores.concatenate(scores), np.concatenate(answers, axis=1) if answers else np.empty(0)

    def _summarise(self, scores: TokenScores) -> PathQuality:
        nll = scores.nll.mean(axis=1, dtype=np.float64)
        if not np.isfinite(nll).all():
            raise NanochatError(
                f"The model gives no finite probabilities in {dtype_name(self.model.dtype)}; "
                "try --dtype float32."
            )
        caches = []
        for index, kv_dtype in enumerate(self._kv_dtypes):
            own = CacheQuality(
                kv_dtype=dtype_name(kv_dtype),
                kv_bytes_per_token=kv_bytes_per_token(self.model.config, kv_dtype),
                perplexity=float(np.exp(nll[index])),
            )
            if index:
                own = replace(
                    own,
                    perplexity_change=float(np.expm1(nll[index] - nll[0])),
                    kl_mean=float(scores.kl[index].mean(dtype=np.float64)),
                    kl_p99=float(np.quantile(scores.kl[index], 0.99)),
                    top1_agreement=float(scores.same_top[index].mean()),
                )
            caches.append(own)
        return PathQuality(scores.num_tokens, tuple(caches))


def _longest_window(config: EngineConfig, options: QualityOptions) -> int:
    """The window's length, as far as it is known before the model."""
    limit = config.max_model_len
    if options.ctx is None:
        return min(USUAL_CTX, limit or USUAL_CTX)
    if limit is not None and options.ctx > limit:
        raise WrongUsage(f"--ctx {options.ctx:,} is over --max-model-len {limit:,}; ask for that or less.")
    return options.ctx


def _compare_answers(answers: np.ndarray) -> RolloutQuality:
    """``answers [2, prompts, tokens]``."""
    same = answers[0] == answers[1]
    return RolloutQuality(same.shape[0], same.shape[1], float(same.mean()), float(same.all(axis=1).mean()))
