"""Token ids from logits on the GPU: temperature, top-k, top-p, min-p and one random number a row, no sort.

One program a row. The likeliest tokens, a few thousand at most, are first copied aside in the order of their
ids; if they provably hold everything the filters keep, all later passes read only those, else the whole row.
The score at which top-k and then top-p cut is found by bisection over the scores' bit patterns, each step
counting tokens or adding weights above a score: exact, and a few passes over little memory instead of a sort
of the vocabulary. The token is drawn by inverting the distribution function in the order of ids.

Knows nothing of requests, penalties or log-probabilities.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanochat.kernels.triton_utils import dependent_launch, enter

_BLOCK = 8192
"""Scores a program reads at once, and at most copies aside."""
_BINS = tl.constexpr(7)
_BIN_WIDTH = tl.constexpr(2.0)
"""Tokens are first binned by how far, in units of temperature, their score lies below the best: in bins of
this width, and beyond the last."""


def sample_tokens(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One token id a row of ``scores [S, V]`` float32: ``[S]`` int64.

    ``temperature``, ``top_p``, ``min_p`` ``[S]`` float32, ``top_k [S]`` int32, ``seeds``, ``positions`` ``[S]``
    int64. A temperature of 0 takes the best score. Top-k keeps the ``k`` best scores (0: all), then top-p the
    best of those before which less than a share ``top_p`` of their weight lies (1: all), then min-p those of at
    least ``min_p`` times the best one's probability. Among equal scores the lowest ids come first. NaN counts
    as -inf; a row with nothing above -inf gives 0. The random number is the double in [0, 1) that SplitMix64
    gives for the row's seed and position.

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
    candidates = torch.empty((rows, _BLOCK), dtype=torch.float32, device=scores.device)
    candidate_ids = torch.empty((rows, _BLOCK), dtype=torch.int32, device=scores.device)
    dependent = dependent_launch(scores.device)
    _sample_kernel[(rows,)](
        scores,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        token_ids,
        candidates,
        candidate_ids,
        scores.stride(0),
        vocab_size,
        BLOCK=_BLOCK,
        DEPENDENT=dependent,
        num_warps=16,
        launch_pdl=dependent,
    )
    return token_ids


@triton.jit
def _sample_kernel(
    scores_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    candidate_ids_ptr: tl.tensor,
    scores_stride: int,
    vocab_size: int,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * scores_stride
    candidates_ptr += row * BLOCK
    candidate_ids_ptr += row * BLOCK
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)

    best, best_id = _best_score(scores_ptr, vocab_size, BLOCK)
    if (temperature == 0.0) | (best == float("-inf")):
        tl.store(token_ids_ptr + row, best_id.to(tl.int64))
        return

    source_ptr = scores_ptr
    size = vocab_size
    is_copy = False
    total = tl.full([], 0.0, tl.float64)
    if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
        last_bin, count, total = _choose_candidates(scores_ptr, vocab_size, best, temperature, BLOCK)
        mass = _copy_candidates(
            scores_ptr, vocab_size, best, temperature, last_bin, candidates_ptr, candidate_ids_ptr, BLOCK
        )
        # The copy's stores must be seen by the loads of other threads.
        tl.debug_barrier()
        if top_k > 0:
            is_copy = top_k <= count
        elif top_p < 1.0:
            is_copy = (count > 0) & (mass >= top_p * total)
        else:
            is_copy = tl.exp(-(last_bin + 1) * _BIN_WIDTH) < min_p * 0.999
        if is_copy:
            source_ptr = candidates_ptr
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

    uniform = _uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    index = _draw(source_ptr, size, cut, ties, best, temperature, min_p, uniform, BLOCK)
    if is_copy:
        index = tl.load(candidate_ids_ptr + index)
    tl.store(token_ids_ptr + row, index.to(tl.int64))


@triton.jit
def _load_scores(source_ptr: tl.tensor, start: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """A block of scores: -inf for NaN and past the end, the largest float for +inf, no negative zero."""
    index = start + tl.arange(0, BLOCK)
    scores = tl.load(source_ptr + index, mask=index < size, other=float("-inf"))
    scores = tl.where(scores == scores, scores, float("-inf"))
    return tl.minimum(scores, 3.4028234663852886e38) + 0.0


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
def _best_score(scores_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The greatest score and the lowest id that has it; id 0 if all are -inf."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_start = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        scores = _load_scores(scores_ptr, start, size, BLOCK)
        best_start = tl.where(scores > best, start, best_start)
        best = tl.maximum(best, scores)
    greatest = tl.max(best, 0)
    ids = best_start + tl.arange(0, BLOCK)
    return greatest, tl.min(tl.where(best == greatest, ids, 2147483647), 0)


@triton.jit
def _bin_of(scores: tl.tensor, best: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    return tl.minimum((best - scores) / temperature * (1.0 / _BIN_WIDTH), _BINS * 1.0).to(tl.int32)


@triton.jit
def _choose_candidates(
    scores_ptr: tl.tensor, size: tl.tensor, best: tl.tensor, temperature: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The last bin up to which the tokens number at most ``BLOCK``, their number, and the row's weight."""
    # A byte for each bin: a lane counts one token a block, and no vocabulary has 255 blocks.
    counts = tl.zeros([BLOCK], tl.int64)
    weights = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        scores = _load_scores(scores_ptr, start, size, BLOCK)
        counts += tl.full([BLOCK], 1, tl.int64) << (8 * _bin_of(scores, best, temperature)).to(tl.int64)
        weights += tl.exp((scores - best) / temperature)
    last_bin = -1
    chosen = tl.full([], 0, tl.int32)
    count = tl.full([], 0, tl.int32)
    for index in tl.static_range(_BINS):
        count += tl.sum(((counts >> (8 * index)) & 255).to(tl.int32), 0)
        last_bin = tl.where(count <= BLOCK, index, last_bin)
        chosen = tl.where(count <= BLOCK, count, chosen)
    return last_bin, chosen, tl.sum(weights.to(tl.float64), 0)


@triton.jit
def _copy_candidates(
    scores_ptr: tl.tensor,
    size: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    last_bin: tl.tensor,
    candidates_ptr: tl.tensor,
    candidate_ids_ptr: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Copy the scores up to ``last_bin`` and their ids, in order; returns their weight."""
    copied = tl.full([], 0, tl.int32)
    weights = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        scores = _load_scores(scores_ptr, start, size, BLOCK)
        chosen = _bin_of(scores, best, temperature) <= last_bin
        count = tl.sum(chosen.to(tl.int32), 0)
        if count > 0:
            places = copied + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(candidates_ptr + places, scores, mask=chosen)
            tl.store(candidate_ids_ptr + places, start + tl.arange(0, BLOCK), mask=chosen)
            weights += tl.where(chosen, tl.exp((scores - best) / temperature), 0.0)
            copied += count
    return tl.sum(weights.to(tl.float64), 0)


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
        scores = _load_scores(source_ptr, start, size, BLOCK)
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
        scores = _load_scores(source_ptr, start, size, BLOCK)
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
        scores = _load_scores(source_ptr, start, size, BLOCK)
        weights, num_ties = _kept_weights(scores, at_cut, cut, ties, best, temperature, min_p)
        mass = tl.sum(weights, 0).to(tl.float64)
        if mass > 0.0:
            last_kept = start + tl.max(tl.where(weights > 0, offsets, 0), 0)
        if before + mass > target:
            sums = before + tl.cumsum(weights.to(tl.float64), 0)
            first = tl.min(tl.where((sums > target) & (weights > 0), offsets, BLOCK), 0)
            # By rounding, the running sum may fall short of the block's: then the last token it is.
            index = tl.where(first < BLOCK, start + first, last_kept)
        before += mass
        at_cut += num_ties
        start += BLOCK
    return tl.where(index >= 0, index, last_kept)


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
