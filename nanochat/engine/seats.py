"""Which row of the per-request state on the device each running request has, and what that row holds.

A request keeps its seat from its first step to its last, so that what a step samples can be read by the next
one on the device, and only what is new of a block table has to be sent. Knows nothing of schedules.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanochat.engine.request import Request, RequestStatus
from nanochat.engine.sampler import SamplingArrays
from nanochat.engine.step_plan import ScheduledChunk


class Seat:
    """One row of the state, as the host knows it."""

    __slots__ = ("has_seen", "index", "num_blocks", "num_preemptions")

    def __init__(self, index: int, num_preemptions: int) -> None:
        self.index = index
        self.num_blocks = 0
        """Entries of the request's block table that have been sent."""
        self.num_preemptions = num_preemptions
        """Of the request when it sat down: after another one its block table is a new one."""
        self.has_seen = False
        """Whether the state tells which tokens the request has had; only a repetition penalty asks for it."""


class Seats:
    """``capacity`` seats, for as many requests as may run at once.

    A seat is given to another request once its owner no longer runs. Steps launched for the owner may still
    be on their way: they come before those of the next one, since a device runs its steps in order.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sampling = SamplingArrays.blank(capacity + 1)
        """How each seat's request is sampled, its positions aside. The entry after the last seat is greedy."""
        self.sampling.repetition_penalty[:] = 1
        self._taken: dict[Request, Seat] = {}
        self._free = list(range(capacity - 1, -1, -1))

    def take(self, chunks: Sequence[ScheduledChunk]) -> list[Seat]:
        """The seats of a step's requests, in order; those without one sit down.

        Raises:
            ValueError: the step has more requests than there are seats.
        """
        seats = []
        for chunk in chunks:
            request = chunk.request
            seat = self._taken.get(request)
            if seat is None:
                seat = self._taken[request] = Seat(self._find(chunks), request.num_preemptions)
                own = SamplingArrays.from_requests([request], [0])
                for all_seats, value in zip(self.sampling, own, strict=True):
                    all_seats[seat.index] = value[0]
            elif seat.num_preemptions != request.num_preemptions:
                seat = self._taken[request] = Seat(seat.index, request.num_preemptions)
            seats.append(seat)
        return seats

    def _find(self, chunks: Sequence[ScheduledChunk]) -> int:
        if not self._free:
            staying = {chunk.request for chunk in chunks}
            for request in list(self._taken):
                if request.status is not RequestStatus.RUNNING and request not in staying:
                    self._free.append(self._taken.pop(request).index)
        if not self._free:
            raise ValueError(f"more than {self.capacity} requests run at once")
        return self._free.pop()
