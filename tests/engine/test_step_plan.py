"""A plan, and a plan in the making."""

from __future__ import annotations

from nanochat.engine.config import SamplingParams
from nanochat.engine.request import Request
from nanochat.engine.step_plan import Draft, ScheduledChunk, StepPlan


def make(order: int, length: int = 8) -> Request:
    request = Request(order, list(range(length)), SamplingParams())
    request.arrival_order = order
    return request


class TestStepPlan:
    def test_says_what_the_batch_holds(self) -> None:
        decode = ScheduledChunk(make(1), 8, 1, True)
        middle, last = ScheduledChunk(make(2), 0, 5, False), ScheduledChunk(make(3), 4, 4, True)
        plan = StepPlan(7, (decode,), (middle, last), ())
        assert plan.chunks == (decode, middle, last)
        assert plan.sampling == (decode, last)
        assert (plan.num_tokens, plan.is_empty) == (10, False)
        assert StepPlan(8, (), (), (make(4),)).is_empty


class TestSchedule:
    def test_a_decode_is_a_prefill_of_one_token(self) -> None:
        """The quick way and the general one do the same."""
        drafts = [Draft(step=5, now=2.0, budget=4) for _ in range(2)]
        requests = [make(1), make(1)]
        for request in requests:
            request.num_computed_tokens, request.first_scheduled_s = 7, 1.0
        drafts[0].schedule_decode(requests[0], 7)
        drafts[1].schedule_prefill(requests[1], 1)
        assert drafts[0].decodes[0][1:] == drafts[1].prefills[0][1:] == (7, 1, True)
        assert drafts[0].budget == drafts[1].budget == 3
        for name in Request.__slots__:
            assert getattr(requests[0], name) == getattr(requests[1], name), name

    def test_a_middle_chunk_samples_nothing(self) -> None:
        draft, request = Draft(step=5, now=2.0, budget=4), make(1)
        draft.schedule_prefill(request, 4)
        assert (request.num_pending_tokens, request.num_steps_in_flight, request.last_step) == (0, 1, 5)
        assert (request.first_scheduled_s, draft.budget) == (2.0, 0)


class TestReserve:
    def test_takes_a_share(self) -> None:
        draft = Draft(step=5, now=0.0, budget=9)
        assert (draft.reserve(0.5, make(1)), draft.budget) == (4, 5)

    def test_of_a_single_token_every_other_turn(self) -> None:
        oldest = make(1)
        for last_step, reserved in ((3, 1), (4, 0)):
            oldest.last_step = last_step
            assert Draft(step=5, now=0.0, budget=1).reserve(0.5, oldest) == reserved


class TestNextVictim:
    def test_most_recent_first_and_each_once(self) -> None:
        draft, requests = Draft(step=5, now=0.0, budget=9), [make(order) for order in (2, 4, 1, 3)]
        victims = [draft.next_victim(requests, requests[2]) for _ in range(4)]
        assert [victim and victim.request_id for victim in victims] == [4, 3, 2, None]

    def test_none_that_came_earlier(self) -> None:
        draft, requests = Draft(step=5, now=0.0, budget=9), [make(order) for order in (1, 2, 3)]
        assert draft.next_victim(requests, requests[2]) is None
        assert draft.next_victim(requests, requests[1]) is requests[2]
        requests[2].num_steps_in_flight = 1
        assert Draft(step=5, now=0.0, budget=9).next_victim(requests, requests[2]) is None

    def test_none_in_flight_or_scheduled_meanwhile(self) -> None:
        draft, requests = Draft(step=5, now=0.0, budget=9), [make(order) for order in (1, 2, 3, 4)]
        requests[3].num_steps_in_flight = 1
        assert draft.next_victim(requests, requests[0]) is requests[2]
        draft.schedule_decode(requests[1], 7)
        assert draft.next_victim(requests, requests[0]) is None
