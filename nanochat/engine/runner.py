"""One forward pass and one sampling for a step's plan. Knows the model and its caches, not who waits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanochat.engine.batch import StepBatch, build_batch
from nanochat.engine.config import SamplingParams
from nanochat.engine.decode_graphs import DecodeGraphs, is_replayable
from nanochat.engine.models.decoder import Decoder
from nanochat.engine.outputs import TokenLogprobs
from nanochat.engine.request import Request
from nanochat.engine.sampler import SampleOutput, sample
from nanochat.engine.scheduler import ScheduledChunk, StepPlan
from nanochat.kernels.cache import LayerCache


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry a sampling row, in plan order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class Runner:
    """Runs plans on one device, synchronously."""

    def __init__(
        self, decoder: Decoder, caches: list[LayerCache], graphs: DecodeGraphs | None = None
    ) -> None:
        """``graphs``, of the same decoder and caches, run the plans that are replayable."""
        self.decoder = decoder
        self._graphs = graphs
        self._caches = caches
        self._block_size = caches[0].block_size

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens and sample. Call under ``torch.inference_mode()``."""
        if self._graphs is not None and is_replayable(plan):
            token_ids = self._graphs.run(plan).tolist()
            return StepResult(token_ids, [None] * len(token_ids))
        batch = build_batch(plan, self._block_size, self.decoder.device)
        hidden = self._forward(batch)
        if not plan.sampling:
            return StepResult([], [])
        logits = self.decoder.compute_logits(hidden[batch.sample_rows])
        return _collect(plan, sample(logits, batch.sampling))

    def hidden_states(self, plan: StepPlan) -> torch.Tensor:
        """Compute the plan's tokens without sampling: their final hidden states ``[T, hidden]``, decodes first.

        For whoever knows the tokens already and asks what the model thinks of them. Call under
        ``torch.inference_mode()``.
        """
        return self._forward(build_batch(plan, self._block_size, self.decoder.device))

    def warm_up(self, num_tokens: int = 1) -> None:
        """Run a prompt of this length through block 0 onwards: pays first-call costs, shows peak memory."""
        num_blocks = -(-num_tokens // self._block_size)
        request = Request(
            request_id=-1,
            token_ids=[0] * num_tokens,
            params=SamplingParams(temperature=1.0, top_p=0.9),
            block_table=[block % self._caches[0].num_blocks for block in range(num_blocks)],
        )
        chunk = ScheduledChunk(request=request, start=0, length=num_tokens, samples=True)
        self.run(StepPlan(step=0, decodes=(), prefills=(chunk,), preempted=()))

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        return self.decoder.forward(
            batch.input_ids, batch.positions, batch.slots, batch.attention, self._caches
        )


def _collect(plan: StepPlan, output: SampleOutput) -> StepResult:
    """Bring sampled ids (and what was asked of log-probabilities) to the host."""
    token_ids: list[int] = output.token_ids.tolist()
    if output.logprobs is None:
        return StepResult(token_ids, [None] * len(token_ids))
    chosen = output.logprobs.chosen.tolist()
    top_values, top_ids = output.logprobs.top_values.tolist(), output.logprobs.top_ids.tolist()
    rows: list[TokenLogprobs | None] = []
    for row, chunk in enumerate(plan.sampling):
        wanted = chunk.request.params.logprobs
        if wanted is None:
            rows.append(None)
            continue
        top = tuple(zip(top_ids[row][:wanted], top_values[row][:wanted], strict=True))
        rows.append(TokenLogprobs(token_ids[row], chosen[row], top))
    return StepResult(token_ids, rows)
