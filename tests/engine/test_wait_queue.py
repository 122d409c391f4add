"""The queue of waiting requests: its orders, its window, and how long the oldest has lacked memory."""

from __future__ import annotations

import pytest

from nanochat.engine.block_pool import InvariantError
from nanochat.engine.config import SamplingParams
from nanochat.engine.request import Request
from nanochat.engine.wait_queue import WaitQueue


def make(order: int, size: int, first_block: bytes | None = None) -> Request:
    request = Request(order, [1], SamplingParams())
    request.arrival_order, request.uncached_tokens = order, size
    request.block_keys = [] if first_block is None else [(hash(first_block), first_block)]
    return request


def fill(queue: WaitQueue, sizes: list[int]) -> list[Request]:
    requests = [make(order, size) for order, size in enumerate(sizes)]
    for request in requests:
        queue.add(request)
    return requests


def test_a_preempted_request_regains_its_place() -> None:
    queue = WaitQueue(patience=3)
    first, second, third = fill(queue, [5, 5, 5])
    queue.remove(second)
    queue.add(second)
    assert list(queue.by_arrival) == [first, second, third]
    queue.check()


def test_the_window_holds_the_oldest_and_the_smallest() -> None:
    queue = WaitQueue(patience=3)
    requests = fill(queue, [9, 8, 7, 6, 5, 4])
    assert set(queue.window(2, step=1)) == {requests[0], requests[1], requests[4], requests[5]}
    assert list(queue.window(6, step=1)) == requests


def test_nobody_overtakes_a_request_that_has_lacked_memory_for_long() -> None:
    queue = WaitQueue(patience=3)
    first, second, _ = fill(queue, [9, 1, 1])
    for step in (10, 11, 12, 13):
        assert len(list(queue.window(8, step))) == 3
        queue.note_blocked(step)
    assert (queue.blocked_steps(13), queue.blocked_steps(14)) == (3, 4)
    assert list(queue.window(8, step=14)) == [first]
    queue.remove(first)  # its wait is over: the next one's has not begun
    assert queue.blocked_steps(15) == 0
    assert len(list(queue.window(8, step=15))) == 2
    queue.note_blocked(15)
    assert queue.blocked_steps(16) == 1
    queue.remove(second)
    assert queue.blocked_steps(16) == 0


def test_one_that_has_less_to_compute_keeps_its_place_and_how_long_it_has_lacked_memory() -> None:
    queue = WaitQueue(patience=3)
    first, second, third = fill(queue, [9, 8, 7])
    queue.note_blocked(10)
    queue.resize(first, 2)
    queue.check()
    assert list(queue.by_arrival) == [first, second, third]
    assert set(queue.window(1, step=11)) == {first}
    assert queue.blocked_steps(12) == 2


def test_finds_those_that_begin_with_the_same_block() -> None:
    queue = WaitQueue(patience=3)
    twins = [make(0, 5, b"a"), make(2, 5, b"a")]
    others = [make(1, 5, b"b"), make(3, 5)]
    for request in (*twins, *others):
        queue.add(request)
    assert queue.sharing(twins[0].block_keys[0]) == twins
    assert queue.sharing(make(9, 5, b"c").block_keys[0]) == []
    for request in twins:
        queue.remove(request)
    assert queue.sharing(twins[0].block_keys[0]) == []
    queue.check()


def test_removing_a_stranger() -> None:
    queue = WaitQueue(patience=3)
    fill(queue, [5, 5])
    with pytest.raises(ValueError, match="request 7 isn't in the queue"):
        queue.remove(make(7, 5))


def test_check_notices_a_changed_size() -> None:
    queue = WaitQueue(patience=3)
    fill(queue, [5, 6])[0].uncached_tokens = 7
    with pytest.raises(InvariantError, match="two orders"):
        queue.check()


def test_check_notices_a_changed_prompt() -> None:
    queue = WaitQueue(patience=3)
    fill(queue, [5, 6])[0].block_keys = [(1, b"a")]
    with pytest.raises(InvariantError, match="families"):
        queue.check()
