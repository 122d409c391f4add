"""KV blocks: who holds each one, which free ones are reused first, and what each still contains.

A block's life, left to right; only the scheduler moves it::

    free, empty ──allocate──▶ in use ──index──▶ in use, indexed ──release──▶ free, indexed ("cached")
         ▲                      │                      ▲                          │         │
         └───────release────────┘                      └──────────claim───────────┘         │
         ▲                                             (ref_count 0 → 1; also 1 → 2, …)     │
         └───────────────allocate evicts the least recently used one────────────────────────┘

Knows nothing of torch, requests, budgets or time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from xxhash import xxh64_intdigest

BlockKey = tuple[int, bytes]
"""Chained hash of everything up to a block's end, and the block's own token ids as int32 bytes."""


class InvariantError(RuntimeError):
    """The bookkeeping of blocks or requests contradicts itself: a bug here, never a user's mistake."""


class _PrefixNode:
    """One indexed run of tokens. ``parent`` is the run before it: identity, not equal hashes, ties a chain."""

    __slots__ = ("block", "hash", "parent", "tokens", "twins")

    def __init__(self, key: BlockKey, parent: _PrefixNode | None, block: int) -> None:
        self.hash, self.tokens = key
        self.parent = parent
        self.block = block
        """The block that lookups give."""
        self.twins: set[int] | None = None
        """Others with the same contents, from requests that computed them side by side."""


class BlockPool:
    """``num_blocks`` KV blocks of ``block_size`` tokens, with reference counts and a prefix index.

    The prefix index is a tree of full blocks found by chained xxh64; a hit also needs the same parent
    node and the same token ids, so that colliding hashes can't serve another prompt's K/V. Free blocks
    wait in least-recently-used order, empty ones first. Every operation is O(1) a block.

    Memory that has never been used may cost nothing yet, so a pool can be told to use no more than
    ``num_kept`` blocks while others can be reused: only what requests hold together takes it beyond that.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, num_kept: int | None = None
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool needs blocks and tokens in them, not {num_blocks} blocks of {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._ref_counts = [0] * num_blocks
        self._num_kept = num_blocks if num_kept is None else num_kept
        self._num_fresh = num_blocks
        """Blocks never used: the last ones."""
        self._free: OrderedDict[int, None] = OrderedDict()
        """All others that no request holds."""
        self._nodes: list[_PrefixNode | None] = [None] * num_blocks
        self._index: dict[int, _PrefixNode] = {}
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        """Blocks no request holds, cached ones included."""
        return len(self._free) + self._num_fresh

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks whose contents can still be reused."""
        return self._num_cached

    def ref_count(self, block: int) -> int:
        """How many block tables hold it."""
        return self._ref_counts[block]

    def is_cached(self, block: int) -> bool:
        """Whether its contents are in the prefix index, be it free or in use."""
        return self._nodes[block] is not None

    @property
    def num_touched(self) -> int:
        """Blocks that have ever been used: the first ones."""
        return self.num_blocks - self._num_fresh

    def indexed(self) -> Sequence[object]:
        """A copy of the index, by block, of the blocks ever used: true for those whose contents are in it."""
        return self._nodes[: self.num_touched]

    def extend_keys(self, keys: list[BlockKey], token_ids: Sequence[int], num_blocks: int) -> None:
        """Append the keys of ``token_ids``' first ``num_blocks`` full blocks that ``keys`` lacks.

        Keys stay valid while a token list grows, so each token is hashed once in a request's life.
        """
        size = self.block_size
        ids = array("i", token_ids[len(keys) * size : num_blocks * size])
        data, width = ids.tobytes(), size * ids.itemsize
        chained = keys[-1][0] if keys else 0
        for offset in range(0, len(data), width):
            tokens = data[offset : offset + width]
            chained = xxh64_intdigest(tokens, chained)
            keys.append((chained, tokens))

    def lookup(self, keys: Sequence[BlockKey], num_blocks: int) -> list[int]:
        """Blocks that hold the longest indexed prefix of the first ``num_blocks`` keys. Changes nothing."""
        hits: list[int] = []
        parent: _PrefixNode | None = None
        for chained, tokens in keys[:num_blocks]:
            node = self._index.get(chained)
            if node is None or node.parent is not parent or node.tokens != tokens:
                break
            hits.append(node.block)
            parent = node
        return hits

    def count_cached(self, keys: Sequence[BlockKey], num_blocks: int) -> int:
        """Length of what :meth:`lookup` would find, in O(log blocks), collisions aside.

        An entry never outlives its parent, so the hits are a prefix and a binary search finds its end.
        """
        return bisect_left(range(num_blocks), True, key=lambda block: keys[block][0] not in self._index)

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks claiming would take out of the free list."""
        return sum(not self._ref_counts[block] for block in blocks)

    def claim(self, blocks: Iterable[int]) -> None:
        """Hold blocks found by :meth:`lookup` once more."""
        for block in blocks:
            if not self._ref_counts[block]:
                del self._free[block]
                self._num_cached -= self._nodes[block] is not None
            self._ref_counts[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, empty ones first, then the least recently used cached ones."""
        if count > self.num_free:
            raise InvariantError(f"{count} blocks were asked for but only {self.num_free} are free.")
        blocks = []
        for _ in range(count):
            block = self._next_free()
            node = self._nodes[block]
            if node is not None:
                self._evict(block, node)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def _next_free(self) -> int:
        """Take the free block to be used next out of those that are free."""
        has_empty = len(self._free) > self._num_cached
        first_fresh = self.num_touched
        if self._num_fresh and not has_empty and (first_fresh < self._num_kept or not self._free):
            self._num_fresh -= 1
            return first_fresh
        return self._free.popitem(last=False)[0]

    def release(self, block_table: Sequence[int]) -> None:
        """Let go of a whole block table. Its tail enters the free list first, so it is evicted first."""
        for block in reversed(block_table):
            count = self._ref_counts[block] - 1
            if count < 0:
                raise InvariantError(f"Block {block} was released but nobody held it.")
            self._ref_counts[block] = count
            if count:
                continue
            self._free[block] = None
            if self._nodes[block] is None:
                self._free.move_to_end(block, last=False)
            else:
                self._num_cached += 1

    def index(self, block_table: Sequence[int], keys: Sequence[BlockKey], first: int, last: int) -> None:
        """Make a table's blocks ``first`` to ``last`` (exclusive) findable; their K/V must be written.

        A block whose hash belongs to other contents stays out, and so does everything after it.
        """
        for position in range(first, last):
            parent = self._nodes[block_table[position - 1]] if position else None
            if position and parent is None:
                return
            block, (chained, tokens) = block_table[position], keys[position]
            node = self._index.get(chained)
            if node is None:
                node = self._index[chained] = _PrefixNode(keys[position], parent, block)
            elif node.parent is parent and node.tokens == tokens:
                if node.twins is None:
                    node.twins = set()
                node.twins.add(block)
            else:
                return
            self._nodes[block] = node

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Compare everything with the block tables that exist. O(blocks).

        Raises:
            InvariantError: something doesn't add up; the sentence says what.
        """
        held = Counter(block for table in block_tables for block in table)
        cached = 0
        for block, count in enumerate(self._ref_counts):
            if count != held[block]:
                raise InvariantError(f"Block {block} has ref_count {count} but {held[block]} tables hold it.")
            is_free = block in self._free or block >= self.num_touched
            if is_free != (count == 0):
                raise InvariantError(f"Block {block} has ref_count {count} but is or isn't in the free list.")
            cached += count == 0 and self._nodes[block] is not None
        if cached != self._num_cached:
            raise InvariantError(f"{cached} free blocks are indexed but {self._num_cached} were counted.")
        self._check_index()

    def _check_index(self) -> None:
        num_indexed = 0
        for chained, node in self._index.items():
            blocks = {node.block, *(node.twins or ())}
            num_indexed += len(blocks)
            if node.hash != chained or any(self._nodes[block] is not node for block in blocks):
                raise InvariantError(f"The index entry {chained:#x} is misfiled or names a wrong block.")
            if node.parent is not None and self._index.get(node.parent.hash) is not node.parent:
                raise InvariantError(f"The index entry {chained:#x} outlived its parent.")
        if num_indexed != sum(node is not None for node in self._nodes):
            raise InvariantError("Some blocks think they are indexed but the index doesn't name them.")

    def _evict(self, block: int, node: _PrefixNode) -> None:
        self._nodes[block] = None
        self._num_cached -= 1
        if not node.twins:
            del self._index[node.hash]
        elif block == node.block:
            node.block = node.twins.pop()
        else:
            node.twins.remove(block)
