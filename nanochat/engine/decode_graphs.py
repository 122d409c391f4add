"""Pure-decode steps as CUDA graphs: one launch for embedding, all layers, ``lm_head`` and sampling.

A step is captured once for each of a few batch sizes, when that size is first needed, and replayed with the
next larger size's padding. Padding rows have no context and no slot, so they read and write no cache. The
kernels read every length on the device, so that one graph serves every context. Knows nothing of schedules.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch

from nanochat.engine.batch import pack_batch
from nanochat.engine.models.decoder import Decoder
from nanochat.engine.packing import Packing, host_buffer
from nanochat.engine.sampler import SamplingArrays, SamplingBatch, sample
from nanochat.engine.step_plan import StepPlan
from nanochat.kernels.cache import AttentionBatch, LayerCache


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph, ascending: 1, 2, 4, multiples of 8, and ``max_num_seqs`` itself.

    From 128 on the multiples grow with the size, so that padding stays within an eighth and any
    ``max_num_seqs`` needs few graphs.
    """
    sizes, size = [], 1
    while size < max_num_seqs:
        sizes.append(size)
        size = 2 * size if size < 8 else size + max(8, 1 << (size.bit_length() - 4))
    return [*sizes, max_num_seqs]


def is_replayable(plan: StepPlan) -> bool:
    """Whether the plan only decodes, and samples without a penalty or log-probabilities."""
    return (
        bool(plan.decodes)
        and not plan.prefills
        and all(
            chunk.request.params.logprobs is None and chunk.request.params.repetition_penalty == 1
            for chunk in plan.decodes
        )
    )


class DecodeInputs:
    """What a graph of ``size`` rows reads: tensors that stay where they are, and are filled for each step."""

    def __init__(self, size: int, table_width: int, max_context_len: int, device: torch.device) -> None:
        self.size = size
        row, longs, ints, floats = (size,), torch.int64, torch.int32, torch.float32
        tables = ((size, table_width), ints)
        packing = Packing(
            [*[(row, longs)] * 5, *[(row, floats)] * 3, *[(row, ints)] * 2, tables]  # as `fill` orders them
        )
        self._host = host_buffer(packing.num_bytes, device)
        *self._host_rows, self._host_tables = (view.numpy() for view in packing.views(self._host))
        self._buffer = torch.zeros(packing.num_bytes, dtype=torch.uint8, device=device)
        views = packing.views(self._buffer)
        self.input_ids, self.positions, self.slots, seeds, sampled_positions, *views = views
        temperature, top_p, min_p, top_k, context_lens, block_tables = views
        self.slots.fill_(-1)
        self.attention = AttentionBatch(
            num_decodes=size,
            block_tables=block_tables,
            context_lens=context_lens,
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
            max_query_len=1,
            max_context_len=max_context_len,
        )
        self.sampling = SamplingBatch(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=torch.ones(size, device=device),
            seeds=seeds,
            positions=sampled_positions,
            penalty_tokens=None,
            # Any step may come: the sampler must be ready for each kind of row.
            all_greedy=False,
            any_greedy=True,
            any_top_k=True,
            any_top_p=True,
            any_min_p=True,
            num_logprobs=None,
        )

    def fill(self, plan: StepPlan, block_size: int) -> None:
        """Copy a pure-decode plan of at most ``size`` rows to the device; padding rows become greedy ones.

        The copy is asynchronous, from one buffer: the last step's must be over.
        """
        batch = pack_batch(plan, block_size)
        sampling = SamplingArrays.from_requests(
            [chunk.request for chunk in plan.decodes], [chunk.start + 1 for chunk in plan.decodes]
        )
        arrays = [
            *(batch.input_ids, batch.positions, batch.slots, sampling.seeds, sampling.positions),
            *(sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k, batch.context_lens),
        ]
        num_rows = len(plan.decodes)
        for row, array in zip(self._host_rows, arrays, strict=True):
            row[:num_rows] = array
            row[num_rows:] = -1 if array is batch.slots else 0
        # The rest of the tables is never read.
        self._host_tables[:num_rows, : batch.block_tables.shape[1]] = batch.block_tables
        self._buffer.copy_(self._host, non_blocking=True)


def decode(decoder: Decoder, caches: list[LayerCache], inputs: DecodeInputs) -> torch.Tensor:
    """The step that is captured: ``[size]`` int64 token ids, on the device."""
    hidden = decoder.forward(inputs.input_ids, inputs.positions, inputs.slots, inputs.attention, caches)
    return sample(decoder.compute_logits(hidden), inputs.sampling).token_ids


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    inputs: DecodeInputs
    graph: torch.cuda.CUDAGraph
    token_ids: torch.Tensor


class DecodeGraphs:
    """A decoder's captured steps on one GPU. Replays are for one stream, one after the other.

    Only for models without :class:`~nanochat.engine.models.layers.MoE` layers, which read from the device.
    """

    def __init__(
        self, decoder: Decoder, caches: list[LayerCache], *, max_num_seqs: int, max_model_len: int
    ) -> None:
        self._decoder = decoder
        self._caches = caches
        self._block_size = caches[0].block_size
        self._max_model_len = max_model_len
        self._sizes = graph_sizes(max_num_seqs)
        self._steps: dict[int, _CapturedStep] = {}
        # Graphs never run at the same time, and none needs what another left behind: they share their memory.
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(decoder.device)

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Compute and sample a replayable plan of at most ``max_num_seqs`` rows.

        Returns ``[len(plan.decodes)]`` int64 token ids on the device. Read them before the next run, which
        overwrites them and what is copied to the device for this one. Call under ``torch.inference_mode()``.
        """
        size = self._sizes[bisect_left(self._sizes, len(plan.decodes))]
        step = self._steps.get(size)
        if step is None:
            step = self._steps[size] = self._capture(size)
        step.inputs.fill(plan, self._block_size)
        step.graph.replay()
        return step.token_ids[: len(plan.decodes)]

    def _capture(self, size: int) -> _CapturedStep:
        """Record a step of padding rows alone, after one run of it that compiles and allocates what stays."""
        device = self._decoder.device
        # Growing the rotary tables later would free those that the graph reads.
        self._decoder.reserve_positions(self._max_model_len)
        table_width = -(-self._max_model_len // self._block_size)
        inputs = DecodeInputs(size, table_width, self._max_model_len, device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            decode(self._decoder, self._caches, inputs)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": what other threads of the process do with the device meanwhile is no fault of ours.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            token_ids = decode(self._decoder, self._caches, inputs)
        return _CapturedStep(inputs, graph, token_ids)
