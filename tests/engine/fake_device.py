"""A stand-in for model and device that notices every wrong, stale or unwritten KV slot.

A cached "K/V" is a digest of the token and of the digest before it, read through the block table like
real attention reads its context. The next token depends on every digest of the context, so one wrong
slot anywhere changes the text. Launches execute at once and in order, as a device does; their results
are handed out when asked for, so that steps can be in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanochat.engine.request import Request
from nanochat.engine.scheduler import StepPlan

MODULUS = 1_000_003


def digest(previous: int, token: int) -> int:
    return (previous * 31 + token * 7 + 1) % MODULUS


def next_token(context: Sequence[int], vocab_size: int) -> int:
    return sum(context) * 40_503 % MODULUS % vocab_size


@dataclass
class Launch:
    """A step on its way: the ids it will bring, and the blocks it reads and writes until then."""

    plan: StepPlan
    token_ids: list[int]
    blocks: set[int]


class FakeDevice:
    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 16) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._cache: list[int | None] = [None] * (num_blocks * block_size)
        self._tokens: dict[Request, list[int]] = {}
        """What the device knows: it samples ids before the scheduler hears of them."""

    def launch(self, plan: StepPlan) -> Launch:
        """Store every new token's K/V first, then sample from the cache alone."""
        for request, start, length, _ in plan.chunks:
            tokens = self._tokens.setdefault(request, list(request.token_ids))
            for position in range(start, start + length):
                previous = self._read(request, position - 1) if position else 0
                self._cache[self._slot(request, position)] = digest(previous, tokens[position])
        token_ids = []
        for request, start, length, _ in plan.sampling:
            context = [self._read(request, position) for position in range(start + length)]
            tokens = self._tokens[request]
            assert len(tokens) == start + length, "a token was lost or sampled twice"
            tokens.append(next_token(context, self.vocab_size))
            token_ids.append(tokens[-1])
        return Launch(plan, token_ids, {b for chunk in plan.chunks for b in chunk.request.block_table})

    def _slot(self, request: Request, position: int) -> int:
        return request.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _read(self, request: Request, position: int) -> int:
        value = self._cache[self._slot(request, position)]
        assert value is not None, "a slot was read that nothing had written"
        return value


def reference_tokens(request: Request, vocab_size: int = 16) -> list[int]:
    """Prompt and answer as a model that serves one request at a time, without a cache, gives them."""
    tokens = request.token_ids[: request.num_prompt_tokens]
    context: list[int] = []
    for token in tokens:
        context.append(digest(context[-1] if context else 0, token))
    while len(tokens) < request.max_total_tokens:
        tokens.append(next_token(context, vocab_size))
        context.append(digest(context[-1], tokens[-1]))
        if tokens[-1] in request.eos_token_ids and not request.params.ignore_eos:
            break
    return tokens
