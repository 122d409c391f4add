"""Planning: budgets, order, fairness, what a plan says, and what a request is told about its times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from nanochat.engine.block_pool import InvariantError
from nanochat.engine.request import RequestStatus
from tests.engine.scheduling import Rig, scheduled, tokens


class TestOneStep:
    def test_decodes_first_then_prefills_within_one_budget(self) -> None:
        rig = Rig(budget=10)
        for salt in (1, 2, 3):
            rig.submit(tokens(3, salt), max_tokens=9)
        rig.step()
        rig.submit(tokens(30, salt=4))
        plan = rig.step()
        assert [chunk.request.request_id for chunk in plan.decodes] == [1, 2, 3]
        assert [(chunk.request.request_id, chunk.length) for chunk in plan.prefills] == [(4, 7)]
        assert plan.num_tokens == 10
        assert plan.chunks == plan.decodes + plan.prefills

    def test_several_unfinished_prefills_in_a_step(self) -> None:
        rig = Rig(budget=20)
        rig.submit(tokens(60, salt=1))
        rig.submit(tokens(25, salt=2))
        plan = rig.step()
        assert scheduled(plan) == {1: 10, 2: 10}
        assert plan.sampling == ()

    def test_only_the_last_chunk_samples(self) -> None:
        rig = Rig(budget=8)
        rig.submit(tokens(20), max_tokens=2)
        chunks = [rig.step().chunks[0][1:] for _ in range(4)]
        assert chunks == [(0, 8, False), (8, 8, False), (16, 4, True), (20, 1, True)]

    def test_max_num_seqs_bounds_a_step_and_who_holds_blocks(self) -> None:
        rig = Rig(max_num_seqs=3)
        for salt in range(8):
            rig.submit(tokens(3, salt))
        plans = rig.run()
        assert max(len(plan.chunks) for plan in plans) == 3
        rig.assert_finished_as_if_alone()

    def test_an_empty_plan_is_not_in_flight(self) -> None:
        rig = Rig()
        assert rig.plan().is_empty
        assert not rig.scheduler.has_work

    def test_blocks_are_taken_for_this_step_only(self) -> None:
        rig = Rig(num_blocks=32, block_size=4, budget=8)
        request = rig.submit(tokens(22), max_tokens=4)
        held = []
        while request.status is not RequestStatus.FINISHED:
            rig.plan()
            held.append(rig.pool.num_used)
            rig.commit()
        assert held == [2, 4, 6, 6, 6, 7]  # 8, 16, 22, 23, 24 and 25 tokens

    def test_the_same_token_is_never_computed_twice(self) -> None:
        rig = Rig(budget=5)
        requests = [rig.submit(tokens(length, salt), max_tokens=5) for salt, length in enumerate((13, 4, 9))]
        computed: Counter[tuple[int, int]] = Counter()
        for plan in rig.run():
            for request, start, length, _ in plan.chunks:
                computed.update((request.request_id, position) for position in range(start, start + length))
        assert set(computed.values()) == {1}
        assert len(computed) == sum(len(request.token_ids) - 1 for request in requests)


class TestFairness:
    @pytest.mark.parametrize("depth", [0, 1, 2])
    def test_twelve_equal_requests_with_a_budget_of_four(self, depth: int) -> None:
        """However many steps have passed, nobody has been served twice more often than anyone else."""
        rig = Rig(budget=4)
        for salt in range(12):
            rig.submit(tokens(1, salt), max_tokens=8)
        served: Counter[int] = Counter(dict.fromkeys(range(1, 13), 0))
        for plan in rig.run(depth):
            served.update(scheduled(plan).keys())
            assert len(plan.chunks) == 4
            assert max(served.values()) - min(served.values()) <= 1
        assert set(served.values()) == {8}

    def test_round_robin_is_deterministic(self) -> None:
        def orders() -> list[list[int]]:
            rig = Rig(budget=3, max_num_seqs=8)
            for salt in range(7):
                rig.submit(tokens(1, salt), max_tokens=6)
            return [list(scheduled(plan)) for plan in rig.run()]

        assert orders() == orders()

    def test_newcomers_take_turns_with_decodes_that_fill_the_budget(self) -> None:
        rig = Rig(budget=4)
        for salt in range(4):
            rig.submit(tokens(1, salt), max_tokens=40)
        rig.step()
        rig.submit(tokens(1, salt=9), max_tokens=40)
        assert set(scheduled(rig.step())) == {1, 2, 3, 4}  # served before the newcomer came
        assert set(scheduled(rig.step())) == {5, 1, 2, 3}

    def test_a_flood_of_newcomers_does_not_starve_decodes(self) -> None:
        """Each decode is served as often as if all ``max_num_seqs`` were decoding."""
        rig = Rig(budget=4, max_num_seqs=8)
        chats = [rig.submit(tokens(1, salt), max_tokens=40) for salt in range(4)]
        for salt in range(4, 44):
            for part in range(6):
                rig.submit(tokens(1, salt + 100 * part), max_tokens=1)
            rig.step()
        assert min(chat.num_generated_tokens for chat in chats) >= 13

    def test_decodes_that_fill_the_budget_do_not_starve_a_prefill(self) -> None:
        rig = Rig(budget=4)
        for salt in range(4):
            rig.submit(tokens(1, salt), max_tokens=40)
        rig.step()
        late = rig.submit(tokens(12, salt=9), max_tokens=1)
        for _ in range(12):
            rig.step()
        assert late.finish_reason == "length"


class TestLongPrompts:
    @pytest.mark.parametrize("depth", [0, 1])
    def test_a_short_message_behind_a_long_prompt_is_answered_within_three_steps(self, depth: int) -> None:
        rig = Rig(num_blocks=2_048, block_size=16, budget=2_048)
        long = rig.submit(tokens(30_000, salt=1), max_tokens=1)
        for _ in range(3):
            rig.step()
        short = rig.submit(tokens(30, salt=2), max_tokens=1)
        lengths = []
        while not short.num_generated_tokens:
            lengths.append(scheduled(rig.plan())[long.request_id])
            if len(rig.in_flight) > depth:
                rig.commit()
        assert len(lengths) <= 3
        assert lengths[0] == 2_048 - 30  # the long prompt gets all that the short one left

    def test_a_long_prompt_advances_every_step_by_its_share(self) -> None:
        """However many shorter ones keep coming."""
        rig = Rig(num_blocks=1_024, block_size=16, budget=256, max_num_seqs=64)
        long = rig.submit(tokens(5_000, salt=1), max_tokens=1)
        for salt in range(2, 42):
            for part in range(3):
                rig.submit(tokens(200, salt + 100 * part), max_tokens=1)
            plan = rig.step()
            assert plan.num_tokens == 256
            assert scheduled(plan)[long.request_id] >= 128 or long.num_generated_tokens
            if long.num_generated_tokens:
                return
        pytest.fail("the long prompt has not come to its end")

    def test_long_prefills_do_not_hold_up_running_chats(self) -> None:
        rig = Rig(num_blocks=256, block_size=16, budget=64)
        chats = [rig.submit(tokens(5, salt), max_tokens=100) for salt in range(8)]
        rig.step()
        for salt in (20, 21):
            rig.submit(tokens(1_000, salt), max_tokens=1)
        for _ in range(30):
            assert {chat.request_id for chat in chats} <= scheduled(rig.step()).keys()

    def test_ten_long_prompts_do_not_block_a_short_one(self) -> None:
        rig = Rig(num_blocks=2_048, block_size=16, budget=512, max_num_seqs=32)
        for salt in range(10):
            rig.submit(tokens(2_500, salt), max_tokens=1)
        rig.step()
        short = rig.submit(tokens(30, salt=50), max_tokens=1)
        rig.step()
        assert short.num_generated_tokens == 1

    def test_a_single_spare_token_is_shared_by_turns(self) -> None:
        rig = Rig(budget=5)
        for salt in range(4):
            rig.submit(tokens(1, salt), max_tokens=60)
        rig.step()
        long = rig.submit(tokens(90, salt=8), max_tokens=1)
        rig.step()
        short = rig.submit(tokens(4, salt=9), max_tokens=1)
        for _ in range(8):
            rig.step()
        assert short.num_generated_tokens == 1
        assert long.num_computed_tokens >= 4

    def test_equally_long_prompts_run_one_after_the_other(self) -> None:
        rig = Rig(num_blocks=128, budget=32)
        for salt in range(3):
            rig.submit(tokens(100, salt), max_tokens=1)
        finished = [[chunk.request.request_id for chunk in plan.sampling] for plan in rig.run()]
        assert [step for step, ids in enumerate(finished) if ids] == [3, 6, 9]


class TestTimes:
    def test_are_the_callers(self) -> None:
        rig = Rig(budget=8)
        request = rig.submit(tokens(12), max_tokens=3)
        rig.step()  # planned at 1, committed at 2; and so on
        rig.step()
        assert (request.first_scheduled_s, request.first_token_s, request.finished_s) == (1.0, 4.0, None)
        rig.run()
        assert (request.first_scheduled_s, request.first_token_s, request.finished_s) == (1.0, 4.0, 8.0)

    def test_survive_a_preemption(self) -> None:
        rig = Rig(num_blocks=4, block_size=4, watermark=0)
        rig.submit(tokens(4, salt=1), max_tokens=8)
        victim = rig.submit(tokens(4, salt=2), max_tokens=8)
        rig.run()
        assert victim.num_preemptions
        assert (victim.first_scheduled_s, victim.first_token_s) == (1.0, 2.0)


class TestEnding:
    def test_eos_belongs_to_the_answer(self) -> None:
        rig = Rig()
        request = rig.submit(tokens(6), max_tokens=50, eos=range(16))
        rig.run()
        assert (request.finish_reason, request.num_generated_tokens) == ("stop", 1)

    def test_ignore_eos(self) -> None:
        rig = Rig()
        request = rig.submit(tokens(6), max_tokens=5, eos=range(16))
        object.__setattr__(request.params, "ignore_eos", True)
        rig.run()
        assert (request.finish_reason, request.num_generated_tokens) == ("length", 5)

    def test_the_caller_ends_it_for_a_reason_of_its_own(self) -> None:
        rig = Rig()
        request = rig.submit(tokens(6), max_tokens=50)
        rig.step()
        rig.scheduler.finish(request, "stop", 9.0)
        rig.check()
        assert (request.finish_reason, request.finished_s, rig.pool.num_used) == ("stop", 9.0, 0)

    def test_a_request_is_queued_once(self) -> None:
        rig = Rig()
        request = rig.submit(tokens(6))
        with pytest.raises(ValueError, match="request 1 has been added before"):
            rig.scheduler.add(request)


class TestFailedStep:
    def test_ends_its_requests_and_only_those(self) -> None:
        rig = Rig(budget=16)
        failed = [rig.submit(tokens(7, salt), max_tokens=9) for salt in (1, 2)]
        waiting = rig.submit(tokens(30, salt=3), max_tokens=9)
        rig.scheduler.fail(rig.plan(), 9.0)
        rig.in_flight.clear()
        assert [request.finish_reason for request in (*failed, waiting)] == ["error", "error", "error"]
        rig.check()
        assert (rig.pool.num_used, rig.pool.num_cached) == (0, 0)

    def test_nothing_it_or_a_later_step_wrote_is_ever_found(self) -> None:
        """The first chunk ends inside a block, which a second step in flight then fills."""
        rig = Rig(budget=6)
        request = rig.submit(tokens(18), max_tokens=9)
        plans = [rig.plan(), rig.plan()]
        assert rig.scheduler.fail(plans[0], 9.0) == [request]
        assert rig.pool.num_used == 3  # the second step still uses them
        rig.in_flight.popleft()
        rig.commit()
        assert (rig.pool.num_used, rig.pool.num_cached) == (0, 0)
        again = rig.submit(tokens(18), max_tokens=2)
        rig.run()
        assert (again.num_cached_tokens, again.finish_reason) == (0, "length")

    def test_one_that_had_ended_before_keeps_its_reason(self) -> None:
        rig = Rig()
        request = rig.submit(tokens(6), max_tokens=9)
        plan = rig.plan()
        rig.scheduler.finish(request, "cancelled", 5.0)
        assert rig.scheduler.fail(plan, 9.0) == []
        rig.in_flight.clear()
        rig.check()
        assert (request.finish_reason, rig.pool.num_used) == ("cancelled", 0)


class TestInvariants:
    """They must notice, or checking them everywhere proves little."""

    @pytest.mark.parametrize(
        ("damage", "sentence"),
        [
            (lambda rig: rig.requests[0].block_table.append(63), "ref_count 0 but 1 tables"),
            (lambda rig: setattr(rig.requests[0], "num_steps_in_flight", 2), "miscounts its steps in flight"),
            (lambda rig: setattr(rig.requests[0], "num_pending_tokens", 0), "miscounts its pending tokens"),
            (lambda rig: setattr(rig.requests[0], "num_computed_tokens", 2), "blocks for 2 tokens"),
            (lambda rig: setattr(rig.requests[0], "num_written_tokens", 60), "wrote more than planned"),
            (lambda rig: setattr(rig.requests[0], "max_total_tokens", 3), "outgrew its limit"),
            (lambda rig: setattr(rig.requests[0], "status", RequestStatus.WAITING), "waits but holds blocks"),
            (
                lambda rig: setattr(rig.requests[1], "status", RequestStatus.RUNNING),
                "queued but doesn't wait",
            ),
            (lambda rig: setattr(rig.requests[1], "num_computed_tokens", 1), "has progress"),
            (lambda rig: setattr(rig.requests[1], "uncached_tokens", 0), "two orders"),
            (lambda rig: setattr(rig.scheduler, "max_num_batched_tokens", 3), "over budget"),
            (lambda rig: setattr(rig.scheduler, "max_num_seqs", 0), "holds too many requests"),
            (lambda rig: rig.scheduler._running.clear(), "ref_count 1 but 0 tables"),  # a leak
        ],
    )
    def test_damage_is_noticed(self, damage: Callable[[Rig], None], sentence: str) -> None:
        rig = Rig(max_num_seqs=1)
        rig.submit(tokens(5, salt=1), max_tokens=9)
        rig.submit(tokens(9, salt=2), max_tokens=9)
        rig.submit(tokens(7, salt=3), max_tokens=9)
        rig.plan()
        damage(rig)
        with pytest.raises(InvariantError, match=sentence):
            rig.scheduler.check_invariants()

    def test_an_unwritten_block_in_the_index_is_noticed(self) -> None:
        rig = Rig()
        request = rig.submit(tokens(9), max_tokens=9)
        rig.plan()
        rig.pool.index(request.block_table, request.block_keys, 0, 1)
        with pytest.raises(InvariantError, match="isn't written yet"):
            rig.scheduler.check_invariants()
