"""The least that runs a decoder over a paged cache: no scheduler, one or more sequences a step."""

from __future__ import annotations

import torch

from nanochat.engine.models.decoder import Decoder
from nanochat.kernels.cache import AttentionBatch, LayerCache

BLOCK_SIZE = 4


class PagedSequences:
    """Sequences over one cache, its blocks dealt in a scrambled order and poisoned until written."""

    def __init__(self, decoder: Decoder, num_blocks: int = 256) -> None:
        config = decoder.local
        shape = (num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.decoder = decoder
        self.caches = [
            LayerCache(*(torch.full(shape, float("nan"), dtype=decoder.dtype) for _ in range(2)))
            for _ in range(config.num_layers)
        ]
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        self.free = order.tolist()
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def share_prefix(self, source: int, target: int, num_blocks: int) -> None:
        """Let ``target`` start with ``source``'s first blocks, as after a prefix hit."""
        self.tables[target] = self.tables[source][:num_blocks]
        self.lengths[target] = num_blocks * BLOCK_SIZE

    @torch.inference_mode()
    def step(
        self, decodes: dict[int, int], chunks: dict[int, list[int]] | None = None
    ) -> dict[int, torch.Tensor]:
        """One forward pass: a token for each decoding sequence, then chunks. Logits ``[n, vocab]`` of each."""
        rows = {key: [token] for key, token in decodes.items()} | (chunks or {})
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for key, tokens in rows.items():
            begin = self.lengths.get(key, 0)
            table = self.tables.setdefault(key, [])
            for position in range(begin, begin + len(tokens)):
                if position // BLOCK_SIZE == len(table):
                    table.append(self.free.pop())
                positions.append(position)
                slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            ids += tokens
            starts.append(len(ids))
            self.lengths[key] = begin + len(tokens)
        longest = max(len(self.tables[key]) for key in rows)
        tables = [self.tables[key] + [0] * (longest - len(self.tables[key])) for key in rows]
        lengths = [self.lengths[key] for key in rows]
        batch = AttentionBatch(
            num_decodes=len(decodes),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            context_lens=torch.tensor(lengths, dtype=torch.int32),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            max_query_len=max(len(tokens) for tokens in rows.values()),
            max_context_len=max(lengths),
        )
        hidden = self.decoder.forward(
            torch.tensor(ids), torch.tensor(positions), torch.tensor(slots), batch, self.caches
        )
        logits = self.decoder.compute_logits(hidden)
        return {key: logits[starts[row] : starts[row + 1]] for row, key in enumerate(rows)}

    def prefill(self, key: int, tokens: list[int], chunk: int | None = None) -> torch.Tensor:
        """Logits ``[n, vocab]`` of all ``tokens``, run in chunks of ``chunk``."""
        size = chunk or len(tokens)
        parts = [self.step({}, {key: tokens[at : at + size]})[key] for at in range(0, len(tokens), size)]
        return torch.cat(parts)

    def greedy(self, key: int, prompt: list[int], num_tokens: int) -> list[int]:
        """The likeliest ``num_tokens`` tokens after ``prompt``."""
        token = int(self.prefill(key, prompt)[-1].argmax())
        tokens = [token]
        while len(tokens) < num_tokens:
            token = int(self.step({key: token})[key][-1].argmax())
            tokens.append(token)
        return tokens
