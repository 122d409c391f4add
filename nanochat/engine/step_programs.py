"""Small steps on a CPU as native programs: the model's code runs once, and its operations from then on in one call.

What `step_graphs` is to a GPU. One recording serves every step of up to `MAX_TOKENS` tokens, because how many
there are is read when it runs. Knows nothing of schedules or sampling.
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
from nanochat.kernels.native.library import Library
from nanochat.kernels.native.program import Arena, Counter, NotNative, Program

logger = logging.getLogger(__name__)

MAX_TOKENS = 32
"""Larger steps are computed op by op with PyTorch, whose products of many rows are faster."""


class StepPrograms:
    """A decoder's recorded step on the CPU, from token ids to logits."""

    def __init__(
        self, decoder: Decoder, caches: list[LayerCache], library: Library, max_model_len: int
    ) -> None:
        """Records at once. Call under ``torch.inference_mode()``.

        Raises:
            NotNative: something that this model computes has no native version.
        """
        self._decoder = decoder
        self._caches = caches
        self._library = library
        self._arena = Arena()
        size = caches[0].block_size
        self._inputs = HostBatch(
            input_ids=np.zeros(MAX_TOKENS, np.int64),
            positions=np.zeros(MAX_TOKENS, np.int64),
            slots=np.full(MAX_TOKENS, -1, np.int64),
            block_tables=np.zeros((MAX_TOKENS, -(-max_model_len // size)), np.int32),
            context_lens=np.zeros(MAX_TOKENS, np.int32),
            query_starts=np.zeros(MAX_TOKENS + 1, np.int32),
            sample_rows=np.zeros(MAX_TOKENS, np.int64),
        )
        self._num_tokens, self._num_rows = Counter(MAX_TOKENS), Counter(MAX_TOKENS)
        self._num_samples = Counter(MAX_TOKENS)
        self._record(1)

    def fits(self, host: HostBatch) -> bool:
        """Whether a step of these tokens, some of which sample, can be run."""
        return len(host.input_ids) <= MAX_TOKENS and len(host.sample_rows) > 0

    def run(self, host: HostBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the rows that sample, logits ``[S, vocab]`` float32 and the likeliest token ``[S]`` int64.

        The next run overwrites them. K and V are stored.
        """
        if host.context_lens.max() > self._longest:
            self._record(int(host.context_lens.max()))
        self._num_tokens.set(len(host.input_ids))
        self._num_rows.set(len(host.context_lens))
        self._num_samples.set(len(host.sample_rows))
        for buffer, values in zip(self._inputs, host, strict=True):
            buffer[tuple(map(slice, values.shape))] = values
        self._program.run()
        num_samples = len(host.sample_rows)
        return self._logits[:num_samples], self._best[:num_samples]

    def _record(self, context_len: int) -> None:
        """Record for contexts up to this length or longer: as far as the rotary tables reach then."""
        self._decoder.grow_positions(context_len)
        self._longest = self._decoder.num_positions
        self._program = program = Program(self._library, self._arena)
        tensors = [torch.from_numpy(array) for array in self._inputs]
        ids, positions, slots, tables, contexts, starts, sample_rows = tensors
        for tensor in (ids, positions, slots):
            program.input(tensor, self._num_tokens)
        for tensor in (tables, contexts, starts):
            program.input(tensor, self._num_rows)
        program.input(sample_rows, self._num_samples)
        batch = AttentionBatch(
            num_decodes=MAX_TOKENS,
            block_tables=tables,
            context_lens=contexts,
            query_starts=starts,
            max_query_len=1,
            max_context_len=self._longest,
        )
        with program.recording():
            hidden = self._decoder.forward(ids, positions, slots, batch, self._caches)
            program.counter(hidden)
            self._logits = self._decoder.compute_logits(kernels.take_rows(hidden, sample_rows))
            self._best = ops.argmax(self._logits)
        logger.info("recorded a step of %d operations", len(program))


def record_steps(
    decoder: Decoder, caches: list[LayerCache], library: Library | None, max_model_len: int
) -> StepPrograms | None:
    """The decoder's programs, where its operations are native."""
    if library is None:
        return None
    try:
        return StepPrograms(decoder, caches, library, max_model_len)
    except NotNative as reason:
        logger.info("steps are not native: %s", reason)
        return None
