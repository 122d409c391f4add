"""Whole steps as CUDA graphs: one launch from a plan's few numbers to sampled tokens, decodes and prefills alike.

A step is recorded (CUDA's word is captured) once for each of a set of shapes and replayed with the smallest that
a plan fits, the rest of it padding: rows without context, and tokens of no row, which read and write no cache.
The kernels read every length on the device, so that one recording serves every plan of its shape. A request's
block table and last token stay on the device between steps. Knows nothing of schedules.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from nanochat import kernels
from nanochat.engine.device import is_out_of_memory
from nanochat.engine.models.decoder import Decoder
from nanochat.engine.sampler import sample_together
from nanochat.engine.seats import Seats
from nanochat.engine.seen_tokens import SeenTokens, seen_bytes
from nanochat.engine.step_inputs import StepInputs, StepShape, input_bytes, pack_step
from nanochat.engine.step_plan import StepPlan
from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.tuning import padded_rows

logger = logging.getLogger(__name__)

MAX_PREFILL_TOKENS = 8192
"""Larger steps compute for longer than they take to launch kernel by kernel."""
MIN_PREFILL_TOKENS = 32
SHORT_CONTEXT = 4096
"""Prefills of no longer contexts have shapes of their own: their attention is cut differently."""
MAX_RECORDINGS = 96
"""More than that are not kept: the one that was needed longest ago goes."""
RECORDED_DECODES = 64
RECORDED_TOKENS = 512
"""Shapes up to these are recorded before the first request; others when they are first needed."""


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Rows of steps that only decode, ascending: 1, 2, 4, multiples of 8, and ``max_num_seqs`` itself.

    From 128 on the multiples grow with the size, so that padding stays within an eighth and any
    ``max_num_seqs`` needs few recordings.
    """
    sizes, size = [], 1
    while size < max_num_seqs:
        sizes.append(size)
        size = padded_rows(size + 1)
    return [*sizes, max_num_seqs]


def row_sizes(max_num_seqs: int) -> list[int]:
    """Rows of either kind in steps that prefill, ascending: 8, 32, 128, and so on to ``max_num_seqs``."""
    sizes, size = [], 8
    while size < max_num_seqs:
        sizes.append(size)
        size *= 4
    return [*sizes, max_num_seqs]


def token_sizes(max_tokens: int) -> list[int]:
    """Prefill tokens of a step, ascending from 32: powers of two and, the larger the more, numbers between."""
    sizes, size = [], MIN_PREFILL_TOKENS
    while size < max_tokens:
        parts = 1 if size == MIN_PREFILL_TOKENS else 2 if size < RECORDED_TOKENS else 4
        sizes += [size + size * part // parts for part in range(parts)]
        size *= 2
    return [*(size for size in sizes if size < max_tokens), max_tokens]


def state_bytes(max_num_seqs: int, table_width: int, vocab_size: int) -> int:
    """What :class:`StepGraphs` keeps on the device beside recordings, about.

    Block tables of seats, rows and new entries; what requests have had of tokens.
    """
    return 4 * table_width * (max_num_seqs + 1) * 5 + seen_bytes(max_num_seqs, vocab_size)


def _at_least(sizes: Sequence[int], needed: int) -> int:
    return sizes[bisect_left(sizes, needed)]


class Shapes:
    """The shapes that plans of an engine are fitted into."""

    def __init__(
        self, max_num_seqs: int, max_num_tokens: int, max_model_len: int, converted_tokens: int
    ) -> None:
        """``converted_tokens``: how much context of a step's prefills is converted, if it is no more than that."""
        self._max_model_len = max_model_len
        self._converted_tokens = converted_tokens
        self._decodes = decode_sizes(max_num_seqs)
        self._rows = row_sizes(max_num_seqs)
        self._tokens = token_sizes(min(max_num_tokens, MAX_PREFILL_TOKENS))

    @property
    def largest(self) -> StepShape:
        rows = self._rows[-1]
        return StepShape(rows, rows, self._tokens[-1], self._max_model_len, rows * self._max_model_len)

    def fit(self, plan: StepPlan) -> StepShape | None:
        """The smallest shape for a plan; None if it can't be replayed.

        That is one with too many tokens, or log-probabilities.
        """
        if any(chunk.request.params.logprobs is not None for chunk in plan.sampling):
            return None
        num_decodes, num_prefills = len(plan.decodes), len(plan.prefills)
        if not num_prefills:
            return StepShape(_at_least(self._decodes, num_decodes), 0, 0, self._max_model_len, 0)
        num_tokens = plan.num_tokens - num_decodes
        if num_tokens > self._tokens[-1]:
            return None
        contexts = [chunk.start + chunk.length for chunk in plan.prefills]
        rows, longest = _at_least(self._rows, num_prefills), self._context_class(max(contexts))
        return StepShape(
            _at_least(self._rows, num_decodes) if num_decodes else 0,
            rows,
            _at_least(self._tokens, num_tokens),
            longest,
            self._prefill_context(rows, longest, sum(contexts)),
        )

    def common(self) -> list[StepShape]:
        """Those that most chats need."""
        decodes = [n for n in self._decodes if n <= RECORDED_DECODES]
        tokens = [n for n in self._tokens if n <= RECORDED_TOKENS]
        rows, longest = self._rows[0], self._context_class(1)
        context = self._prefill_context(rows, longest, 1)
        shapes = [
            *(StepShape(n, 0, 0, self._max_model_len, 0) for n in decodes),
            *(StepShape(0, rows, n, longest, context) for n in tokens),
        ]
        if longest < self._max_model_len:
            # Other kernels, which a long chat would else wait for: compiling them takes seconds once a machine.
            context = self._prefill_context(rows, self._max_model_len, 1)
            shapes.append(StepShape(0, rows, tokens[-1], self._max_model_len, context))
        return shapes

    def _context_class(self, context_len: int) -> int:
        short = min(SHORT_CONTEXT, self._max_model_len)
        return short if context_len <= short else self._max_model_len

    def _prefill_context(self, rows: int, longest: int, needed: int) -> int:
        most = rows * longest
        return min(most, self._converted_tokens) if needed <= self._converted_tokens else most


@dataclass(frozen=True, slots=True)
class _Recording:
    inputs: StepInputs
    graph: torch.cuda.CUDAGraph
    token_ids: torch.Tensor


class StepGraphs:
    """A decoder's recorded steps on one device. They run on one stream, one after the other.

    Only for models without :class:`~nanochat.engine.models.layers.MoE` layers, which read from the device.
    """

    def __init__(
        self,
        decoder: Decoder,
        caches: list[LayerCache],
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
    ) -> None:
        converted_tokens = kernels.most_converted_tokens(caches[0], decoder.dtype)
        self.shapes = Shapes(max_num_seqs, max_num_tokens, max_model_len, converted_tokens)
        self._decoder = decoder
        self._caches = caches
        self._block_size = caches[0].block_size
        self._recordings: dict[StepShape, _Recording] = {}
        self._seen_once: set[StepShape] = set()
        """Shapes that prefill and are not recorded yet."""
        self._unrecordable: set[StepShape] = set()
        """Shapes for whose recordings there was no memory, say: their steps are launched kernel by kernel."""
        device = decoder.device
        table_width = -(-max_model_len // self._block_size)
        self.seats = Seats(max_num_seqs)
        # One row a seat, and one more for padding.
        self.last_ids = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.seen_tokens = SeenTokens(max_num_seqs, decoder.config.vocab_size, device)
        self._tables = torch.zeros((max_num_seqs + 1, table_width), dtype=torch.int32, device=device)
        # Steps never run at the same time, and none needs what another left behind: they share all memory.
        num_bytes = input_bytes(self.shapes.largest, table_width)
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        # Growing the rotary tables later would free those that a recording reads.
        decoder.reserve_positions(max_model_len)
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def choose(self, plan: StepPlan) -> StepShape | None:
        """The shape to run a plan in; None: launch it kernel by kernel, at least this time.

        A step that prefills is recorded the second time its shape comes, unless there was time before: many
        shapes come but once, and whoever waits for a first token would wait for the recording too.
        """
        shape = self.shapes.fit(plan)
        if shape is None or not shape.prefill_rows or shape in self._recordings:
            return shape
        if shape in self._unrecordable:
            return None
        if shape in self._seen_once:
            self._seen_once.remove(shape)
            return shape
        self._seen_once.add(shape)
        return None

    def next_unrecorded(self) -> StepShape | None:
        """A shape to record while there is nothing else to do; each is named once."""
        return self._seen_once.pop() if self._seen_once else None

    def leave_out(self, shape: StepShape) -> None:
        """Launch steps of this shape kernel by kernel from now on."""
        self._unrecordable.add(shape)

    def pack(self, plan: StepPlan, shape: StepShape) -> tuple[torch.Tensor, np.ndarray]:
        """What :meth:`run` needs of a plan that fits a shape, on the host.

        And which of the shape's rows are the plan's sampling chunks'.
        """
        return pack_step(plan, shape, self.seats, self._block_size, self._decoder.device)

    def run(self, shape: StepShape, host: torch.Tensor) -> torch.Tensor:
        """Compute and sample what was packed for this shape, as one launch once the shape is recorded.

        Returns ``[R]`` int64 token ids on the device, which the next run may overwrite. Call under
        ``torch.inference_mode()``. All ranks of a divided model run the same.
        """
        recording = self._recordings.pop(shape, None)
        if recording is None:
            return self._record(shape, host)
        self._recordings[shape] = recording  # the last one in order of use
        recording.inputs.send(host)
        recording.graph.replay()
        return recording.token_ids

    def record_common(self, report: Callable[[int, int], None]) -> None:
        """Record the shapes that most chats need; ``report`` is told how many are done, of how many."""
        shapes = self.shapes.common()
        for done, shape in enumerate(shapes):
            report(done, len(shapes))
            if shape not in self._recordings:
                self._record(shape, self.pack(StepPlan(0, (), (), ()), shape)[0])
        report(len(shapes), len(shapes))

    def step(self, inputs: StepInputs) -> torch.Tensor:
        """The step that is recorded: ``[R]`` int64 token ids, on the device."""
        shape, rows = inputs.shape, inputs.rows
        tokens = kernels.expand_rows(rows, self.last_ids, self._tables, self._block_size)
        attention = AttentionBatch(
            num_decodes=shape.decode_rows,
            block_tables=tokens.block_tables,
            context_lens=rows.context_lens,
            query_starts=rows.query_starts,
            max_query_len=max(1, shape.prefill_tokens),
            max_context_len=shape.max_context_len,
            scratch=inputs.scratch,
            max_prefill_context=shape.max_prefill_context,
        )
        hidden = self._decoder.forward(
            tokens.input_ids, tokens.positions, tokens.slots, attention, self._caches
        )
        row_ids = tokens.input_ids
        if shape.prefill_rows:
            hidden, row_ids = (x.index_select(0, tokens.last_tokens) for x in (hidden, row_ids))
        logits = self._decoder.compute_logits(hidden)
        seen = self.seen_tokens.rows(inputs.sampling_seats, row_ids)
        batch = inputs.sampling(tokens.next_positions, seen)
        token_ids = sample_together(logits, batch, self._decoder.ranks).token_ids
        self.last_ids.scatter_(0, inputs.sampling_seats, token_ids)
        return token_ids

    def inputs(self, shape: StepShape) -> StepInputs:
        """Inputs of a step of this shape, in the buffer that all share."""
        return StepInputs(shape, self._buffer)

    def _record(self, shape: StepShape, host: torch.Tensor) -> torch.Tensor:
        """Run a step launch by launch, which compiles and allocates what stays, and record the same meanwhile."""
        is_kept = shape not in self._unrecordable
        if is_kept and len(self._recordings) >= MAX_RECORDINGS:
            torch.cuda.current_stream(self._decoder.device).synchronize()  # it may be running
            del self._recordings[next(iter(self._recordings))]
        inputs = self.inputs(shape)
        inputs.send(host)
        sampled = self.step(inputs)
        if is_kept:
            try:
                self._recordings[shape] = self._capture(inputs)
            except Exception as error:
                if not is_out_of_memory(error) or self._decoder.ranks.shard.size > 1:
                    raise  # ranks of a divided model must all do the same
                # The step itself has been launched. What launches free a recording would keep.
                logger.info("no memory to record steps of %s: %s", shape, error)
                self.leave_out(shape)
        return sampled

    def _capture(self, inputs: StepInputs) -> _Recording:
        device = self._decoder.device
        current = torch.cuda.current_stream(device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # The matrix library's workspace of this stream must not come from a graph's memory.
            square = torch.zeros((64, 64), dtype=self._decoder.dtype, device=device)
            F.linear(square, square)
            # "thread_local": what other threads of the process do with the device meanwhile is no fault of
            # ours. `torch.cuda.graph` would collect garbage and empty the allocator's cache each time.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                token_ids = self.step(inputs)
            except BaseException:
                with suppress(RuntimeError):  # which would hide what went wrong
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return _Recording(inputs, graph, token_ids)
