"""The part of sampling that reads whole rows of logits, shared among many programs a row.

A row is cut into chunks, one a program: first each chunk's best score is found; then, relative to the row's
best, each chunk's weight and, for rows with filters, how its tokens fall into a few bins; then the tokens of
the best bins are copied aside, in the order of their ids. What the chunks found is merged by whoever needs it.
Knows nothing of filters but whether a row has any.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanochat.kernels.seen import SeenRows
from nanochat.kernels.triton_utils import enter, next_power_of_2

BINS = tl.constexpr(7)
BIN_WIDTH = tl.constexpr(2.0)
"""Tokens are binned by how far, in units of temperature, their score lies below the best: in bins of this
width, and beyond the last."""


@dataclass(frozen=True, slots=True)
class RowScan:
    """What is known of ``S`` rows cut into ``P`` chunks, and their likeliest tokens, at most ``C``."""

    best: torch.Tensor
    """``[S, P]`` float32: each chunk's greatest score."""
    best_ids: torch.Tensor
    """``[S, P]`` int32: the lowest id that has it."""
    weights: torch.Tensor
    """``[S, P]`` float32: sums of ``exp((score - best) / temperature)``; not written for greedy rows."""
    bins: torch.Tensor
    """``[S, P, 2]`` int64: 16 bits a bin, its tokens; not written for rows without a filter."""
    masses: torch.Tensor
    """``[S, P]`` float32: the weight of what was copied; likewise."""
    candidates: torch.Tensor
    """``[S, C]`` float32: the scores of the best bins that fit; likewise."""
    candidate_ids: torch.Tensor
    """``[S, C]`` int32"""


def scan_rows(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    penalized: tuple[torch.Tensor, SeenRows] | None,
    chunk: int,
    max_candidates: int,
    dependent: bool,
) -> RowScan:
    """Three launches over ``scores [S, V]``; ``chunk`` and ``max_candidates`` are powers of two, of 32 or more.

    Scores of rows with a repetition penalty are overwritten.
    """
    rows, vocab_size = scores.shape
    chunks = triton.cdiv(vocab_size, chunk)

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((rows, *shape), dtype=dtype, device=scores.device)

    scan = RowScan(
        best=empty(torch.float32, chunks),
        best_ids=empty(torch.int32, chunks),
        weights=empty(torch.float32, chunks),
        bins=empty(torch.int64, chunks, 2),
        masses=empty(torch.float32, chunks),
        candidates=empty(torch.float32, max_candidates),
        candidate_ids=empty(torch.int32, max_candidates),
    )
    stride, tile = scores.stride(0), next_power_of_2(chunks)
    options = {"CHUNK": chunk, "DEPENDENT": dependent, "num_warps": 4, "launch_pdl": dependent}
    penalty, seen = penalized or (None, None)
    _best_kernel[(rows, chunks)](
        scores,
        penalty,
        *((None,) * 3 if seen is None else (seen.words, seen.seats, seen.token_ids)),
        scan.best,
        scan.best_ids,
        stride,
        0 if seen is None else seen.words.stride(0),
        vocab_size,
        PENALIZED=seen is not None,
        **options,
    )
    filters = (temperature, top_k, top_p, min_p)
    _weigh_kernel[(rows, chunks)](
        scores, *filters, scan.best, scan.weights, scan.bins, stride, vocab_size, CHUNKS=tile, **options
    )
    _copy_kernel[(rows, chunks)](
        scores,
        *filters,
        scan.best,
        scan.bins,
        scan.masses,
        scan.candidates,
        scan.candidate_ids,
        stride,
        vocab_size,
        CHUNKS=tile,
        CANDIDATES=max_candidates,
        **options,
    )
    return scan


@triton.jit
def load_scores(source_ptr: tl.tensor, start: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """A block of scores: -inf for NaN and past the end, the largest float for +inf, no negative zero."""
    index = start + tl.arange(0, BLOCK)
    scores = tl.load(source_ptr + index, mask=index < size, other=float("-inf"))
    scores = tl.where(scores == scores, scores, float("-inf"))
    return tl.minimum(scores, 3.4028234663852886e38) + 0.0


@triton.jit
def has_filter(top_k_ptr: tl.tensor, top_p_ptr: tl.tensor, min_p_ptr: tl.tensor, row: tl.tensor) -> tl.tensor:
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    return (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def load_best(best_ptr: tl.tensor, chunks: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    """Each chunk's best score, ``[CHUNKS]``, of the row that begins here."""
    index = tl.arange(0, CHUNKS)
    return tl.load(best_ptr + index, mask=index < chunks, other=float("-inf"))


@triton.jit
def choose_bins(
    bins_ptr: tl.tensor, chunks: tl.tensor, CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The last bin up to which a row's tokens number at most ``CANDIDATES``, their number, and by chunk."""
    index = tl.arange(0, CHUNKS)
    low = tl.load(bins_ptr + 2 * index, mask=index < chunks, other=0)
    high = tl.load(bins_ptr + 2 * index + 1, mask=index < chunks, other=0)
    last_bin = -1
    chosen = tl.full([], 0, tl.int32)
    by_chunk = tl.zeros([CHUNKS], tl.int32)
    so_far = by_chunk
    for bin in tl.static_range(BINS):
        packed = low if bin < 4 else high
        so_far += ((packed >> (16 * (bin % 4))) & 0xFFFF).to(tl.int32)
        count = tl.sum(so_far, 0)
        fits = count <= CANDIDATES
        last_bin = tl.where(fits, bin, last_bin)
        chosen = tl.where(fits, count, chosen)
        by_chunk = tl.where(fits, so_far, by_chunk)
    return last_bin, chosen, by_chunk


@triton.jit
def _bin_of(scores: tl.tensor, best: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    return tl.minimum((best - scores) / temperature * (1.0 / BIN_WIDTH), BINS * 1.0).to(tl.int32)


@triton.jit
def _best_kernel(
    scores_ptr: tl.tensor,
    penalty_ptr: tl.tensor,
    words_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    best_ptr: tl.tensor,
    best_ids_ptr: tl.tensor,
    scores_stride: int,
    words_stride: int,
    vocab_size: int,
    PENALIZED: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * CHUNK
    scores = load_scores(scores_ptr + row * scores_stride, start, vocab_size, CHUNK)
    if PENALIZED:
        penalty = tl.load(penalty_ptr + row)
        if penalty != 1.0:
            words_ptr += tl.load(seats_ptr + row) * words_stride
            token_id = tl.load(token_ids_ptr + row)
            scores = _penalize(scores, penalty, words_ptr, token_id, start, vocab_size, CHUNK)
            index = start + tl.arange(0, CHUNK)
            tl.store(scores_ptr + row * scores_stride + index, scores, mask=index < vocab_size)
    best = tl.max(scores, 0)
    ids = tl.where(scores == best, start + tl.arange(0, CHUNK), 2147483647)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + place, best)
    tl.store(best_ids_ptr + place, tl.min(ids, 0))


@triton.jit
def _penalize(
    scores: tl.tensor,
    penalty: tl.tensor,
    words_ptr: tl.tensor,
    token_id: tl.tensor,
    start: tl.tensor,
    vocab_size: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """A chunk's scores after the penalty on tokens whose bits are set, and on ``token_id``, whose bit is set here.

    No other program reads the bits of this chunk's tokens.
    """
    index = start + tl.arange(0, CHUNK)
    words = tl.load(words_ptr + (index >> 5), mask=index < vocab_size, other=0)
    is_seen = (((words >> (index & 31)) & 1) != 0) | (index == token_id)
    if (token_id >= start) & (token_id < start + CHUNK):
        place = words_ptr + (token_id >> 5)
        bit = (tl.full([], 1, tl.int32) << (token_id & 31).to(tl.int32)).to(tl.int32)
        tl.store(place, tl.load(place) | bit)
    scores = tl.where(is_seen, tl.where(scores > 0, tl.div_rn(scores, penalty), scores * penalty), scores)
    return tl.minimum(scores, 3.4028234663852886e38)


@triton.jit
def _weigh_kernel(
    scores_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    best_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    bins_ptr: tl.tensor,
    scores_stride: int,
    vocab_size: int,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.num_programs(1)
    place = row * chunks + tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    best = tl.max(load_best(best_ptr + row * chunks, chunks, CHUNKS), 0)
    if (temperature == 0.0) | (best == float("-inf")):
        return
    scores = load_scores(scores_ptr + row * scores_stride, tl.program_id(1) * CHUNK, vocab_size, CHUNK)
    tl.store(weights_ptr + place, tl.sum(tl.exp((scores - best) / temperature), 0))
    if has_filter(top_k_ptr, top_p_ptr, min_p_ptr, row):
        bins = _bin_of(scores, best, temperature)
        shift = (16 * (bins & 3)).to(tl.int64)
        one = tl.full([CHUNK], 1, tl.int64) << shift
        is_score = scores > float("-inf")
        low = tl.sum(tl.where((bins < 4) & is_score, one, 0), 0)
        high = tl.sum(tl.where((bins >= 4) & (bins < BINS) & is_score, one, 0), 0)
        tl.store(bins_ptr + 2 * place, low)
        tl.store(bins_ptr + 2 * place + 1, high)


@triton.jit
def _copy_kernel(
    scores_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    best_ptr: tl.tensor,
    bins_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    candidate_ids_ptr: tl.tensor,
    scores_stride: int,
    vocab_size: int,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    temperature = tl.load(temperature_ptr + row)
    best = tl.max(load_best(best_ptr + row * chunks, chunks, CHUNKS), 0)
    if (temperature == 0.0) | (best == float("-inf")):
        return
    if has_filter(top_k_ptr, top_p_ptr, min_p_ptr, row):
        last_bin, _, by_chunk = choose_bins(bins_ptr + 2 * row * chunks, chunks, CHUNKS, CANDIDATES)
        index = tl.arange(0, CHUNKS)
        first = tl.sum(tl.where(index < chunk, by_chunk, 0), 0)
        start = chunk * CHUNK
        scores = load_scores(scores_ptr + row * scores_stride, start, vocab_size, CHUNK)
        chosen = (_bin_of(scores, best, temperature) <= last_bin) & (scores > float("-inf"))
        places = row * CANDIDATES + first + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(candidates_ptr + places, scores, mask=chosen)
        tl.store(candidate_ids_ptr + places, start + tl.arange(0, CHUNK), mask=chosen)
        weights = tl.where(chosen, tl.exp((scores - best) / temperature), 0.0)
        tl.store(masses_ptr + row * chunks + chunk, tl.sum(weights, 0))
