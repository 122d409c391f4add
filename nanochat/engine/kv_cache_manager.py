"""One request's KV blocks: finds its cached prefix, grows its table, indexes what is written, lets go.

Between the scheduler, which decides who runs, and the block pool, which knows blocks but no requests.
Knows nothing of torch, budgets, queues or time.
"""

from __future__ import annotations

from collections.abc import Iterable

from nanochat.engine.block_pool import BlockPool
from nanochat.engine.request import Request
from nanochat.errors import NotEnoughMemory


class KVCacheManager:
    """Request-sized operations on a :class:`BlockPool`. Lengths in tokens unless named blocks."""

    def __init__(self, pool: BlockPool, max_model_len: int) -> None:
        """Raises NotEnoughMemory if a single request of ``max_model_len`` tokens wouldn't fit the pool."""
        capacity = pool.num_blocks * pool.block_size + 1  # the last token sampled is never fed back
        if max_model_len > capacity:
            raise NotEnoughMemory(
                f"max_model_len {max_model_len} doesn't fit a cache of {pool.num_blocks} blocks of "
                f"{pool.block_size} tokens; the longest that does is {capacity}."
            )
        self.pool = pool

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.pool.block_size)

    def count_cached(self, request: Request) -> int:
        """Tokens the prefix cache could give it now. O(log tokens) once its tokens have been hashed."""
        return self.pool.count_cached(request.block_keys, self._hash(request)) * self.pool.block_size

    def start(self, request: Request, length: int, spare_blocks: int, soon_blocks: int) -> bool:
        """Give a request its cached prefix, unless there are too few blocks for what is to follow it.

        The next ``length`` tokens must fit ``spare_blocks``; all it has, those and ``soon_blocks`` more. A
        cached block that nobody holds costs as much as a new one: claiming it takes it off the free list.
        """
        hits = self.pool.lookup(request.block_keys, self._hash(request))
        cached = len(hits) * self.pool.block_size
        held_by_others = len(hits) - self.pool.num_free_among(hits)
        first = self.num_blocks(min(request.num_tokens, cached + length)) - held_by_others
        whole = self.num_blocks(request.num_tokens) - held_by_others
        if first > spare_blocks or whole > spare_blocks + soon_blocks:
            return False
        self.pool.claim(hits)
        request.block_table = hits
        request.num_computed_tokens = request.num_written_tokens = cached
        return True

    def about_to_be_freed(self, running: Iterable[Request]) -> int:
        """Blocks that only requests hold whose last token is being sampled."""
        ending = [r for r in running if r.num_tokens == r.max_total_tokens]
        return sum(self.pool.ref_count(block) == 1 for request in ending for block in request.block_table)

    def lacking_blocks(self, request: Request) -> int:
        """Blocks it still needs to compute all the tokens it has."""
        return self.num_blocks(request.num_tokens) - len(request.block_table)

    def room(self, request: Request) -> int:
        """Most tokens that its own blocks and all free ones could still take."""
        blocks = len(request.block_table) + self.pool.num_free
        return blocks * self.pool.block_size - request.num_computed_tokens

    def grow(self, request: Request, length: int) -> int:
        """Allocate for the next ``length`` tokens, and no more; returns the number of new blocks."""
        blocks = self.num_blocks(request.num_computed_tokens + length) - len(request.block_table)
        request.block_table += self.pool.allocate(blocks)
        return blocks

    def index(self, request: Request, start: int, end: int) -> None:
        """K/V from ``start`` to ``end`` is written: the blocks this completes become findable."""
        first = start // self.pool.block_size
        last = (
            min(end, len(request.token_ids)) // self.pool.block_size
        )  # the ids of dropped tokens are unknown
        if last > first and self.pool.prefix_caching:
            self.pool.extend_keys(request.block_keys, request.token_ids, last)
            self.pool.index(request.block_table, request.block_keys, first, last)

    def release(self, request: Request) -> None:
        """Take all its blocks away; what was indexed stays findable until it is evicted."""
        self.pool.release(request.block_table)
        request.block_table = []
        request.num_computed_tokens = request.num_written_tokens = 0

    def _hash(self, request: Request) -> int:
        """Hash what isn't yet, and return how many blocks could come from the cache."""
        if not self.pool.prefix_caching:
            return 0
        num_blocks = (len(request.token_ids) - 1) // self.pool.block_size  # its last token must be computed
        self.pool.extend_keys(request.block_keys, request.token_ids, num_blocks)
        return num_blocks
