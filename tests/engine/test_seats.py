"""Who sits where in the device's per-request state, and what the host believes to be there."""

from __future__ import annotations

import pytest

from nanochat.engine.config import SamplingParams
from nanochat.engine.request import Request, RequestStatus
from nanochat.engine.seats import Seats
from nanochat.engine.step_plan import ScheduledChunk


def running(count: int, **params: float) -> list[Request]:
    requests = [Request(n, [1], SamplingParams(**params), sampling_seed=n) for n in range(count)]  # type: ignore[arg-type]
    for request in requests:
        request.status = RequestStatus.RUNNING
    return requests


def chunks(requests: list[Request]) -> list[ScheduledChunk]:
    return [ScheduledChunk(request, 0, 1, samples=True) for request in requests]


def test_a_request_keeps_its_seat_and_others_have_others() -> None:
    seats = Seats(4)
    requests = running(4)
    first = seats.take(chunks(requests))
    assert sorted(seat.index for seat in first) == [0, 1, 2, 3]
    assert seats.take(chunks(requests[::-1])) == first[::-1]


def test_only_those_that_no_longer_run_make_room() -> None:
    seats = Seats(3)
    old = running(3)
    taken = seats.take(chunks(old))
    with pytest.raises(ValueError, match="more than 3"):
        seats.take(chunks(running(1)))
    old[1].status = RequestStatus.FINISHED
    new = running(1)
    assert seats.take(chunks([old[0], *new]))[1].index == taken[1].index
    assert seats.take(chunks([old[0], old[2]])) == [taken[0], taken[2]]


def test_after_a_preemption_nothing_of_the_block_table_is_known() -> None:
    seats = Seats(2)
    requests = running(2)
    for seat in seats.take(chunks(requests)):
        seat.num_blocks = 9
    requests[0].num_preemptions += 1
    again = seats.take(chunks(requests))
    assert [seat.num_blocks for seat in again] == [0, 9]
    assert len({seat.index for seat in again}) == 2


def test_seats_know_how_their_requests_are_sampled() -> None:
    seats = Seats(3)
    requests = running(2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.25)
    rows = [seat.index for seat in seats.take(chunks(requests))]
    assert seats.sampling.seeds[rows].tolist() == [0, 1]
    assert seats.sampling.temperature[rows].tolist() == [0.5, 0.5]
    assert seats.sampling.top_k[rows].tolist() == [7, 7]
    assert seats.sampling.min_p[rows].tolist() == [0.25, 0.25]
    assert seats.sampling.temperature[3] == 0  # the entry of padding rows is greedy
