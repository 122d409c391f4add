"""Time for laying out long texts: a slice now and then, so that keys are answered in between."""

from __future__ import annotations

import time

SLICE_S = 0.04
"""Laying out may take this much processor time at a time."""
MAX_SLICE_S = 0.1
"""And this long in all: on a busy machine, other programs have their turn meanwhile."""
REST_S = 0.15
"""Without :meth:`Pace.begin`, the next slice begins this long after one."""


class Pace:
    """Shared by all texts of a view, which together keep to it. For one thread."""

    def __init__(self) -> None:
        self._end_s = 0.0
        self._cpu_end_s = 0.0

    def begin(self) -> None:
        """A new slice begins."""
        self._end_s = time.monotonic() + MAX_SLICE_S
        self._cpu_end_s = time.thread_time() + SLICE_S

    def has_time(self) -> bool:
        """Whether anything is left of the slice."""
        if time.monotonic() > self._end_s + REST_S:
            self.begin()
        return time.monotonic() < self._end_s and time.thread_time() < self._cpu_end_s
