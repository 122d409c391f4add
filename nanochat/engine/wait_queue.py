"""Requests that wait for blocks, in two orders at once: by arrival and by how much is left to compute.

Knows nothing of budgets or blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from nanochat.engine.block_pool import BlockKey, InvariantError

if TYPE_CHECKING:
    from nanochat.engine.request import Request

by_arrival = attrgetter("arrival_order")
by_size = attrgetter("uncached_tokens", "arrival_order")
uncomputed = attrgetter("num_uncomputed_tokens")


class WaitQueue:
    """Two sorted lists: a binary search and one memmove to add or remove, nothing to read the heads.

    It also remembers since when the oldest request has lacked memory: after ``patience`` steps of that
    nobody may overtake it any more.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._arrival: list[Request] = []
        self._size: list[Request] = []
        self._families: dict[BlockKey, dict[int, Request]] = {}
        """By first block of the prompt, then by arrival."""
        self._blocked: Request | None = None
        self._blocked_since = 0

    def __len__(self) -> int:
        return len(self._arrival)

    @property
    def by_arrival(self) -> Sequence[Request]:
        """Oldest first. A preempted request is ahead of everyone who came later."""
        return self._arrival

    def add(self, request: Request) -> None:
        insort(self._arrival, request, key=by_arrival)
        insort(self._size, request, key=by_size)
        for key in request.block_keys[:1]:
            self._families.setdefault(key, {})[request.arrival_order] = request

    def remove(self, request: Request) -> None:
        """``request.uncached_tokens`` must be what it was when the request was added."""
        place = bisect_left(self._arrival, by_arrival(request), key=by_arrival)
        if self._arrival[place : place + 1] != [request]:
            raise ValueError(f"request {request.request_id} isn't in the queue")
        del self._arrival[place]
        del self._size[bisect_left(self._size, by_size(request), key=by_size)]
        for key in request.block_keys[:1]:
            del self._families[key][request.arrival_order]
            if not self._families[key]:
                del self._families[key]
        if request is self._blocked:
            self._blocked = None

    def resize(self, request: Request, uncached_tokens: int) -> None:
        """Keep a request in its place by arrival; it has so many tokens to compute now."""
        del self._size[bisect_left(self._size, by_size(request), key=by_size)]
        request.uncached_tokens = uncached_tokens
        insort(self._size, request, key=by_size)

    def sharing(self, first_block: BlockKey) -> list[Request]:
        """Those whose prompts begin with this block, oldest first."""
        return list(self._families.get(first_block, {}).values())

    def window(self, size: int, step: int) -> Iterable[Request]:
        """Who may be started in ``step``: the ``size`` oldest and ``size`` smallest, to bound the work."""
        if self.blocked_steps(step) > self._patience:
            return self._arrival[:1]
        if len(self._arrival) <= size:
            return self._arrival
        return {*self._arrival[:size], *self._size[:size]}

    def note_blocked(self, step: int) -> None:
        """Memory is short in ``step``: the oldest request, if not longer, has been waiting for it since."""
        if self._blocked is not self._arrival[0]:
            self._blocked, self._blocked_since = self._arrival[0], step

    def blocked_steps(self, step: int) -> int:
        """For how many steps the oldest request has lacked memory, as of ``step``."""
        return 0 if self._blocked is None else step - self._blocked_since

    def check(self) -> None:
        """Raises InvariantError if the two orders disagree or aren't in order. O(n log n)."""
        if self._arrival != sorted(self._size, key=by_arrival) or self._size != sorted(
            self._size, key=by_size
        ):
            raise InvariantError("The waiting queue's two orders are broken or hold different requests.")
        members = {order for family in self._families.values() for order in family}
        if members != {request.arrival_order for request in self._arrival if request.block_keys}:
            raise InvariantError("The waiting queue's families hold other requests than its orders.")
