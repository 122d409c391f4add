"""One forward pass and one sampling for a step's plan. Knows the model and its caches, not who waits.

Launching a step doesn't wait for it. What it samples stays on the device for the next step and is copied to
the host meanwhile, so that steps can follow each other without a word from the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nanochat.engine.batch import StepBatch, build_batch, has_pending_ids
from nanochat.engine.config import SamplingParams
from nanochat.engine.models.decoder import Decoder
from nanochat.engine.outputs import TokenLogprobs
from nanochat.engine.packing import HostCopies, upload
from nanochat.engine.request import Request
from nanochat.engine.sampler import SampledLogprobs, SampleOutput, sample
from nanochat.engine.scheduler import ScheduledChunk, StepPlan
from nanochat.engine.seats import Seats
from nanochat.engine.step_graphs import StepGraphs
from nanochat.kernels.cache import LayerCache

MAX_NUM_SEQS = 64
"""Requests that a runner knows at once, unless it is told."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry a sampling row, in plan order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class LaunchedStep:
    """A step on its way."""

    def __init__(self, plan: StepPlan, output: SampleOutput | None, rows: np.ndarray | None = None) -> None:
        """``output``, on the device, or None where nothing is sampled.

        ``rows``: which of its rows are the plan's sampling chunks', if not all in order.
        """
        self._plan = plan
        self._rows = rows
        self._has_logprobs = output is not None and output.logprobs is not None
        tensors = [] if output is None else [output.token_ids]
        if output is not None and output.logprobs is not None:
            tensors += [output.logprobs.chosen, output.logprobs.top_values, output.logprobs.top_ids]
        self._copies = HostCopies(tensors)

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`collect` would return at once."""
        return self._copies.are_ready

    def collect(self) -> StepResult:
        """Wait for the step, and bring what it sampled."""
        tensors = self._copies.wait()
        if not tensors:
            return StepResult([], [])
        ids = tensors[0].numpy()
        token_ids: list[int] = (ids if self._rows is None else ids[self._rows]).tolist()
        if not self._has_logprobs:
            return StepResult(token_ids, [None] * len(token_ids))
        return StepResult(token_ids, _logprob_rows(self._plan, token_ids, SampledLogprobs(*tensors[1:])))


class Runner:
    """Runs plans on one device, one after the other."""

    def __init__(
        self,
        decoder: Decoder,
        caches: list[LayerCache],
        graphs: StepGraphs | None = None,
        *,
        max_num_seqs: int = MAX_NUM_SEQS,
    ) -> None:
        """``graphs``, of the same decoder and caches, run the plans that fit them.

        ``max_num_seqs``: most requests that run at once.
        """
        self.decoder = decoder
        self._graphs = graphs
        self._caches = caches
        self._block_size = caches[0].block_size
        # By seat: the token that was sampled last. The next step finds it here before the host has heard of it.
        if graphs is not None:
            self._seats, self._last_ids = graphs.seats, graphs.last_ids
        else:
            self._seats = Seats(max_num_seqs)
            self._last_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=decoder.device)

    def run(self, plan: StepPlan) -> StepResult:
        """:meth:`launch`, and wait."""
        return self.launch(plan).collect()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start to compute the plan's tokens and to sample. Call under ``torch.inference_mode()``.

        Ids that earlier steps sample and the host doesn't know yet are taken from where those left them.
        """
        if self._graphs is not None and (shape := self._graphs.shapes.fit(plan)) is not None:
            token_ids, rows = self._graphs.run(plan, shape)
            return LaunchedStep(plan, SampleOutput(token_ids, None), rows)
        batch = build_batch(plan, self._block_size, self.decoder.device)
        seats = self._seat_rows(plan)
        num_decodes = len(plan.decodes)
        if has_pending_ids(plan):
            decode_ids, last_ids = batch.input_ids[:num_decodes], self._last_ids[seats[:num_decodes]]
            batch.input_ids[:num_decodes] = torch.where(decode_ids < 0, last_ids, decode_ids)
        hidden = self._forward(batch)
        if not plan.sampling:
            return LaunchedStep(plan, None)
        output = sample(self.decoder.compute_logits(hidden[batch.sample_rows]), batch.sampling)
        self._last_ids.scatter_(0, seats, output.token_ids)
        return LaunchedStep(plan, output)

    def hidden_states(self, plan: StepPlan) -> torch.Tensor:
        """Compute the plan's tokens without sampling: their final hidden states ``[T, hidden]``, decodes first.

        For whoever knows the tokens already and asks what the model thinks of them. Call under
        ``torch.inference_mode()``.
        """
        return self._forward(build_batch(plan, self._block_size, self.decoder.device))

    def warm_up(self, num_tokens: int = 1, num_rows: int = 1) -> None:
        """Run a step of so many tokens, split evenly over rows that all sample, through block 0 onwards.

        Pays first-call costs, and shows the peak of memory.
        """
        num_rows = min(num_rows, num_tokens)
        lengths = [num_tokens // num_rows + (row < num_tokens % num_rows) for row in range(num_rows)]
        num_blocks = self._caches[0].num_blocks
        chunks = []
        for length in lengths:
            table = [block % num_blocks for block in range(-(-length // self._block_size))]
            params = SamplingParams(temperature=1.0, top_p=0.9)
            request = Request(request_id=-1, token_ids=[0] * length, params=params, block_table=table)
            chunks.append(ScheduledChunk(request=request, start=0, length=length, samples=True))
        self.run(StepPlan(step=0, decodes=(), prefills=tuple(chunks), preempted=()))

    def _seat_rows(self, plan: StepPlan) -> torch.Tensor:
        """``[S]`` int64 on the device: the seat of each sampling row."""
        seats = np.array([seat.index for seat in self._seats.take(plan.sampling)], dtype=np.int64)
        return upload([seats], self.decoder.device)[0]

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        return self.decoder.forward(
            batch.input_ids, batch.positions, batch.slots, batch.attention, self._caches
        )


def _logprob_rows(
    plan: StepPlan, token_ids: list[int], logprobs: SampledLogprobs
) -> list[TokenLogprobs | None]:
    """What each sampling row asked for, from tensors on the host."""
    chosen = logprobs.chosen.tolist()
    top_values, top_ids = logprobs.top_values.tolist(), logprobs.top_ids.tolist()
    rows: list[TokenLogprobs | None] = []
    for row, chunk in enumerate(plan.sampling):
        wanted = chunk.request.params.logprobs
        if wanted is None:
            rows.append(None)
            continue
        top = tuple(zip(top_ids[row][:wanted], top_values[row][:wanted], strict=True))
        rows.append(TokenLogprobs(token_ids[row], chosen[row], top))
    return rows
