"""One request's blocks: how much fits, what starting it costs, what its end will free."""

from __future__ import annotations

import random

import pytest

from nanochat.engine.block_pool import BlockPool
from nanochat.engine.config import SamplingParams
from nanochat.engine.kv_cache_manager import KVCacheManager
from nanochat.engine.request import Request
from nanochat.errors import NotEnoughMemory


def make_request(length: int, salt: int = 0) -> Request:
    return Request(salt, [1_000 * salt + position for position in range(length)], SamplingParams())


def compute(manager: KVCacheManager, request: Request) -> None:
    """Give a started request all the blocks it lacks, as written."""
    length = request.num_tokens - request.num_computed_tokens
    manager.grow(request, length)
    manager.index(request, request.num_computed_tokens, request.num_tokens)
    request.num_computed_tokens = request.num_written_tokens = request.num_tokens


def test_a_request_of_the_maximum_length_must_fit() -> None:
    pool = BlockPool(4, 4)
    KVCacheManager(pool, 17)
    with pytest.raises(NotEnoughMemory, match=r"18 doesn't fit a cache of 4 blocks of 4 tokens; .* is 17"):
        KVCacheManager(pool, 18)


@pytest.mark.parametrize("seed", range(10))
def test_the_fit_equals_a_block_by_block_search(seed: int) -> None:
    randoms = random.Random(seed)
    for _ in range(50):
        pool = BlockPool(randoms.randint(4, 20), randoms.randint(1, 8))
        manager = KVCacheManager(pool, 2)
        request = make_request(200)
        manager.grow(request, randoms.randint(1, 2 * pool.block_size))
        request.num_computed_tokens = randoms.randint(0, len(request.block_table) * pool.block_size)
        pool.allocate(randoms.randint(0, pool.num_free))
        blocks = len(request.block_table) + pool.num_free
        length = 0
        while -(-(request.num_computed_tokens + length + 1) // pool.block_size) <= blocks:
            length += 1
        assert manager.room(request) == length
        free = pool.num_free
        assert manager.grow(request, length) == free
        assert pool.num_free == 0


class TestStart:
    def test_cached_blocks_that_nobody_holds_cost_as_much_as_new_ones(self) -> None:
        pool = BlockPool(8, 4)
        manager = KVCacheManager(pool, 2)
        first = make_request(13)
        compute(manager, first)
        manager.release(first)
        again = make_request(17)
        assert manager.count_cached(again) == 12
        assert not manager.start(again, 100, spare_blocks=4, soon_blocks=0)
        assert (again.block_table, pool.num_used) == ([], 0)
        assert manager.start(again, 100, spare_blocks=5, soon_blocks=0)
        assert (again.num_computed_tokens, manager.lacking_blocks(again)) == (12, 2)

    def test_cached_blocks_in_use_cost_nothing(self) -> None:
        manager = KVCacheManager(BlockPool(8, 4), 2)
        compute(manager, make_request(13))
        again = make_request(17)
        assert not manager.start(again, 100, spare_blocks=1, soon_blocks=0)
        assert manager.start(again, 100, spare_blocks=2, soon_blocks=0)

    def test_the_first_chunk_needs_blocks_that_are_free_now(self) -> None:
        manager = KVCacheManager(BlockPool(8, 4), 2)
        request = make_request(20)
        assert not manager.start(request, 8, spare_blocks=1, soon_blocks=9)
        assert not manager.start(request, 8, spare_blocks=2, soon_blocks=2)
        assert manager.start(request, 8, spare_blocks=2, soon_blocks=3)

    def test_the_last_token_is_never_taken_from_the_cache(self) -> None:
        manager = KVCacheManager(BlockPool(8, 4), 2)
        compute(manager, make_request(12))
        again = make_request(12)
        assert manager.start(again, 100, spare_blocks=5, soon_blocks=0)
        assert again.num_computed_tokens == 8


def test_only_blocks_that_nobody_else_holds_are_about_to_be_freed() -> None:
    manager = KVCacheManager(BlockPool(16, 4), 2)
    ending, other, going_on = make_request(13), make_request(9), make_request(20, salt=1)
    compute(manager, ending)
    assert manager.start(other, 100, spare_blocks=9, soon_blocks=0)
    compute(manager, going_on)
    ending.max_total_tokens, other.max_total_tokens, going_on.max_total_tokens = 14, 30, 30
    assert manager.about_to_be_freed([ending, other, going_on]) == 0
    ending.num_pending_tokens = 1
    assert manager.about_to_be_freed([ending, other, going_on]) == 2  # the first two of four are shared
