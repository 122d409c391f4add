"""One forward pass and one sampling for a step's plan. Knows the model and its caches, not who waits.

Launching a step doesn't wait for it. What it samples stays on the device for the next step and is copied to
the host meanwhile, so that steps can follow each other without a word from the host.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from nanochat.engine.batch import StepBatch, has_pending_ids, pack_batch, upload_batch
from nanochat.engine.config import SamplingParams
from nanochat.engine.device import is_out_of_memory
from nanochat.engine.models.decoder import Decoder
from nanochat.engine.outputs import TokenLogprobs
from nanochat.engine.packing import HostCopies, host_buffer, upload
from nanochat.engine.request import Request
from nanochat.engine.sampler import (
    SampledLogprobs,
    SampleOutput,
    SamplingBatch,
    sample,
    sample_together,
)
from nanochat.engine.scheduler import ScheduledChunk, StepPlan
from nanochat.engine.seats import Seats
from nanochat.engine.seen_tokens import SeenTokens
from nanochat.engine.step_graphs import StepGraphs
from nanochat.engine.step_message import PackedStep, RecordedStep
from nanochat.engine.step_programs import StepPrograms
from nanochat.errors import RankLost
from nanochat.kernels.cache import LayerCache

logger = logging.getLogger(__name__)

_POLL_S = 5e-5
"""How often a step that other ranks take part in is looked at while it is waited for."""
MAX_NUM_SEQS = 64
"""Requests that a runner knows at once, unless it is told."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry a sampling row, in plan order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class LaunchedStep:
    """A step on its way."""

    def __init__(
        self,
        plan: StepPlan,
        output: SampleOutput | None,
        rows: np.ndarray | None = None,
        check: Callable[[float], None] | None = None,
    ) -> None:
        """``output``, on the device, or None where nothing is sampled.

        ``rows``: which of its rows are the plan's sampling chunks', if not all in order. ``check``,
        given for how many seconds the step has been waited for, raises if it will never end, or has ended
        without a result.
        """
        self._plan = plan
        self._rows = rows
        self._check = check
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
        """Wait for the step, and bring what it sampled.

        Raises:
            RankLost: another rank is gone.
        """
        if self._check is not None:
            began_s = time.monotonic()
            while not self._copies.are_ready:
                self._check(time.monotonic() - began_s)
                time.sleep(_POLL_S)
            self._check(0.0)
        tensors = self._copies.wait()
        if not tensors:
            return StepResult([], [])
        ids = tensors[0].numpy()
        token_ids: list[int] = (ids if self._rows is None else ids[self._rows]).tolist()
        if not self._has_logprobs:
            return StepResult(token_ids, [None] * len(token_ids))
        return StepResult(token_ids, _logprob_rows(self._plan, token_ids, SampledLogprobs(*tensors[1:])))


class Followers(Protocol):
    """The other ranks of a divided model, which do what this one does."""

    def tell(self, step: PackedStep | RecordedStep) -> None:
        """Let them run a step, which this rank is about to run itself."""

    def check_step(self, num_tokens: int, waited_s: float) -> None:
        """Raise `RankLost` if any of them is gone, or a step of so many tokens hangs."""

    def give_up(self, error: Exception) -> RankLost:
        """A step that was told failed here: they are ended, and what to raise is returned."""


class Runner:
    """Runs plans on one device, one after the other.

    Of a divided model each rank has a runner. The first one's is given plans, and once it `lead` s, it tells
    the others', which `follow`.
    """

    def __init__(
        self,
        decoder: Decoder,
        caches: list[LayerCache],
        graphs: StepGraphs | None = None,
        programs: StepPrograms | None = None,
        *,
        max_num_seqs: int = MAX_NUM_SEQS,
    ) -> None:
        """``graphs`` or ``programs``, of the same decoder and caches, run the plans that fit them.

        ``max_num_seqs``: most requests that run at once.
        """
        self.decoder = decoder
        self._graphs = graphs
        self._programs = programs
        self._caches = caches
        self._block_size = caches[0].block_size
        self._followers: Followers | None = None
        # By seat: the token that was sampled last. The next step finds it here before the host has heard of it.
        if graphs is not None:
            self._seats, self._last_ids, self._seen = graphs.seats, graphs.last_ids, graphs.seen_tokens
        else:
            self._seats = Seats(max_num_seqs)
            self._last_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=decoder.device)
            self._seen = SeenTokens(max_num_seqs, decoder.config.vocab_size, decoder.device)

    @property
    def is_native(self) -> bool:
        """Whether steps run as native programs."""
        return self._programs is not None

    def run(self, plan: StepPlan) -> StepResult:
        """:meth:`launch`, and wait."""
        return self.launch(plan).collect()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start to compute the plan's tokens and to sample. Call under ``torch.inference_mode()``.

        Ids that earlier steps sample and the host doesn't know yet are taken from where those left them.
        """
        check: Callable[[float], None] | None = None
        if self._followers is not None:
            check = functools.partial(self._followers.check_step, plan.num_tokens)
        if any(chunk.request.params.repetition_penalty != 1 for chunk in plan.sampling):
            self._seen.take_in(plan.sampling, self._seats.take(plan.sampling))
        if self._graphs is not None and (shape := self._graphs.choose(plan)) is not None:
            host, rows = self._graphs.pack(plan, shape)
            with self._told(RecordedStep(shape, host.numpy())):
                token_ids = self._graphs.run(shape, host)
            return LaunchedStep(plan, SampleOutput(token_ids, None), rows, check)
        step = self._pack(plan)
        if self._programs is not None and self._programs.fits(step.batch):
            return LaunchedStep(plan, self._run_program(self._programs, step, plan))
        with self._told(step):
            sampling = SamplingBatch.from_chunks(plan.sampling, self.decoder.device)
            output = self._run(step, sampling)
        return LaunchedStep(plan, output, check=check)

    def lead(self, followers: Followers) -> None:
        """From now on, tell the other ranks of each step before it is run."""
        self._followers = followers

    def follow(self, step: PackedStep | RecordedStep) -> None:
        """Run a step that the first rank has told of. Call under ``torch.inference_mode()``."""
        if isinstance(step, PackedStep):
            self._run(step, None)
        elif self._graphs is not None:
            host = host_buffer(len(step.inputs), self.decoder.device)
            host.numpy()[:] = step.inputs
            self._graphs.run(step.shape, host)

    def record_ahead(self) -> bool:
        """Record a shape that came and may come again, if there is one; for when no step is to be run.

        Call under ``torch.inference_mode()``.
        """
        if self._graphs is None or (shape := self._graphs.next_unrecorded()) is None:
            return False
        host, _ = self._graphs.pack(StepPlan(0, (), (), ()), shape)
        try:
            with self._told(RecordedStep(shape, host.numpy())):
                self._graphs.run(shape, host)
        except RankLost:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                logger.info("no memory for steps of %s: %s", shape, error)
            else:
                logger.exception("steps of %s can't be recorded", shape)
            self._graphs.leave_out(shape)
        return True

    def hidden_states(self, plan: StepPlan) -> torch.Tensor:
        """Compute the plan's tokens without sampling: their final hidden states ``[T, hidden]``, decodes first.

        For whoever knows the tokens already and asks what the model thinks of them; not of a divided model,
        whose other ranks aren't told. Call under ``torch.inference_mode()``.
        """
        host = pack_batch(plan, self._block_size)
        return self._forward(upload_batch(host, len(plan.decodes), self.decoder.device))

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

    @contextmanager
    def _told(self, step: PackedStep | RecordedStep) -> Iterator[None]:
        """Inside, the other ranks run the step too; if it fails, they wait in vain for this one."""
        if self._followers is None:
            yield
            return
        self._followers.tell(step)
        try:
            yield
        except Exception as error:
            raise self._followers.give_up(error) from error

    def _pack(self, plan: StepPlan) -> PackedStep:
        seats = np.array([seat.index for seat in self._seats.take(plan.sampling)], dtype=np.int64)
        batch = pack_batch(plan, self._block_size)
        return PackedStep(batch, seats, len(plan.decodes), has_pending_ids(plan))

    def _run(self, step: PackedStep, sampling: SamplingBatch | None) -> SampleOutput | None:
        """Compute a step, and sample where it does; only the first rank needs to know how."""
        batch = upload_batch(step.batch, step.num_decodes, self.decoder.device)
        (seats,) = upload([step.seats], self.decoder.device)
        if step.has_pending_ids:
            decodes = slice(step.num_decodes)
            decode_ids, last_ids = batch.input_ids[decodes], self._last_ids[seats[decodes]]
            batch.input_ids[decodes] = torch.where(decode_ids < 0, last_ids, decode_ids)
        hidden = self._forward(batch)
        if not len(step.seats):
            return None
        logits = self.decoder.compute_logits(hidden[batch.sample_rows])
        if sampling is not None and sampling.any_penalty:
            sampling.seen = self._seen.rows(seats, batch.input_ids[batch.sample_rows])
        output = sample_together(logits, sampling, self.decoder.ranks)
        self._last_ids.scatter_(0, seats, output.token_ids)
        return output

    def _run_program(self, programs: StepPrograms, step: PackedStep, plan: StepPlan) -> SampleOutput | None:
        last_ids, ids = self._last_ids.numpy(), step.batch.input_ids
        if step.has_pending_ids:
            pending = np.flatnonzero(ids < 0)  # which only decodes have, and they come first
            ids[pending] = last_ids[step.seats[pending]]
        is_greedy = all(chunk.request.params.is_plainly_greedy for chunk in plan.sampling)
        logits, best = programs.run(step.batch, only_likeliest=is_greedy)
        if not len(step.seats):
            return None
        if is_greedy:
            output = SampleOutput(best.clone(), None)
        else:
            sampling = SamplingBatch.from_chunks(plan.sampling, self.decoder.device)
            if sampling.any_penalty:
                row_ids = torch.from_numpy(ids[step.batch.sample_rows])
                sampling.seen = self._seen.rows(torch.from_numpy(step.seats), row_ids)
            output = sample(logits, sampling)
        last_ids[step.seats] = output.token_ids.numpy()
        return output

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
