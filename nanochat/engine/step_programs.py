"""Steps on a CPU as native programs: the model's code runs once, and its operations from then on in one call.

What `step_graphs` is to a GPU. One recording serves every step of up to `FEW_TOKENS` tokens and another all larger
ones, because how many there are is read when it runs. Knows nothing of schedules or sampling.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from nanochat import kernels
from nanochat.engine.batch import HostBatch
from nanochat.engine.models.decoder import Decoder
from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.native import ops
from nanochat.kernels.native.library import MAX_FEW_ROWS, Library
from nanochat.kernels.native.program import Arena, Counter, NotNative, Program

logger = logging.getLogger(__name__)

FEW_TOKENS = MAX_FEW_ROWS
"""Larger steps have a recording of their own, with the kernels for many rows."""
MAX_TOKENS = 2048
"""Still larger steps are computed op by op with PyTorch. Memory is taken only for tokens that come."""


class StepPrograms:
    """A decoder's recorded steps on the CPU, from token ids to logits."""

    def __init__(
        self,
        decoder: Decoder,
        caches: list[LayerCache],
        library: Library,
        max_model_len: int,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        """Records at once. Call under ``torch.inference_mode()``.

        Raises:
            NotNative: something that this model computes has no native version.
        """
        width = -(-max_model_len // caches[0].block_size)
        self._few = _Recording(decoder, caches, library, FEW_TOKENS, width)
        self._many: _Recording | None = None
        if max_tokens > FEW_TOKENS:
            try:
                self._many = _Recording(decoder, caches, library, min(max_tokens, MAX_TOKENS), width)
            except NotNative as reason:
                logger.info("steps of many tokens are not native: %s", reason)

    def fits(self, host: HostBatch) -> bool:
        """Whether a step of these tokens can be run."""
        return self._fitting(host) is not None

    def run(self, host: HostBatch, *, only_likeliest: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the rows that sample, logits ``[S, vocab]`` float32 and the likeliest token ``[S]`` int64.

        With ``only_likeliest`` logits of tokens that can't be it may be rough. The next run overwrites them. K and V are
        stored. Only steps that fit.
        """
        recording = self._fitting(host)
        if recording is None:
            raise ValueError(f"a step of {len(host.input_ids)} tokens has no recording")
        return recording.run(host, only_likeliest)

    def _fitting(self, host: HostBatch) -> _Recording | None:
        if self._few.fits(host):
            return self._few
        return self._many if self._many is not None and self._many.fits(host) else None


class _Recording:
    """A step of up to ``max_tokens`` tokens."""

    def __init__(
        self, decoder: Decoder, caches: list[LayerCache], library: Library, max_tokens: int, table_width: int
    ) -> None:
        self._decoder = decoder
        self._caches = caches
        self._library = library
        self._arena = Arena()
        self._inputs = HostBatch(
            input_ids=np.zeros(max_tokens, np.int64),
            positions=np.zeros(max_tokens, np.int64),
            slots=np.full(max_tokens, -1, np.int64),
            block_tables=np.zeros((max_tokens, table_width), np.int32),
            context_lens=np.zeros(max_tokens, np.int32),
            query_starts=np.zeros(max_tokens + 1, np.int32),
            sample_rows=np.zeros(MAX_FEW_ROWS, np.int64),
        )
        self._num_tokens, self._num_rows = Counter(max_tokens), Counter(max_tokens)
        self._num_samples = Counter(MAX_FEW_ROWS)
        self._record(1)

    def fits(self, host: HostBatch) -> bool:
        """Whether there is room for a step's tokens, and for those that sample."""
        return len(host.input_ids) <= self._num_tokens.most and len(host.sample_rows) <= MAX_FEW_ROWS

    def run(self, host: HostBatch, only_likeliest: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StepPrograms.run`."""
        if host.context_lens.max() > self._longest:
            self._record(int(host.context_lens.max()))
        num_samples = len(host.sample_rows)
        self._num_tokens.set(len(host.input_ids))
        self._num_rows.set(len(host.context_lens))
        self._num_samples.set(num_samples)
        for buffer, values in zip(self._inputs, host, strict=True):
            buffer[tuple(map(slice, values.shape))] = values
        self._program.wants_all.set(not only_likeliest)
        self._program.run()
        return self._logits[:num_samples], self._best[:num_samples]

    def _record(self, context_len: int) -> None:
        """Record for contexts up to this length or longer: as far as the rotary tables reach then."""
        self._decoder.grow_positions(context_len)
        longest = self._decoder.num_positions
        program = Program(self._library, self._arena)
        tensors = [torch.from_numpy(array) for array in self._inputs]
        ids, positions, slots, tables, contexts, starts, sample_rows = tensors
        for tensor in (ids, positions, slots):
            program.input(tensor, self._num_tokens)
        for tensor in (tables, contexts, starts):
            program.input(tensor, self._num_rows)
        program.input(sample_rows, self._num_samples)
        batch = AttentionBatch(
            num_decodes=len(ids),
            block_tables=tables,
            context_lens=contexts,
            query_starts=starts,
            max_query_len=1,
            max_context_len=longest,
        )
        with program.recording():
            hidden = self._decoder.forward(ids, positions, slots, batch, self._caches)
            program.counter(hidden)
            logits = self._decoder.compute_logits(kernels.take_rows(hidden, sample_rows))
            best = ops.argmax(logits)
        # Only now: should memory have run out before, the next step records again.
        self._longest, self._program, self._logits, self._best = longest, program, logits, best
        logger.info("recorded steps of up to %d tokens as %d operations", len(ids), len(program))


def record_steps(
    decoder: Decoder,
    caches: list[LayerCache],
    library: Library | None,
    max_model_len: int,
    max_tokens: int = MAX_TOKENS,
) -> StepPrograms | None:
    """The decoder's programs for steps of up to ``max_tokens`` tokens, where its operations are native."""
    if library is None:
        return None
    try:
        return StepPrograms(decoder, caches, library, max_model_len, max_tokens)
    except NotNative as reason:
        logger.info("steps are not native: %s", reason)
        return None
