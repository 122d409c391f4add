"""Token ids from logits on the GPU: temperature, top-k, top-p, min-p and one random number a row, no sort.

What must read the whole row is shared among many programs (`sampling_scan`), then one program a row chooses. For
rows with filters the likeliest tokens, a few thousand at most, were copied aside in the order of their ids; if
they provably hold everything the filters keep, all passes read only those, else the whole row.
The score at which top-k and then top-p cut is found by bisection over the scores' bit patterns, each step
counting tokens or adding weights above a score: exact, and a few passes over little memory instead of a sort
of the vocabulary. The token is drawn by inverting the distribution function in the order of ids.

Knows nothing of requests or log-probabilities.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanochat.kernels.sampling_scan import (
    BIN_WIDTH,
    choose_bins,
    has_filter,
    load_best,
    load_scores,
    scan_rows,
)
from nanochat.kernels.seen import SeenRows
from nanochat.kernels.triton_utils import dependent_launch, enter, next_power_of_2

_BLOCK = 8192
"""Scores a row's program reads at once, and at most finds copied aside."""
_CHUNK = 2048
"""Scores a program that shares a row reads."""


def sample_tokens(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    penalized: tuple[torch.Tensor, SeenRows] | None = None,
) -> torch.Tensor:
    """One token id a row of ``scores [S, V]`` float32: ``[S]`` int64.

    ``temperature``, ``top_p``, ``min_p`` ``[S]`` float32, ``top_k [S]`` int32, ``seeds``, ``positions`` ``[S]``
    int64. A temperature of 0 takes the best score. Top-k keeps the ``k`` best scores (0: all), then top-p the
    best of those before which less than a share ``top_p`` of their weight lies (1: all), then min-p those of at
    least ``min_p`` times the best one's probability. Among equal scores the lowest ids come first. NaN counts
    as -inf; a row with nothing above -inf gives 0. The random number is the double in [0, 1) that SplitMix64
    gives for the row's seed and position.

    ``penalized``: a repetition penalty ``[S]`` float32 and what it is about, applied first, as
    `nanochat.kernels.seen.penalize_seen` defines it. Scores of rows whose penalty isn't 1 are overwritten.

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride or device.
    """
    rows, vocab_size = scores.shape
    if scores.dtype != torch.float32 or scores.stride(1) != 1:
        raise ValueError(
            f"scores must be float32 and dense in its last dim; it is {scores.dtype} {scores.stride()}"
        )
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
        *_penalty_columns(penalized),
    ):
        if (
            tensor.dtype != dtype
            or tensor.shape != (rows,)
            or tensor.device != scores.device
            or tensor.stride(0) != 1
        ):
            raise ValueError(
                f"{name} must be dense {dtype} of shape [{rows}] on {scores.device}; "
                f"it is {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )
    token_ids = torch.empty(rows, dtype=torch.int64, device=scores.device)
    dependent = dependent_launch(scores.device)
    scan = scan_rows(
        scores,
        temperature,
        top_k,
        top_p,
        min_p,
        penalized=penalized,
        chunk=_CHUNK,
        max_candidates=_BLOCK,
        dependent=dependent,
    )
    chunks = scan.best.shape[1]
    _choose_kernel[(rows,)](
        scores,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        token_ids,
        scan.best,
        scan.best_ids,
        scan.weights,
        scan.bins,
        scan.masses,
        scan.candidates,
        scan.candidate_ids,
        scores.stride(0),
        vocab_size,
        chunks,
        CHUNKS=next_power_of_2(chunks),
        CHUNK=_CHUNK,
        BLOCK=_BLOCK,
        DEPENDENT=dependent,
        num_warps=16,
        launch_pdl=dependent,
    )
    return token_ids


def _penalty_columns(
    penalized: tuple[torch.Tensor, SeenRows] | None,
) -> list[tuple[str, torch.Tensor, torch.dtype]]:
    if penalized is None:
        return []
    penalty, seen = penalized
    return [
        ("penalty", penalty, torch.float32),
        ("seats", seen.seats, torch.int64),
        ("token_ids", seen.token_ids, torch.int64),
    ]


@triton.jit
def _choose_kernel(
    scores_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    best_ptr: tl.tensor,
    best_ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    bins_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    candidate_ids_ptr: tl.tensor,
    scores_stride: int,
    vocab_size: int,
    chunks: int,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * scores_stride
    temperature = tl.load(temperature_ptr + row)
    index = tl.arange(0, CHUNKS)
    bests = load_best(best_ptr + row * chunks, chunks, CHUNKS)
    best_ids = tl.load(best_ids_ptr + row * chunks + index, mask=index < chunks, other=0)
    best = tl.max(bests, 0)
    if (temperature == 0.0) | (best == float("-inf")):
        # Chunks' ids ascend, so the lowest of equals is the lowest of all; if all are -inf, it is 0.
        tl.store(token_ids_ptr + row, tl.min(tl.where(bests == best, best_ids, 2147483647), 0).to(tl.int64))
        return

    uniform = _uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    masses = tl.load(weights_ptr + row * chunks + index, mask=index < chunks, other=0.0).to(tl.float64)
    if not has_filter(top_k_ptr, top_p_ptr, min_p_ptr, row):
        sums = tl.cumsum(masses, 0)
        target = uniform * tl.max(sums, 0)
        # A target that rounding has put at the end belongs to the last chunk that weighs anything.
        chunk = tl.min(tl.where(sums > target, index, CHUNKS), 0)
        last = tl.max(tl.where(masses > 0.0, index, 0), 0)
        chunk = tl.minimum(chunk, last)
        before = tl.sum(tl.where(index < chunk, masses, 0.0), 0)
        scores = load_scores(scores_ptr, chunk * CHUNK, vocab_size, CHUNK)
        weights = tl.exp((scores - best) / temperature)
        place = _find(weights, before, target, CHUNK)
        tl.store(token_ids_ptr + row, (chunk * CHUNK + place).to(tl.int64))
        return

    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    total = tl.sum(masses, 0)
    last_bin, count, _ = choose_bins(bins_ptr + 2 * row * chunks, chunks, CHUNKS, BLOCK)
    copied = tl.load(masses_ptr + row * chunks + index, mask=index < chunks, other=0.0)
    if top_k > 0:
        is_copy = top_k <= count
    elif top_p < 1.0:
        is_copy = (count > 0) & (tl.sum(copied.to(tl.float64), 0) >= top_p * total)
    else:
        is_copy = tl.exp(-(last_bin + 1) * BIN_WIDTH) < min_p * 0.999
    source_ptr = scores_ptr
    size = vocab_size
    if is_copy:
        source_ptr = candidates_ptr + row * BLOCK
        size = count

    # Tokens above the cut are kept, and the first `ties` of those at the cut.
    cut = tl.full([], -(2**31), tl.int64)
    ties = vocab_size
    if (top_k > 0) & (top_k < vocab_size):
        cut = _bisect(source_ptr, size, cut, best, temperature, top_k.to(tl.float64), True, BLOCK)
        above, mass_above = _above(source_ptr, size, cut, best, temperature, BLOCK)
        ties = top_k - above
        total = mass_above + ties * tl.exp((_score_of(cut) - best) / temperature)
    if top_p < 1.0:
        target = top_p * total
        top_k_cut = cut
        cut = _bisect(source_ptr, size, cut, best, temperature, target, False, BLOCK)
        above, mass_above = _above(source_ptr, size, cut, best, temperature, BLOCK)
        weight = tl.exp((_score_of(cut) - best) / temperature).to(tl.float64)
        needed = tl.maximum(tl.ceil((target - mass_above) / weight), 1.0)
        needed = tl.minimum(needed, vocab_size * 1.0).to(tl.int32)
        ties = tl.where(cut == top_k_cut, tl.minimum(ties, needed), needed)

    token_id = _draw(source_ptr, size, cut, ties, best, temperature, min_p, uniform, BLOCK)
    if is_copy:
        token_id = tl.load(candidate_ids_ptr + row * BLOCK + token_id)
    tl.store(token_ids_ptr + row, token_id.to(tl.int64))


@triton.jit
def _key_of(score: tl.tensor) -> tl.tensor:
    """An int32 that orders as the float32 does."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score_of(key: tl.tensor) -> tl.tensor:
    """The float32 of a key held as int64."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _above(
    source_ptr: tl.tensor,
    size: tl.tensor,
    key: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """How many scores lie above the key's, and their weight."""
    counts = tl.zeros([BLOCK], tl.int32)
    weights = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        scores = load_scores(source_ptr, start, size, BLOCK)
        above = _key_of(scores) > key
        counts += above.to(tl.int32)
        weights += tl.where(above, tl.exp((scores - best) / temperature), 0.0)
    return tl.sum(counts, 0), tl.sum(weights.to(tl.float64), 0)


@triton.jit
def _bisect(
    source_ptr: tl.tensor,
    size: tl.tensor,
    low: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    target: tl.tensor,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The least key, at least ``low``, above which lies less than ``target``: of tokens, or of weight."""
    high = _key_of(best).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        count, mass = _above(source_ptr, size, middle, best, temperature, BLOCK)
        amount = count.to(tl.float64) if COUNTED else mass
        if amount < target:
            high = middle
        else:
            low = middle + 1
    return high


@triton.jit
def _kept_weights(
    scores: tl.tensor,
    ties_before: tl.tensor,
    cut: tl.tensor,
    ties: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Weights of a block, 0 where the filters drop a token, and the number of its tokens at the cut."""
    weights = tl.exp((scores - best) / temperature)
    num_ties = tl.full([], 0, tl.int32)
    if cut > -(2**31):
        keys = _key_of(scores)
        at_cut = (keys == cut).to(tl.int32)
        num_ties = tl.sum(at_cut, 0)
        weights = tl.where(keys >= cut, weights, 0.0)
        if ties_before + num_ties > ties:
            rank = ties_before + tl.cumsum(at_cut, 0)
            weights = tl.where((keys == cut) & (rank > ties), 0.0, weights)
    return tl.where(weights >= min_p, weights, 0.0), num_ties


@triton.jit
def _draw(
    source_ptr: tl.tensor,
    size: tl.tensor,
    cut: tl.tensor,
    ties: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    uniform: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The index at which a share ``uniform`` of the kept weight is passed."""
    all_weights = tl.zeros([BLOCK], tl.float32)
    at_cut = tl.full([], 0, tl.int32)
    for start in range(0, size, BLOCK):
        scores = load_scores(source_ptr, start, size, BLOCK)
        weights, num_ties = _kept_weights(scores, at_cut, cut, ties, best, temperature, min_p)
        all_weights += weights
        at_cut += num_ties
    target = uniform * tl.sum(all_weights.to(tl.float64), 0)
    before = tl.full([], 0.0, tl.float64)
    at_cut = tl.full([], 0, tl.int32)
    start = 0
    index = -1
    last_kept = 0
    offsets = tl.arange(0, BLOCK)
    while (index < 0) & (start < size):
        scores = load_scores(source_ptr, start, size, BLOCK)
        weights, num_ties = _kept_weights(scores, at_cut, cut, ties, best, temperature, min_p)
        mass = tl.sum(weights, 0).to(tl.float64)
        if mass > 0.0:
            last_kept = start + tl.max(tl.where(weights > 0, offsets, 0), 0)
        if before + mass > target:
            index = start + _find(weights, before, target, BLOCK)
        before += mass
        at_cut += num_ties
        start += BLOCK
    return tl.where(index >= 0, index, last_kept)


@triton.jit
def _find(weights: tl.tensor, before: tl.tensor, target: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The first of a block at which ``before`` and the weights so far exceed ``target``.

    By rounding, they may fall short of a sum over the block that does: then the last of any weight it is.
    """
    offsets = tl.arange(0, BLOCK)
    sums = before + tl.cumsum(weights.to(tl.float64), 0)
    first = tl.min(tl.where((sums > target) & (weights > 0), offsets, BLOCK), 0)
    last_kept = tl.max(tl.where(weights > 0, offsets, 0), 0)
    return tl.where(first < BLOCK, first, last_kept)


@triton.jit
def _mix(z: tl.tensor) -> tl.tensor:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """SplitMix64's number ``position`` from the mixed seed, as a double in [0, 1) (Steele et al., 2014)."""
    state = _mix(seed.to(tl.uint64)) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    return (_mix(state) >> 11).to(tl.float64) * 1.1102230246251565e-16
