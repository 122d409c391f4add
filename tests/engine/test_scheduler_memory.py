"""Memory: who starts, who is preempted, what is shared, and that nobody waits for ever."""

from __future__ import annotations

from collections import Counter

import pytest

from nanochat.engine.request import RequestStatus
from tests.engine.scheduling import Rig, scheduled, tokens


class TestAllocation:
    def test_a_second_identical_prompt_of_300_tokens_computes_12(self) -> None:
        rig = Rig(num_blocks=64, block_size=16, budget=512)
        for _ in range(2):
            request = rig.submit(tokens(300), max_tokens=1)
            rig.step()
        assert request.num_cached_tokens == 288

    def test_a_prompt_of_whole_blocks_computes_its_last_one(self) -> None:
        rig = Rig(num_blocks=64, block_size=16, budget=512)
        for _ in range(2):
            request = rig.submit(tokens(304), max_tokens=1)
            rig.step()
        assert request.num_cached_tokens == 288

    def test_the_next_turn_of_a_chat_finds_the_generated_tokens_too(self) -> None:
        rig = Rig(num_blocks=64, block_size=4)
        first = rig.submit(tokens(10), max_tokens=12)
        rig.run()
        second = rig.submit([*first.token_ids, *tokens(5, salt=7)], max_tokens=2)
        rig.run()
        assert second.num_cached_tokens == 20  # of 22, the last of which was never fed back
        assert (rig.scheduler.prefix_query_tokens, rig.scheduler.prefix_hit_tokens) == (10 + 27, 20)

    def test_without_a_prefix_cache_nothing_is_shared(self) -> None:
        rig = Rig(prefix_caching=False)
        for _ in range(2):
            rig.submit(tokens(20), max_tokens=9)
            rig.step()
        assert (rig.pool.num_used, rig.pool.num_cached, rig.scheduler.prefix_hit_tokens) == (11, 0, 0)


class TestSharedPrefixes:
    @pytest.mark.parametrize("depth", [0, 1, 2])
    def test_many_requests_compute_it_once(self, depth: int) -> None:
        rig = Rig(num_blocks=256, block_size=4, budget=64)
        for salt in range(16):
            rig.submit([*tokens(400), *tokens(5, salt + 1)], max_tokens=1)
        plans = rig.run(depth)
        assert sum(plan.num_tokens for plan in plans) == 400 + 16 * 5
        rig.assert_finished_as_if_alone()

    def test_one_that_waits_for_it_does_not_hold_up_others(self) -> None:
        rig = Rig(num_blocks=256, block_size=4, budget=64)
        rig.submit([*tokens(400), 1], max_tokens=1)
        rig.submit([*tokens(400), 2], max_tokens=1)
        other = rig.submit(tokens(30, salt=5), max_tokens=1)
        rig.step()
        assert other.num_generated_tokens == 1

    def test_its_wait_ends_when_the_other_is_cancelled(self) -> None:
        rig = Rig(budget=8)
        first = rig.submit(tokens(40), max_tokens=1)
        second = rig.submit(tokens(40), max_tokens=1)
        rig.step()
        rig.scheduler.finish(first, "cancelled", 5.0)
        rig.run()
        assert second.num_cached_tokens == 8
        assert second.finish_reason == "length"

    def test_one_whose_prefix_has_been_computed_meanwhile_counts_as_short(self) -> None:
        """It was queued as a long prompt; by the time the first has gone it needs one token."""
        rig = Rig(num_blocks=512, block_size=4, budget=64)
        first = rig.submit(tokens(800), max_tokens=1)
        rig.submit(tokens(1_000, salt=5), max_tokens=1)
        twin = rig.submit(tokens(800), max_tokens=1)
        while not first.num_generated_tokens:
            rig.step()
        rig.step()
        assert twin.num_generated_tokens == 1


class TestPreemption:
    def test_the_most_recent_request_outside_the_batch_is_the_victim(self) -> None:
        rig = Rig(num_blocks=4, block_size=4, budget=12, watermark=0)
        for salt in range(4):
            rig.submit(tokens(3, salt), max_tokens=4)
        rig.step()
        rig.step()
        plan = rig.step()  # all four need a second block
        assert list(scheduled(plan)) == [1, 2]
        assert [victim.request_id for victim in plan.preempted] == [4, 3]
        assert [request.request_id for request in rig.scheduler.waiting] == [3, 4]

    def test_nobody_is_preempted_for_a_newer_request(self) -> None:
        """The newest stalls on the blocks it has, and goes on when others end."""
        rig = Rig(num_blocks=3, block_size=4, watermark=0)
        rig.submit(tokens(7, salt=1), max_tokens=2)
        rig.submit(tokens(4, salt=2), max_tokens=3)
        plans = rig.run()
        assert rig.scheduler.num_preemptions == 0
        assert [len(plan.chunks) for plan in plans] == [2, 1, 1, 1]
        rig.assert_finished_as_if_alone()

    def test_an_older_request_outside_the_batch_is_not_preempted_either(self) -> None:
        """A decode that needs a block waits for the long prompt ahead of it."""
        rig = Rig(num_blocks=6, block_size=4, budget=5, watermark=0)
        long = rig.submit(tokens(22, salt=1), max_tokens=1)
        rig.step()
        short = rig.submit(tokens(1, salt=2), max_tokens=6)
        rig.run()
        assert (long.num_preemptions, short.finish_reason) == (0, "length")
        rig.assert_finished_as_if_alone()

    def test_nothing_starts_in_a_step_that_preempted(self) -> None:
        rig = Rig(num_blocks=5, block_size=4, watermark=0)
        for salt in range(4):
            rig.submit(tokens(4, salt), max_tokens=8)
        for salt in range(10, 16):
            rig.submit(tokens(1, salt), max_tokens=2)
        while rig.scheduler.has_work:
            waiting = set(rig.scheduler.waiting)
            plan = rig.step()
            assert not (plan.preempted and waiting & {chunk.request for chunk in plan.chunks})
        assert rig.scheduler.num_preemptions
        rig.assert_finished_as_if_alone()

    def test_nobody_is_preempted_in_a_step_that_started_someone(self) -> None:
        """Decodes fill the budget, so an overdue prompt starts first, on the last free block."""
        rig = Rig(num_blocks=3, block_size=3, budget=2, watermark=0)
        for salt, (length, answer) in enumerate([(2, 5), (1, 8), (2, 5)]):
            rig.submit(tokens(length, salt), answer)
        for _ in range(2):
            rig.step()
        plan = rig.step()
        assert (plan.preempted, [chunk.request.request_id for chunk in plan.prefills]) == ((), [3])
        rig.run()
        rig.assert_finished_as_if_alone()

    def test_a_request_in_flight_is_not_preempted(self) -> None:
        rig = Rig(num_blocks=4, block_size=4, watermark=0)
        for salt in range(2):
            rig.submit(tokens(7, salt), max_tokens=9)
        rig.plan()
        rig.plan()
        assert len(rig.plan().preempted) == 0  # both need a block, both are in flight
        rig.run(depth=2)
        rig.assert_finished_as_if_alone()

    def test_two_prompts_that_each_need_most_of_the_pool_take_turns_without_thrashing(self) -> None:
        rig = Rig(num_blocks=20, block_size=4, budget=16)
        for salt in range(6):
            rig.submit(tokens(50, salt), max_tokens=8)
        plans = rig.run()
        assert rig.scheduler.num_preemptions == 0
        assert sum(plan.num_tokens for plan in plans) == 6 * 57  # nothing was computed twice

    def test_the_watermark_leaves_room_to_grow(self) -> None:
        def preemptions(watermark: float) -> int:
            rig = Rig(num_blocks=40, block_size=4, budget=64, watermark=watermark)
            for salt in range(30):
                rig.submit(tokens(15, salt), max_tokens=20)
            rig.run()
            rig.assert_finished_as_if_alone()
            return rig.scheduler.num_preemptions

        assert preemptions(0.2) < preemptions(0.0)


class TestWaitingForMemory:
    def test_nobody_takes_the_blocks_that_a_started_prompt_still_needs(self) -> None:
        rig = Rig(num_blocks=24, block_size=4, budget=16, watermark=0)
        long = rig.submit(tokens(80, salt=1), max_tokens=1)
        rig.step()
        short = rig.submit(tokens(20, salt=2), max_tokens=1)
        while not long.num_generated_tokens:
            assert list(scheduled(rig.step())) == [long.request_id]
        rig.run()
        assert short.finish_reason == "length"

    def test_one_of_about_its_size_does_not_overtake_it(self) -> None:
        rig = Rig(num_blocks=32, block_size=4, budget=64, watermark=0)
        rig.submit(tokens(60, salt=1), max_tokens=60)
        rig.step()
        rig.submit(tokens(90, salt=2), max_tokens=1)
        rig.submit(tokens(50, salt=3), max_tokens=1)
        assert list(scheduled(rig.step())) == [1]

    def overtaken(self, patience: int, running: int, large: int) -> int:
        """How many small requests end while a large one lacks memory, because of a running one."""
        rig = Rig(num_blocks=32, block_size=4, budget=64, patience=patience, watermark=0)
        rig.submit(tokens(running, salt=1), max_tokens=40)
        for _ in range(2):
            rig.step()
        blocked = rig.submit(tokens(large, salt=2), max_tokens=1)
        small = 0
        while blocked.status is RequestStatus.WAITING:
            rig.submit(tokens(4, salt=3 + small), max_tokens=1)
            small += 1
            rig.step()
            assert small < 500
        return Counter(request.status for request in rig.requests[2:])[RequestStatus.FINISHED]

    @pytest.mark.parametrize(("running", "large"), [(40, 100), (80, 60)])
    def test_smaller_requests_may_go_ahead_for_a_while_only(self, running: int, large: int) -> None:
        """Whether the large one exceeds a step's budget of 64 tokens or not."""
        assert self.overtaken(0, running, large) <= 3
        assert 20 <= self.overtaken(20, running, large) <= 24

    def test_a_large_request_starts_when_others_sample_their_last_token(self) -> None:
        """Their blocks are free before its second chunk needs them."""
        rig = Rig(num_blocks=8, block_size=4, budget=9, watermark=0)
        rig.submit(tokens(8, salt=1), max_tokens=2)
        rig.step()
        large = rig.submit(tokens(28, salt=2), max_tokens=1)
        plan = rig.step()
        assert [chunk.request.request_id for chunk in plan.decodes] == [1]
        assert large.num_computed_tokens == 8
        assert len(rig.run()) == 3
        assert rig.scheduler.num_preemptions == 0
