"""Logits to token ids: penalty, temperature, top-k, top-p, min-p, and one random number a row.

Random numbers are a hash of (seed, position), so a row's token follows from its own logits and parameters,
whatever else is in the batch and however often the step is repeated. Everything is vectorised over rows and
nothing is read back from a GPU. Knows nothing of models, text or schedules.

``S`` sampling rows, ``V`` vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from nanochat.engine.packing import upload
from nanochat.engine.parallel import Collectives
from nanochat.engine.request import Request
from nanochat.engine.step_plan import ScheduledChunk
from nanochat.kernels.native import library as native
from nanochat.kernels.native.ops import sample_tokens
from nanochat.kernels.seen import SeenRows, penalize_seen

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


class SamplingArrays(NamedTuple):
    """The ``[S]`` tensors of a `SamplingBatch`, still on the host."""

    seeds: np.ndarray
    positions: np.ndarray
    temperature: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    repetition_penalty: np.ndarray
    top_k: np.ndarray

    @classmethod
    def blank(cls, count: int) -> SamplingArrays:
        """Greedy entries."""
        dtypes = (np.int64, np.int64, np.float32, np.float32, np.float32, np.float32, np.int32)
        return cls(*(np.zeros(count, dtype=dtype) for dtype in dtypes))

    @classmethod
    def from_requests(cls, requests: Sequence[Request], positions: Sequence[int]) -> SamplingArrays:
        """One entry a request; ``positions``: the index of the token to be sampled."""
        params = [request.params for request in requests]
        return cls(
            seeds=np.array([request.sampling_seed for request in requests], dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            temperature=np.array([p.temperature for p in params], dtype=np.float32),
            top_p=np.array([p.top_p for p in params], dtype=np.float32),
            min_p=np.array([p.min_p for p in params], dtype=np.float32),
            repetition_penalty=np.array([p.repetition_penalty for p in params], dtype=np.float32),
            top_k=np.array([min(p.top_k, 2**31 - 1) for p in params], dtype=np.int32),
        )


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
    seen: SeenRows | None
    """What a repetition penalty is about; None: nobody has said so, and there is none."""
    all_greedy: bool
    any_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    any_penalty: bool
    num_logprobs: int | None
    """Most top log-probabilities that a row asks for; None: no row asks for any."""

    @classmethod
    def from_chunks(cls, chunks: Sequence[ScheduledChunk], device: torch.device) -> SamplingBatch:
        """One row a chunk, for the token after it."""
        positions = [chunk.start + chunk.length for chunk in chunks]
        return cls.from_requests([chunk.request for chunk in chunks], device, positions)

    @classmethod
    def from_requests(
        cls, requests: Sequence[Request], device: torch.device, positions: Sequence[int] | None = None
    ) -> SamplingBatch:
        """One row a request, copied to the device asynchronously. ``seen`` is left to whoever keeps it.

        ``positions``: the index of the token to be sampled; the request's next one if left out.
        """
        if positions is None:
            positions = [request.num_tokens for request in requests]
        host = SamplingArrays.from_requests(requests, positions)
        seeds, indices, temperature, top_p, min_p, penalty, top_k = upload(host, device)
        wanted = [logprobs for request in requests if (logprobs := request.params.logprobs) is not None]
        return cls(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=penalty,
            seeds=seeds,
            positions=indices,
            seen=None,
            all_greedy=bool((host.temperature == 0).all()),
            any_greedy=bool((host.temperature == 0).any()),
            any_top_k=bool(host.top_k.any()),
            any_top_p=bool((host.top_p < 1).any()),
            any_min_p=bool((host.min_p > 0).any()),
            any_penalty=bool((host.repetition_penalty != 1).any()),
            num_logprobs=max(wanted) if wanted else None,
        )


def sample(logits: torch.Tensor, batch: SamplingBatch) -> SampleOutput:
    """Choose one token a row from ``logits [S, V]`` float32, which a GPU overwrites where there is a penalty.

    The order is that of transformers: repetition penalty (positive logits of seen tokens divided, others
    multiplied), temperature, top-k, top-p within what top-k kept, min-p. A temperature of 0 takes the
    likeliest token after the penalty. Among equal logits the lowest id comes first. NaN counts as -inf; a
    row with nothing above -inf gives token 0.
    """
    if logits.device.type == "cpu":
        logits = _without_nan(logits)
        penalty = batch.repetition_penalty
        scores = logits if batch.seen is None else penalize_seen(logits, penalty, batch.seen)
        token_ids = _choose_on_cpu(scores, batch)
    else:
        scores, logits = logits, logits if batch.num_logprobs is None else _without_nan(logits)
        token_ids = _choose_on_gpu(scores, batch)
    if batch.num_logprobs is None:
        return SampleOutput(token_ids, None)
    return SampleOutput(token_ids, _logprobs(logits, token_ids, batch.num_logprobs))


def sample_together(logits: torch.Tensor, batch: SamplingBatch | None, ranks: Collectives) -> SampleOutput:
    """`sample` on the first rank, which alone has the logits and needs the batch; the ids on all of them."""
    if ranks.shard.rank == 0 and batch is not None:
        output = sample(logits, batch)
    else:
        token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        output = SampleOutput(token_ids, None)
    ranks.broadcast(output.token_ids)
    return output


def _choose_on_cpu(scores: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    if batch.all_greedy:
        return scores.max(dim=-1).indices
    return _draw_tokens(scores, batch) if native.find() is None else _draw_natively(scores, batch)


def _draw_natively(scores: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """`_draw_tokens`, which defines it; sums of other roundings, so that a draw between two tokens may differ."""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    return sample_tokens(
        scores, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seeds, batch.positions
    )


def _choose_on_gpu(scores: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Takes infinities and NaN as they come."""
    from nanochat.kernels.sampling import sample_tokens  # it needs Triton; a CPU does not

    return sample_tokens(
        scores,
        batch.temperature,
        batch.top_k,
        batch.top_p,
        batch.min_p,
        batch.seeds,
        batch.positions,
        None if batch.seen is None else (batch.repetition_penalty, batch.seen),
    )


def _without_nan(logits: torch.Tensor) -> torch.Tensor:
    """NaN as -inf and +inf as the largest float, so that differences of logits are numbers."""
    if logits.device.type == "cpu" and bool(torch.isfinite(logits.amax(dim=-1)).all()):
        return logits  # the greatest of a row with a NaN is NaN
    return logits.nan_to_num(nan=float("-inf"), neginf=float("-inf"))


def _draw_tokens(scores: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """``[S]`` token ids, drawn from ``scores [S, V]`` on the CPU; greedy rows take their best."""
    temperature = batch.temperature.unsqueeze(-1)
    if batch.any_greedy:
        temperature = torch.where(temperature > 0, temperature, 1.0)
    best = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    # Unnormalised probabilities, 1 for the best token; 0 for every token of a row of -inf.
    weights = (scores - best).div_(temperature).exp_()
    if batch.any_top_k or batch.any_top_p:
        weights.mul_(_in_top_k_and_p(scores, best, temperature, batch))
    if batch.any_min_p:
        weights.mul_(_at_least(weights, batch.min_p.unsqueeze(-1)))
    token_ids = _find_share(weights, uniforms(batch.seeds, batch.positions), right=True)
    if batch.any_greedy:
        token_ids = torch.where(batch.temperature > 0, token_ids, scores.max(dim=-1).indices)
    return token_ids


def _at_least(x: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """1.0 where ``x >= limit``, else 0.0. To multiply by it is far faster on a CPU than to choose by a bool."""
    return torch.ge(x, limit, out=torch.empty_like(x))


def _in_top_k_and_p(
    scores: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, batch: SamplingBatch
) -> torch.Tensor:
    """``[S, V]``: 1.0 for the tokens that top-k, and top-p within it, keep, 0.0 for the others.

    Only the scores are sorted, not the tokens with them: that is far faster, and a token's score tells
    whether it is kept, except among equals of the last score kept, where the lowest ids are.
    """
    vocab_size = scores.shape[1]
    # NumPy sorts floats with SIMD instructions: 25 times faster than torch for one row of 49,152.
    ascending = torch.from_numpy(np.sort(scores.contiguous().numpy(), axis=-1))
    top_k, top_p = batch.top_k.unsqueeze(-1), batch.top_p.unsqueeze(-1)
    count = torch.where(top_k > 0, top_k.long(), vocab_size).clamp(max=vocab_size)
    if batch.any_top_p:
        ranked = (ascending.flip(-1) - best).div_(temperature).exp_()
        if batch.any_top_k:
            ranked.mul_(torch.arange(vocab_size) < count)
        nucleus = _find_share(ranked, batch.top_p, right=False).unsqueeze(-1) + 1
        count = torch.where(top_p < 1, count.minimum(nucleus), count)
    last_score = ascending.gather(1, vocab_size - count)
    keep = _at_least(scores, last_score)
    num_above = vocab_size - torch.searchsorted(ascending, last_score, right=True)
    num_kept = vocab_size - torch.searchsorted(ascending, last_score)
    if bool((num_kept == count).all()):
        return keep
    equal = scores == last_score
    return keep.masked_fill_(equal & (equal.cumsum(dim=-1) > count - num_above), 0.0)


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


def _find_share(weights: torch.Tensor, share: torch.Tensor, *, right: bool) -> torch.Tensor:
    """The index in each row of ``weights [S, V]`` at which ``share [S]`` of its sum is reached.

    With ``right`` it must be exceeded, so that an index of weight 0 is never found, unless all are 0, which
    gives 0. First the block is found, then the index within it: a float64 running sum over all of ``V`` costs
    several times as much at a few rows, and a float32 one would favour some tokens by its rounding.
    """
    if weights.shape[1] % BLOCK:
        weights = F.pad(weights, (0, -weights.shape[1] % BLOCK))
    by_block = weights.unflatten(-1, (-1, BLOCK))
    block, rest = _search(by_block.sum(dim=-1).double(), share.double().unsqueeze(-1), right)
    within = by_block.gather(1, block.unsqueeze(-1).expand(-1, -1, BLOCK)).squeeze(1).double()
    index, _ = _search(within, rest, right)
    return (block * BLOCK + index).squeeze(-1)


def _search(masses: torch.Tensor, share: torch.Tensor, right: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index at which the running sum of ``masses [S, n]`` reaches ``share [S, 1]`` of their total.

    And the share of the mass there at which it does; both ``[S, 1]``.
    """
    sums = masses.cumsum(dim=-1)
    total = sums[:, -1:]
    # A share just below 1 may round to the total itself, which no sum exceeds.
    target = (share * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
    index = torch.where(total > 0, torch.searchsorted(sums, target, right=right), 0)
    mass = masses.gather(1, index)
    return index, ((target - sums.gather(1, index) + mass) / mass).clamp(0, 1)


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> SampledLogprobs:
    top_ids = logits.topk(min(count, logits.shape[1]), dim=-1).indices.sort(dim=-1).values
    order = logits.gather(1, top_ids).sort(dim=-1, descending=True, stable=True).indices
    top_ids = top_ids.gather(1, order)
    wanted = torch.cat((token_ids.unsqueeze(-1), top_ids), dim=-1)
    values = logits.gather(1, wanted) - logits.logsumexp(dim=-1, keepdim=True)
    values.nan_to_num_(nan=float("-inf"), neginf=float("-inf"))
    return SampledLogprobs(values[:, 0], values[:, 1:], top_ids)
