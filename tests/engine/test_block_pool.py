"""The block pool: reference counts, reuse order, and a prefix index that can't be fooled."""

from __future__ import annotations

import random

import pytest

from nanochat.engine import block_pool
from nanochat.engine.block_pool import BlockKey, BlockPool, InvariantError


def keys_of(pool: BlockPool, token_ids: list[int]) -> list[BlockKey]:
    keys: list[BlockKey] = []
    pool.extend_keys(keys, token_ids, len(token_ids) // pool.block_size)
    return keys


def write(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """Compute every full block of a prompt anew, and index it."""
    keys = keys_of(pool, token_ids)
    table = pool.allocate(len(keys))
    pool.index(table, keys, 0, len(keys))
    return table


def find(pool: BlockPool, token_ids: list[int]) -> list[int]:
    keys = keys_of(pool, token_ids)
    return pool.lookup(keys, len(keys))


class TestReuseOrder:
    def test_all_blocks_start_free_and_empty(self) -> None:
        pool = BlockPool(3, 4)
        assert (pool.num_free, pool.num_used, pool.num_cached) == (3, 0, 0)
        assert pool.allocate(3) == [0, 1, 2]
        assert (pool.num_free, pool.num_used) == (0, 3)
        pool.check([[0, 1, 2]])

    def test_empty_blocks_go_before_cached_ones(self) -> None:
        pool = BlockPool(4, 2)
        cached = write(pool, [1, 2, 3, 4])
        scratch = pool.allocate(1)
        pool.release(cached)
        pool.release(scratch)
        assert pool.num_cached == 2
        assert set(pool.allocate(2)) == {scratch[0], 3}
        assert find(pool, [1, 2, 3, 4]) == cached

    def test_blocks_never_used_are_kept_for_what_requests_hold_together(self) -> None:
        pool = BlockPool(6, 2, num_kept=3)
        first = write(pool, [1, 2, 3, 4])
        pool.release(first)
        assert write(pool, [5, 6]) == [2]
        assert write(pool, [7, 8]) == [first[1]], "a cached one goes before one never used"
        assert pool.allocate(4) == [first[0], 3, 4, 5], "of which there are enough for those who need them"
        assert pool.num_free == 0
        pool.check([[2], [first[1]], [first[0], 3, 4, 5]])

    def test_tails_are_evicted_before_heads(self) -> None:
        pool = BlockPool(3, 2)
        table = write(pool, [1, 2, 3, 4, 5, 6])
        pool.release(table)
        for length in (2, 1, 0):
            pool.allocate(1)
            assert find(pool, [1, 2, 3, 4, 5, 6]) == table[:length]

    def test_least_recently_used_goes_first(self) -> None:
        pool = BlockPool(2, 2)
        first, second = write(pool, [1, 2]), write(pool, [3, 4])
        pool.release(first)
        pool.release(second)
        pool.claim(first)
        pool.release(first)
        assert pool.allocate(1) == second

    def test_claiming_a_free_block_takes_it_off_the_free_list(self) -> None:
        pool = BlockPool(3, 2)
        table = write(pool, [1, 2, 3, 4])
        pool.release(table)
        assert pool.num_free_among(table) == 2
        pool.claim(table)
        assert (pool.num_free, pool.num_cached, pool.num_free_among(table)) == (1, 0, 0)
        pool.claim(table)
        assert pool.ref_count(table[0]) == 2
        pool.release(table)
        pool.check([table])

    def test_too_many_blocks(self) -> None:
        pool = BlockPool(2, 2)
        with pytest.raises(InvariantError, match="3 blocks were asked for but only 2 are free"):
            pool.allocate(3)

    def test_double_release(self) -> None:
        pool = BlockPool(2, 2)
        table = pool.allocate(1)
        pool.release(table)
        with pytest.raises(InvariantError, match="nobody held it"):
            pool.release(table)

    @pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
    def test_a_pool_needs_blocks(self, num_blocks: int, block_size: int) -> None:
        with pytest.raises(ValueError, match="a pool needs blocks"):
            BlockPool(num_blocks, block_size)


class TestPrefixIndex:
    def test_finds_the_longest_common_prefix(self) -> None:
        pool = BlockPool(8, 2)
        table = write(pool, [1, 2, 3, 4, 5, 6])
        assert find(pool, [1, 2, 3, 4, 9, 9]) == table[:2]
        assert find(pool, [9, 9, 3, 4, 5, 6]) == []
        assert find(pool, [1]) == []

    def test_the_same_tokens_after_another_prefix_are_another_block(self) -> None:
        pool = BlockPool(8, 2)
        first, second = write(pool, [1, 2, 7, 7]), write(pool, [3, 4, 7, 7])
        assert find(pool, [1, 2, 7, 7]) == first
        assert find(pool, [3, 4, 7, 7]) == second

    def test_a_lookup_is_bounded(self) -> None:
        pool = BlockPool(8, 2)
        table = write(pool, [1, 2, 3, 4])
        assert pool.lookup(keys_of(pool, [1, 2, 3, 4]), 1) == table[:1]

    def test_blocks_computed_side_by_side_stand_in_for_each_other(self) -> None:
        """The first copy may be evicted while the second still anchors what came after it."""
        pool = BlockPool(5, 2)
        first = write(pool, [1, 2])
        second = write(pool, [1, 2, 3, 4])
        assert find(pool, [1, 2, 3, 4]) == [first[0], second[1]]
        pool.release(first)
        pool.allocate(3)  # two empty blocks, then the first copy
        assert not pool.is_cached(first[0])
        assert find(pool, [1, 2, 3, 4]) == second
        pool.release(second)
        pool.allocate(2)
        assert find(pool, [1, 2, 3, 4]) == []

    def test_the_second_copy_may_go_first(self) -> None:
        pool = BlockPool(4, 2)
        first, second = write(pool, [1, 2]), write(pool, [1, 2])
        pool.release(second)
        others = pool.allocate(3)
        assert second[0] in others
        assert find(pool, [1, 2]) == first
        pool.check([first, others])

    def test_each_token_is_hashed_once_in_a_growing_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hashed = []
        plain = block_pool.xxh64_intdigest

        def counting(tokens: bytes, seed: int) -> int:
            hashed.append(tokens)
            return plain(tokens, seed)

        monkeypatch.setattr(block_pool, "xxh64_intdigest", counting)
        pool, keys = BlockPool(4, 16), []
        token_ids = list(range(3200))
        pool.extend_keys(keys, token_ids, 200)
        assert len(hashed) == 200
        pool.extend_keys(keys, token_ids, 200)
        pool.lookup(keys, 200)
        assert len(hashed) == 200
        pool.extend_keys(keys, [*token_ids, *range(20)], 201)
        assert len(hashed) == 201
        assert keys == keys_of(pool, [*token_ids, *range(16)])

    @pytest.mark.parametrize("seed", range(20))
    def test_against_a_plain_reference(self, seed: int) -> None:
        """Random use; hits are compared with a list of every prefix that is written, searched one by one."""
        randoms = random.Random(seed)
        num_blocks = randoms.randint(4, 24)
        pool = BlockPool(num_blocks, 2, num_kept=randoms.choice([None, 1, num_blocks // 2]))
        tables: list[list[int]] = []
        written: dict[int, tuple[int, ...]] = {}
        for _ in range(300):
            if tables and randoms.random() < 0.5:
                pool.release(tables.pop(randoms.randrange(len(tables))))
            else:
                token_ids = [randoms.randrange(2) for _ in range(randoms.randint(0, 12))]
                keys = keys_of(pool, token_ids)
                hits = pool.lookup(keys, len(keys))
                prefixes = [tuple(token_ids[: 2 * (block + 1)]) for block in range(len(keys))]
                length = 0
                while length < len(keys) and prefixes[length] in written.values():
                    length += 1
                assert [written[block] for block in hits] == prefixes[:length]
                assert pool.count_cached(keys, len(keys)) == length
                if len(keys) - length + pool.num_free_among(hits) > pool.num_free:
                    continue
                pool.claim(hits)
                new = pool.allocate(len(keys) - length)
                tables.append(hits + new)
                for block in new:
                    written.pop(block, None)
                pool.index(tables[-1], keys, length, len(keys))
                written.update(zip(new, prefixes[length:], strict=True))
            pool.check(tables)


class TestCollidingHashes:
    """Every block of every prompt has the same hash."""

    @pytest.fixture(autouse=True)
    def one_hash(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(block_pool, "xxh64_intdigest", lambda tokens, seed: 7)

    def test_other_tokens_are_not_served(self) -> None:
        pool = BlockPool(4, 2)
        table = write(pool, [1, 2])
        assert find(pool, [1, 2]) == table
        assert find(pool, [3, 4]) == []

    def test_the_same_tokens_after_another_prefix_are_not_served(self) -> None:
        pool = BlockPool(4, 2)
        first = write(pool, [1, 2])
        keys = keys_of(pool, [3, 4, 1, 2])
        table = pool.allocate(2)
        pool.index(table, keys, 0, 2)
        pool.release(first)
        assert find(pool, [1, 2]) == first
        assert find(pool, [3, 4, 1, 2]) == []
        assert not any(pool.is_cached(block) for block in table)

    def test_second_blocks_that_collide_are_told_apart_by_their_parents(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Hash and tokens of the second blocks agree; only what came before them differs."""
        monkeypatch.setattr(
            block_pool, "xxh64_intdigest", lambda tokens, seed: tokens[0] if seed == 0 else 99
        )
        pool = BlockPool(4, 2)
        first, second = write(pool, [1, 2, 5, 6]), write(pool, [3, 4, 5, 6])
        assert find(pool, [1, 2, 5, 6]) == first
        assert find(pool, [3, 4, 5, 6]) == second[:1]
        assert not pool.is_cached(second[1])
        pool.check([first, second])


class TestCheck:
    """It must notice, or the tests above prove little."""

    def test_a_held_block_that_nobody_counts(self) -> None:
        pool = BlockPool(2, 2)
        pool.allocate(1)
        with pytest.raises(InvariantError, match="ref_count 1 but 0 tables"):
            pool.check([])

    def test_a_free_block_in_use(self) -> None:
        pool = BlockPool(2, 2)
        table = pool.allocate(1)
        pool._free[table[0]] = None
        with pytest.raises(InvariantError, match="free list"):
            pool.check([table])

    def test_a_miscounted_cache(self) -> None:
        pool = BlockPool(2, 2)
        pool.release(write(pool, [1, 2]))
        pool._num_cached = 0
        with pytest.raises(InvariantError, match="1 free blocks are indexed but 0"):
            pool.check([])

    def test_an_orphan(self) -> None:
        pool = BlockPool(4, 2)
        table = write(pool, [1, 2, 3, 4])
        pool._index.pop(keys_of(pool, [1, 2])[0][0])
        with pytest.raises(InvariantError, match="outlived its parent"):
            pool.check([table])

    def test_a_misfiled_entry(self) -> None:
        pool = BlockPool(4, 2)
        table = write(pool, [1, 2])
        pool._nodes[table[0]] = None
        with pytest.raises(InvariantError, match="misfiled"):
            pool.check([table])

    def test_a_block_missing_from_the_index(self) -> None:
        pool = BlockPool(4, 2)
        table = write(pool, [1, 2])
        pool._index.clear()
        with pytest.raises(InvariantError, match="doesn't name them"):
            pool.check([table])
