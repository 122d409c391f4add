"""One decoder for every family of models: what differs between them is in :class:`ModelConfig`.

Knows nothing of files, requests, sampling or schedules.
"""

from __future__ import annotations

import torch

from nanochat import kernels
from nanochat.engine.models.families import ModelConfig
from nanochat.engine.models.layers import Allocator, DecoderLayer, Linear, Norm
from nanochat.engine.models.rope import cos_sin_table
from nanochat.engine.parallel import ALONE, Collectives
from nanochat.kernels.cache import AttentionBatch, LayerCache

_FIRST_POSITIONS = 2048


class Decoder:
    """A decoder-only transformer on one device, its weights uninitialised until they are loaded.

    Callers hold no gradients: run it under ``torch.inference_mode()``. A decoder that is divided among ranks
    has one instance on each of them, and all of them run the same batch at the same time.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        ranks: Collectives = ALONE,
    ) -> None:
        """``config`` is the whole model's.

        Raises:
            InvalidOption: it can't be divided among so many ranks.
        """
        allocate = Allocator(device, dtype)
        self.config = config
        self.shard = ranks.shard
        self.local = local = ranks.shard.config(config)
        """Sizes of what is on this rank."""
        self.device = device
        self.dtype = dtype
        self.ranks = ranks
        self.embedding = allocate.tensor(local.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(local, layer, allocate, ranks) for layer in config.layers]
        self.norm = Norm(allocate.tensor(config.hidden_size), config.rms_norm_eps, config.norm_plus_one)
        self.lm_head = (
            Linear(self.embedding)
            if config.tie_word_embeddings
            else allocate.linear(config.hidden_size, local.vocab_size)
        )
        self.weight_bytes = allocate.allocated_bytes
        """Bytes of all weights; tied ones count once."""
        # Rounded to the weights' type first, as the models that have it were trained.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        self._num_positions = 0
        self._cos_sin: list[torch.Tensor | None] = [None] * config.num_layers
        """Each layer's rotary table; layers of one kind share theirs."""

    def reserve_positions(self, num_positions: int) -> None:
        """Make the rotary tables at least this long.

        ``forward`` does it as needed. Whoever captures a graph does it before, with the longest sequence
        it will run, because growing replaces the tables.
        """
        if num_positions <= self._num_positions:
            return
        self._num_positions = num_positions
        kinds = {layer.rope for layer in self.config.layers if layer.rope is not None}
        tables = {rope: cos_sin_table(rope, num_positions, self.device) for rope in kinds}
        self._cos_sin = [tables.get(layer.rope) if layer.rope else None for layer in self.config.layers]

    @property
    def num_positions(self) -> int:
        """How far the rotary tables reach."""
        return self._num_positions

    def grow_positions(self, num_positions: int) -> None:
        """:meth:`reserve_positions` if the tables don't reach so far, and then more, so that few growths follow."""
        if num_positions > self._num_positions:
            self.reserve_positions(self._grown(num_positions))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: AttentionBatch,
        caches: list[LayerCache],
    ) -> torch.Tensor:
        """Final hidden states of ``T`` packed tokens, after the last norm: ``[T, hidden]``.

        ``input_ids``, ``positions`` and ``slots`` are ``[T]`` int64. Every token's K and V goes to its slot
        of each of the ``caches``, one a layer.
        """
        self.grow_positions(attention.max_context_len)
        # The residual stream is float32, whatever the weights are: adding up 60 outputs in BF16 costs
        # more accuracy than any other part of the model (docs/quality.md), and float32 costs no time.
        x = self._embed(input_ids)
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        first, residual = norms[0](x)
        normed = kernels.Normed(first)
        for index, (layer, cos_sin, cache) in enumerate(zip(self.layers, self._cos_sin, caches, strict=True)):
            normed, residual = layer(
                normed,
                residual,
                norms[index + 1],
                positions,
                slots,
                cos_sin,
                attention,
                cache,
                finish=index == len(self.layers) - 1,
            )
        return normed.values

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[S, hidden]`` to ``[S, vocab]`` float32; on ranks other than the first, ``[S, 0]``."""
        parts = self.ranks.gather(self.lm_head(hidden, torch.float32))
        if not parts:
            return hidden.new_empty((hidden.shape[0], 0), dtype=torch.float32)
        logits = parts[0] if len(parts) == 1 else self._join(parts)
        if self.config.final_softcap:
            logits = torch.tanh(logits / self.config.final_softcap) * self.config.final_softcap
        return logits

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` to ``[T, hidden]`` float32; a rank has some rows of the table, and zeros for the other tokens."""
        scale = self._embedding_scale
        if self.shard.size == 1:
            return kernels.take_rows(self.embedding, input_ids, scale=scale, dtype=torch.float32)
        begin, end = self.shard.own(self.config.vocab_size)
        is_ours = (input_ids >= begin) & (input_ids < end)
        x = kernels.take_rows(self.embedding, torch.where(is_ours, input_ids - begin, 0), scale=scale)
        return self.ranks.all_reduce(x.masked_fill_(~is_ours.unsqueeze(-1), 0.0)).float()

    def _join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Every rank's logits, without what fills up the last ones' parts."""
        ranges = [self.shard.own(self.config.vocab_size, rank) for rank in range(len(parts))]
        return torch.cat(
            [part[:, : end - begin] for part, (begin, end) in zip(parts, ranges, strict=True)], dim=1
        )

    def _grown(self, needed: int) -> int:
        """At least ``needed``, doubling from a small start so that few growths reach any length."""
        size = max(self._num_positions, _FIRST_POSITIONS)
        while size < needed:
            size *= 2
        return max(min(size, self.config.max_position_embeddings), needed)
