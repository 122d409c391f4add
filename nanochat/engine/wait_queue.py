"""Requests that wait for blocks, in two orders at once: by arrival and by how much is left to compute.

Knows nothing of budgets or blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanochat.engine.request import Request

_by_arrival = attrgetter("arrival_order")
_by_size = attrgetter("uncached_tokens", "arrival_order")


class WaitQueue:
    """Sorted lists: a binary search and one memmove to add or remove, nothing to read the heads."""

    def __init__(self) -> None:
        self._arrival: list[Request] = []
        self._size: list[Request] = []

    def __len__(self) -> int:
        return len(self._arrival)

    @property
    def by_arrival(self) -> Sequence[Request]:
        """Oldest first. A preempted request keeps its place, ahead of everyone who came later."""
        return self._arrival

    @property
    def by_size(self) -> Sequence[Request]:
        """Fewest uncached tokens first (as found when the request was queued), then the oldest."""
        return self._size

    def add(self, request: Request) -> None:
        insort(self._arrival, request, key=_by_arrival)
        insort(self._size, request, key=_by_size)

    def remove(self, request: Request) -> None:
        """``request.uncached_tokens`` must be what it was when the request was added."""
        del self._arrival[bisect_left(self._arrival, _by_arrival(request), key=_by_arrival)]
        del self._size[bisect_left(self._size, _by_size(request), key=_by_size)]
