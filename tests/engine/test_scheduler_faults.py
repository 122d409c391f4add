"""Faults that other engines have had, each as a test on the scheduler alone."""

from __future__ import annotations

import pytest

from nanochat.engine import block_pool
from nanochat.engine.prompt_limit import too_long
from nanochat.engine.recorder import Holdings
from nanochat.engine.request import Request, RequestStatus
from nanochat.engine.scheduler import Scheduler
from nanochat.engine.stats import FREE
from nanochat.engine.wait_queue import WaitQueue
from nanochat.errors import InvalidOption, NotEnoughMemory, PromptTooLong
from tests.engine.fake_device import reference_tokens
from tests.engine.scheduling import Rig, scheduled, tokens

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


class TestOutgrowingThePool:
    @DEPTHS
    def test_a_request_that_fills_the_pool_ends_with_length_and_others_are_unharmed(self, depth: int) -> None:
        rig = Rig(num_blocks=8, block_size=4)
        greedy = rig.submit(tokens(5, salt=1), max_tokens=10_000)
        others = [rig.submit(tokens(3, salt), max_tokens=9) for salt in (2, 3, 4)]
        rig.run(depth)
        assert greedy.finish_reason == "length"
        assert len(greedy.token_ids) == 8 * 4 + 1  # the last token needs no slot
        assert [request.num_generated_tokens for request in others] == [9, 9, 9]
        rig.assert_finished_as_if_alone()

    @DEPTHS
    def test_max_model_len_ends_a_request(self, depth: int) -> None:
        rig = Rig(max_model_len=20)
        request = rig.submit(tokens(11), max_tokens=1_000)
        rig.run(depth)
        assert (request.finish_reason, len(request.token_ids)) == ("length", 20)


class TestPreemption:
    @DEPTHS
    @pytest.mark.parametrize("prefix_caching", [True, False])
    def test_texts_are_those_of_an_undisturbed_run(self, depth: int, prefix_caching: bool) -> None:
        """The victims find their own freed blocks again, and neither lose nor repeat a token."""
        rig = Rig(num_blocks=6, block_size=4, budget=16, prefix_caching=prefix_caching, watermark=0)
        requests = [rig.submit(tokens(3, salt), max_tokens=14) for salt in range(6)]
        rig.run(depth)
        assert rig.scheduler.num_preemptions >= 2
        assert sum(request.num_preemptions for request in requests) == rig.scheduler.num_preemptions
        assert all(request.num_generated_tokens == 14 for request in requests)
        rig.assert_finished_as_if_alone()

    def test_a_victim_recovers_through_the_prefix_cache(self) -> None:
        rig = Rig(num_blocks=8, block_size=4, watermark=0)
        rig.submit(tokens(12, salt=1), max_tokens=6)
        victim = rig.submit(tokens(16, salt=2), max_tokens=6)
        while not victim.num_preemptions:
            rig.step()
        tokens_then = list(victim.token_ids)
        while victim.status is RequestStatus.WAITING:
            plan = rig.step()
        assert victim.num_written_tokens > 16
        assert scheduled(plan)[victim.request_id] < 16
        assert victim.token_ids[: len(tokens_then)] == tokens_then
        assert victim.num_cached_tokens == 0  # what the user is told is what the first admission found
        rig.run()
        rig.assert_finished_as_if_alone()


class TestPromptLengths:
    @DEPTHS
    @pytest.mark.parametrize("budget", [1, 7, 8, 9, 64])
    def test_every_boundary(self, depth: int, budget: int) -> None:
        block_size, longest = 8, 48
        lengths = {1, 7, 8, 9, 16, budget - 1, budget, budget + 1, longest - 2, longest - 1}
        for length in sorted(lengths - {0, longest, 63, 64, 65}):
            rig = Rig(num_blocks=16, block_size=block_size, budget=budget, max_model_len=longest)
            rig.submit(tokens(length), max_tokens=3)
            rig.submit(tokens(length), max_tokens=3)
            rig.run(depth)
            rig.assert_finished_as_if_alone()

    def test_the_longest_prompt_gets_one_token(self) -> None:
        rig = Rig(max_model_len=48)
        request = rig.submit(tokens(47), max_tokens=10)
        rig.run()
        assert (request.num_generated_tokens, request.finish_reason) == (1, "length")


class TestSamePrefixInOneStep:
    @DEPTHS
    def test_no_early_hit_and_no_second_computation(self, depth: int) -> None:
        """The twins wait for the first one's blocks to be written, then share them."""
        rig = Rig(num_blocks=64, block_size=4, budget=256)
        twins = [rig.submit([*tokens(40), salt], max_tokens=4) for salt in range(4)]
        first = rig.plan()
        assert scheduled(first) == {1: 41}
        if depth:
            assert len(rig.plan().prefills) == 0  # still unwritten
        rig.commit()
        assert scheduled(rig.plan()) == {1: 1, 2: 1, 3: 1, 4: 1}
        assert [request.num_cached_tokens for request in twins] == [0, 40, 40, 40]
        tables = [request.block_table[:10] for request in twins]
        assert tables == [tables[0]] * 4
        rig.run(depth)
        rig.assert_finished_as_if_alone()

    def test_identical_answers_computed_side_by_side_stay_findable(self) -> None:
        """The partial last block of a shared prompt is computed twice; what follows it must not be orphaned."""
        rig = Rig(num_blocks=32, block_size=4)
        twins = [rig.submit(tokens(6), max_tokens=12) for _ in range(2)]
        rig.run()
        assert twins[0].token_ids == twins[1].token_ids
        for twin in twins:
            follow_up = rig.submit([*twin.token_ids, 900], max_tokens=1)
            rig.run()
            assert follow_up.num_cached_tokens == 16  # of 18 + 1 tokens: the last one sampled was never fed
        rig.assert_finished_as_if_alone()

    def test_who_waits_behind_a_preamble_is_counted_once_a_step(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Several prompts that begin alike are done in one step, and many more wait."""
        rig = Rig(max_num_seqs=4, budget=64)
        preamble = tokens(8)
        first = rig.submit([*preamble, 2_000], max_tokens=8)
        waiting = [rig.submit([*preamble, *tokens(5, salt=n)], max_tokens=1) for n in range(3, 23)]
        resized: list[Request] = []
        resize = WaitQueue.resize

        def note(queue: WaitQueue, request: Request, uncached_tokens: int) -> None:
            resized.append(request)
            resize(queue, request, uncached_tokens)

        monkeypatch.setattr(WaitQueue, "resize", note)
        rig.step()
        assert first.num_generated_tokens == 1
        assert resized == waiting
        assert {request.uncached_tokens for request in waiting} == {5}
        rig.step()  # three more, and nothing new for those behind them
        assert sum(request.num_generated_tokens for request in waiting) == 3
        assert resized == waiting
        rig.run()
        rig.assert_finished_as_if_alone()


class TestCancel:
    def test_queued(self) -> None:
        rig = Rig()
        request = rig.submit(tokens(9))
        rig.scheduler.finish(request, "cancelled", 5.0)
        rig.check()
        assert (request.finish_reason, request.finished_s, rig.scheduler.has_work) == (
            "cancelled",
            5.0,
            False,
        )

    def test_in_flight_frees_only_when_collected(self) -> None:
        rig = Rig()
        request = rig.submit(tokens(9), max_tokens=9)
        rig.plan()
        rig.plan()
        rig.scheduler.finish(request, "cancelled", 5.0)
        rig.check()
        assert rig.pool.num_used == 3
        assert rig.scheduler.has_work
        assert not rig.scheduler.num_running + rig.scheduler.num_waiting
        owner = Holdings.of(rig.scheduler).block_map().owner
        assert owner.count(request.request_id) == 3  # nobody else can have them yet
        assert owner.count(FREE) == len(owner) - 3
        assert rig.commit() == []
        assert rig.pool.num_used == 3
        assert rig.commit() == []
        assert rig.pool.num_used == 0
        assert request.num_generated_tokens == 0

    def test_during_its_prefill_chunk(self) -> None:
        rig = Rig(budget=8)
        request = rig.submit(tokens(30))
        rig.step()
        rig.plan()
        rig.scheduler.finish(request, "cancelled", 5.0)
        rig.check()
        rig.commit()
        assert (rig.pool.num_used, rig.pool.num_cached) == (0, 4)  # what it wrote can still be reused

    def test_twice_and_after_the_end(self) -> None:
        rig = Rig()
        request = rig.submit(tokens(9), max_tokens=2)
        other = rig.submit(tokens(9, salt=1), max_tokens=2)
        rig.plan()
        rig.scheduler.finish(request, "cancelled", 5.0)
        rig.scheduler.finish(request, "cancelled", 6.0)
        rig.commit()
        rig.scheduler.finish(request, "cancelled", 7.0)
        rig.run()
        rig.scheduler.finish(other, "cancelled", 8.0)
        rig.check()
        assert (request.finish_reason, request.finished_s) == ("cancelled", 5.0)
        assert other.finish_reason == "length"

    def test_of_one_that_shares_blocks(self) -> None:
        rig = Rig()
        first = rig.submit(tokens(16), max_tokens=8)
        rig.step()
        second = rig.submit(tokens(16), max_tokens=8)
        rig.step()
        rig.scheduler.finish(first, "cancelled", 5.0)
        rig.check()
        rig.run()
        assert second.token_ids == reference_tokens(second)


class TestNeverRuns:
    @pytest.mark.parametrize(
        ("num_tokens", "max_model_len", "model_limit", "advice"),
        [
            (529_009, 8_192, 8_192, "shorten it: this model takes no more than 8,191."),
            (5_000, 1_000, 8_192, "shorten it, or start with --max-model-len 5001 or more."),
            (20_000, 16_000, 32_768, "start with --kv-blocks 1251 or more (should"),
            (20_000, 1_000, 32_768, "--kv-blocks 1251 or more and --max-model-len 20001 or more (should"),
        ],
    )
    def test_the_advice_can_be_followed(
        self, num_tokens: int, max_model_len: int, model_limit: int, advice: str
    ) -> None:
        sentence = too_long(num_tokens, max_model_len, model_limit, num_blocks=1_000, block_size=16)
        assert sentence.startswith(
            f"The prompt has {num_tokens:,} tokens but at most {max_model_len - 1:,} fit"
        )
        assert advice in sentence

    def test_a_prompt_without_room_for_an_answer_is_refused(self) -> None:
        rig = Rig(max_model_len=48)
        with pytest.raises(PromptTooLong, match=r"48 tokens but at most 47 fit"):
            rig.scheduler.check_fits(48)
        with pytest.raises(PromptTooLong, match=r"50 tokens but at most 47 fit"):
            rig.submit(tokens(50))
        rig.scheduler.check_fits(47)
        assert not rig.scheduler.has_work

    def test_an_empty_prompt_is_refused(self) -> None:
        with pytest.raises(InvalidOption, match="empty"):
            Rig().submit([])

    def test_max_model_len_beyond_the_cache_is_refused_with_what_fits(self) -> None:
        rig = Rig(num_blocks=8, block_size=4, max_model_len=33)
        with pytest.raises(NotEnoughMemory, match="the longest that does is 33"):
            Scheduler(rig.pool, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=34)


class TestOverlappedSteps:
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_chunks_and_preemption_lose_and_repeat_nothing(self, depth: int) -> None:
        rig = Rig(num_blocks=9, block_size=4, budget=7, watermark=0)
        for salt, length in enumerate((3, 20, 5, 11, 1, 17)):
            rig.submit(tokens(length, salt), max_tokens=9)
        plans = rig.run(depth)
        assert rig.scheduler.num_preemptions > 0
        assert any(not chunk.samples for plan in plans for chunk in plan.prefills)
        rig.assert_finished_as_if_alone()

    def test_a_row_may_feed_a_token_that_is_still_in_flight(self) -> None:
        rig = Rig()
        request = rig.submit(tokens(5), max_tokens=3)
        assert rig.plan().sampling
        assert (request.num_pending_tokens, request.num_tokens) == (1, 6)
        assert rig.plan().decodes[0][1:] == (5, 1, True)
        assert rig.plan().decodes[0][1:] == (6, 1, True)
        assert rig.plan().is_empty  # max_tokens is reached, though nothing has been collected
        assert request.num_generated_tokens == 0
        rig.run()
        rig.assert_finished_as_if_alone()

    def test_tokens_after_the_end_are_dropped(self) -> None:
        rig = Rig()
        rehearsal = rig.submit(tokens(5, salt=3), max_tokens=6)
        rig.run()
        answer = rehearsal.token_ids[5:]
        assert answer[0] != answer[1]
        request = rig.submit(tokens(5, salt=3), max_tokens=6, eos=[answer[1]])
        for _ in range(4):
            rig.plan()
        assert [rig.commit() for _ in range(4)] == [[(request, answer[0])], [(request, answer[1])], [], []]
        assert request.finish_reason == "stop"
        assert (rig.pool.num_used, rig.pool.num_cached) == (
            0,
            2,
        )  # the rehearsal's: a dropped token filled this one's second

    def test_steps_are_collected_in_order(self) -> None:
        rig = Rig()
        rig.submit(tokens(5), max_tokens=3)
        rig.plan()
        rig.plan()
        rig.in_flight.popleft()
        with pytest.raises(block_pool.InvariantError, match="Step 2 isn't the oldest one in flight"):
            rig.commit()

    def test_one_token_a_sampling_row(self) -> None:
        rig = Rig()
        rig.submit(tokens(5))
        plan = rig.plan()
        with pytest.raises(ValueError, match="step 1 samples 1 tokens, not 2"):
            rig.scheduler.commit(plan, [1, 2], 0.0)
        rig.commit()


class TestHashCollision:
    def test_no_wrong_kv_is_served(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(block_pool, "xxh64_intdigest", lambda tokens, seed: 7)
        rig = Rig(num_blocks=64, block_size=4)
        for salt in (1, 2, 1, 3, 1):
            rig.submit(tokens(13, salt), max_tokens=6)
            rig.step()
        rig.run()
        rig.assert_finished_as_if_alone()
