"""Logits to token ids: penalty, temperature, top-k, top-p, min-p, and one random number a row.

Random numbers are a hash of (seed, position), so a row's token follows from its own logits and parameters,
whatever else is in the batch and however often the step is repeated. Everything is vectorised over rows and
nothing is read back from a GPU. Knows nothing of models, text or schedules.

``S`` sampling rows, ``V`` vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from nanochat.engine.request import Request

CANDIDATES = (256, 4096)
"""On the CPU top-k, top-p and min-p first look at this many of the likeliest tokens, before they sort all."""
BLOCK = 128
"""Tokens whose weights are summed before the search for the drawn one."""


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Natural log-probabilities under the model's own distribution, before penalty and temperature."""

    chosen: torch.Tensor
    """``[S]`` float32."""
    top_values: torch.Tensor
    """``[S, n]`` float32, best first; equal ones by token id."""
    top_ids: torch.Tensor
    """``[S, n]`` int64."""


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """The sampled tokens, and log-probabilities if any row asked for them."""

    token_ids: torch.Tensor
    """``[S]`` int64."""
    logprobs: SampledLogprobs | None


@dataclass(slots=True)
class SamplingBatch:
    """How each row is to be sampled, on the device, and what the host knows of all rows together."""

    temperature: torch.Tensor
    """``[S]`` float32; 0 is greedy."""
    top_k: torch.Tensor
    """``[S]`` int32; 0 keeps all."""
    top_p: torch.Tensor
    """``[S]`` float32; 1 keeps all, 0 one token."""
    min_p: torch.Tensor
    """``[S]`` float32."""
    repetition_penalty: torch.Tensor
    """``[S]`` float32."""
    seeds: torch.Tensor
    """``[S]`` int64."""
    positions: torch.Tensor
    """``[S]`` int64: index, in its sequence, of the token to be sampled."""
    penalty_tokens: torch.Tensor | None
    """``[2, P]`` int64: row and id of each distinct token of a row with a penalty; None: no such row."""
    all_greedy: bool
    any_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    num_logprobs: int | None
    """Most top log-probabilities that a row asks for; None: no row asks for any."""

    @property
    def any_filter(self) -> bool:
        return self.any_top_k or self.any_top_p or self.any_min_p

    @classmethod
    def from_requests(cls, requests: Sequence[Request], device: torch.device) -> SamplingBatch:
        """One row a request, for its next token; copied to the device asynchronously."""
        params = [request.params for request in requests]
        size = len(requests)
        # One copy carries all: two int64, four float32 and one int32 a row.
        host = torch.empty(size * 36, dtype=torch.uint8, pin_memory=device.type == "cuda")
        longs = host[: size * 16].view(torch.int64).view(2, size).numpy()
        floats = host[size * 16 : size * 32].view(torch.float32).view(4, size).numpy()
        ints = host[size * 32 :].view(torch.int32).numpy()
        longs[0] = [request.sampling_seed for request in requests]
        longs[1] = [request.num_tokens for request in requests]
        floats[0] = [p.temperature for p in params]
        floats[1] = [p.top_p for p in params]
        floats[2] = [p.min_p for p in params]
        floats[3] = [p.repetition_penalty for p in params]
        ints[:] = [min(p.top_k, 2**31 - 1) for p in params]
        on_device = host.to(device, non_blocking=True)
        seeds, positions = on_device[: size * 16].view(torch.int64).view(2, size)
        temperature, top_p, min_p, penalty = (
            on_device[size * 16 : size * 32].view(torch.float32).view(4, size)
        )
        greedy = floats[0] == 0
        wanted = [p.logprobs for p in params if p.logprobs is not None]
        return cls(
            temperature=temperature,
            top_k=on_device[size * 32 :].view(torch.int32),
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=penalty,
            seeds=seeds,
            positions=positions,
            penalty_tokens=_penalty_tokens(requests, device),
            all_greedy=bool(greedy.all()),
            any_greedy=bool(greedy.any()),
            any_top_k=bool(ints.any()),
            any_top_p=bool((floats[1] < 1).any()),
            any_min_p=bool((floats[2] > 0).any()),
            num_logprobs=max(wanted) if wanted else None,
        )


def _penalty_tokens(requests: Sequence[Request], device: torch.device) -> torch.Tensor | None:
    rows, ids = [], []
    for row, request in enumerate(requests):
        if request.params.repetition_penalty != 1:
            seen = np.unique(np.array(request.token_ids, dtype=np.int64))
            rows.append(np.full_like(seen, row))
            ids.append(seen)
    if not ids:
        return None
    pairs = torch.from_numpy(np.stack([np.concatenate(rows), np.concatenate(ids)]))
    return pairs.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else pairs


def sample(logits: torch.Tensor, batch: SamplingBatch) -> SampleOutput:
    """Choose one token a row from ``logits [S, V]`` float32, which are left as they are.

    The order is that of transformers: repetition penalty (positive logits of seen tokens divided, others
    multiplied), temperature, top-k, top-p within what top-k kept, min-p. A temperature of 0 takes the
    likeliest token after the penalty. Among equal logits the lowest id comes first. NaN counts as -inf; a
    row with nothing above -inf gives token 0.
    """
    logits = _without_nan(logits)
    scores = logits if batch.penalty_tokens is None else _penalize(logits, batch)
    token_ids = scores.max(dim=-1).indices if batch.all_greedy else _draw_tokens(scores, batch)
    if batch.num_logprobs is None:
        return SampleOutput(token_ids, None)
    return SampleOutput(token_ids, _logprobs(logits, token_ids, batch.num_logprobs))


def _without_nan(logits: torch.Tensor) -> torch.Tensor:
    """NaN as -inf and +inf as the largest float, so that differences of logits are numbers."""
    if logits.device.type == "cpu" and bool(torch.isfinite(logits.amax(dim=-1)).all()):
        return logits  # the greatest of a row with a NaN is NaN
    return logits.nan_to_num(nan=float("-inf"), neginf=float("-inf"))


def _penalize(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    if batch.penalty_tokens is None:
        return logits
    rows, ids = batch.penalty_tokens
    seen = logits[rows, ids]
    penalty = batch.repetition_penalty[rows]
    return logits.index_put((rows, ids), torch.where(seen > 0, seen / penalty, seen * penalty))


def _draw_tokens(scores: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """``[S]`` token ids, drawn from ``scores [S, V]``; greedy rows take their best."""
    best, best_ids = scores.max(dim=-1, keepdim=True)
    temperature = batch.temperature.unsqueeze(-1)
    if batch.any_greedy:
        temperature = torch.where(temperature > 0, temperature, 1.0)
    # Unnormalised probabilities, 1 for the best token; 0 for every token of a row of -inf.
    weights = (scores - best.clamp(min=torch.finfo(best.dtype).min)).div_(temperature).exp_()
    uniform = uniforms(batch.seeds, batch.positions)
    if not batch.any_filter:
        token_ids = _draw(weights, uniform)
    elif scores.device.type == "cpu":
        token_ids = _draw_filtered_cpu(scores, weights, uniform, batch)
    else:
        token_ids, _ = _draw_filtered(scores, weights, uniform, batch, scores.shape[1])
    if batch.any_greedy:
        token_ids = torch.where(batch.temperature > 0, token_ids, best_ids.squeeze(-1))
    return token_ids


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A float64 in [0, 1) for each ``(seed, position)``, both ``[S]`` int64: the same on every device.

    The seed, mixed, is the state of a SplitMix64 generator, and the position says which of its numbers to
    take (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    state = _mix(seeds) + (positions + 1) * _signed(0x9E3779B97F4A7C15)
    return _shift_right(_mix(state), 11).double() * 2.0**-53


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Of int64 as if unsigned: torch shifts the sign in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the bits of this uint64."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index in each row of ``weights [S, n]`` at which the share ``uniform [S]`` of its sum is passed.

    Sums are float64: in float32 the rounding of a long running sum would favour some tokens. An index of
    weight 0 is never drawn, unless all are 0, which gives index 0.
    """
    if weights.shape[1] % BLOCK:
        weights = F.pad(weights, (0, -weights.shape[1] % BLOCK))
    by_block = weights.unflatten(-1, (-1, BLOCK))
    block_sums = by_block.sum(dim=-1, dtype=torch.float64)
    block, rest = _search(block_sums, uniform.unsqueeze(-1) * block_sums.sum(dim=-1, keepdim=True))
    within = by_block.gather(1, block.unsqueeze(-1).expand(-1, -1, BLOCK)).squeeze(1).double()
    index, _ = _search(within, rest)
    return (block * BLOCK + index).squeeze(-1)


def _search(masses: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index whose running sum of ``masses [S, n]`` exceeds ``target [S, 1]``, and what was left.

    Both ``[S, 1]``. Rounding may put the target at the total or below 0, where it has no business.
    """
    sums = masses.cumsum(dim=-1)
    total = sums[:, -1:]
    target = target.clamp(min=0).minimum(torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(sums, target, right=True)
    index = torch.where(total > 0, index, 0)
    return index, target - (sums.gather(1, index) - masses.gather(1, index))


def _draw_filtered_cpu(
    scores: torch.Tensor, weights: torch.Tensor, uniform: torch.Tensor, batch: SamplingBatch
) -> torch.Tensor:
    """`_draw_filtered` on as few candidates as each row allows; unfiltered rows draw from all tokens."""
    filtered = (batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)
    filtered &= batch.temperature > 0
    rows = filtered.nonzero().squeeze(-1)
    token_ids = _draw(weights, uniform) if rows.numel() < filtered.numel() else torch.empty_like(rows)
    vocab_size = scores.shape[1]
    for size in (*(n for n in CANDIDATES if n < vocab_size), vocab_size):
        if rows.numel() == 0:
            break
        all_rows = rows.numel() == filtered.numel()
        drawn, certain = _draw_filtered(
            scores if all_rows else scores[rows],
            weights if all_rows else weights[rows],
            uniform[rows],
            batch,
            size,
            rows,
        )
        token_ids[rows[certain]] = drawn[certain]
        rows = rows[~certain]
    return token_ids


def _draw_filtered(
    scores: torch.Tensor,
    weights: torch.Tensor,
    uniform: torch.Tensor,
    batch: SamplingBatch,
    size: int,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from what top-k, top-p and min-p leave of the ``size`` best tokens.

    ``scores``, ``weights`` ``[r, V]`` and ``uniform [r]`` of the batch's ``rows [r]`` (None: all). Returns
    token ids ``[r]`` and ``certain [r]`` bool: False where more tokens might have been kept.
    """
    top_k, top_p, min_p = (
        x.unsqueeze(-1) if rows is None else x[rows].unsqueeze(-1)
        for x in (batch.top_k, batch.top_p, batch.min_p)
    )
    vocab_size = scores.shape[1]
    ids, order = _candidates(scores, size)
    by_id = weights if ids is None else weights.gather(1, ids)
    ranked = by_id.gather(1, order)  # best first
    keep = torch.arange(size, device=scores.device) < torch.where(top_k > 0, top_k, vocab_size)
    if batch.any_top_p:
        keep &= _in_nucleus(ranked, weights, top_k, top_p)
    if batch.any_min_p:
        keep &= ranked >= min_p * ranked[:, :1]
    keep[:, 0] = True
    kept = torch.where(torch.zeros_like(keep).scatter(1, order, keep), by_id, 0.0)
    index = _draw(kept, uniform)
    token_ids = index if ids is None else ids.gather(1, index.unsqueeze(-1)).squeeze(-1)
    if size == vocab_size:
        return token_ids, torch.ones_like(uniform, dtype=torch.bool)
    # Something was dropped, and nothing as good as the last kept token was left out.
    by_score = scores if ids is None else scores.gather(1, ids)
    ranked_scores = by_score.gather(1, order)
    last_kept = ranked_scores.gather(1, keep.sum(dim=-1, keepdim=True) - 1)
    return token_ids, ((last_kept > ranked_scores[:, -1:]) & (top_k < size)).squeeze(-1)


def _candidates(scores: torch.Tensor, size: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The ``size`` best tokens: their ids ``[S, size]`` ascending (None: all), and which is best, second...

    ``order [S, size]`` indexes the ids; equal scores are in the order of their ids.
    """
    if size == scores.shape[1]:
        return None, scores.sort(dim=-1, descending=True, stable=True).indices
    ids = scores.topk(size, dim=-1, sorted=False).indices.sort(dim=-1).values
    return ids, scores.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices


def _in_nucleus(
    ranked: torch.Tensor, weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Which of ``ranked [r, n]`` come before the share ``top_p`` is reached: of top-k's mass, or of all."""
    sums = ranked.cumsum(dim=-1, dtype=torch.float64)
    all_mass = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    last = (top_k.long() - 1).clamp(min=0, max=ranked.shape[1] - 1)
    mass = torch.where(top_k > 0, sums.gather(1, last), all_mass)
    return (sums - ranked < top_p * mass) | (top_p >= 1)


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> SampledLogprobs:
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    count = min(count, logits.shape[1])
    ids, order = _candidates(logits, count)
    top_ids = order if ids is None else ids.gather(1, order)
    wanted = torch.cat((token_ids.unsqueeze(-1), top_ids), dim=-1)
    values = (logits.gather(1, wanted) - normaliser).nan_to_num(nan=float("-inf"), neginf=float("-inf"))
    return SampledLogprobs(values[:, 0], values[:, 1:], top_ids)
