"""How many threads a CPU step uses: as many as really run at once, so that a busy machine isn't made to wait.

PyTorch's threads meet at a barrier hundreds of times a step. If another program holds one of the cores, every
meeting waits until the missing thread is scheduled again, and a step takes ten times as long as on one thread.
The governor sees that from outside, as processor time missing from the wall clock, and steps down; now and
then it tries one more.

Knows nothing of models: it is told when steps begin and end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

WINDOW_S = 0.4
"""Steps are judged together over at least this much time."""
BUSY_SHARE = 0.75
"""Below this share of what the threads could have run, somebody else is using the cores."""
FIRST_RETRY_S = 5.0
"""One thread more is tried after this long; twice as long after every try that failed ..."""
LAST_RETRY_S = 80.0
"""... up to this."""

CORES_TO_SHARE = 4
"""From so many cores on, one is left to the screen."""


def choose_threads(wish: int | None, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """``wish``, or ``OMP_NUM_THREADS``, or the physical cores that this process may use, less the screen's.

    Two threads on one core's two halves are no faster at products of matrices, and wait for each other.
    """
    import psutil

    if wish is not None:
        return wish
    if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    cores = int(psutil.cpu_count(logical=False) or psutil.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):  # not on every system
        cores = min(cores, len(os.sched_getaffinity(0)))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such system, or no container
        pass
    return cores - 1 if cores >= CORES_TO_SHARE else max(1, cores)


class ThreadGovernor:
    """Sets PyTorch's number of threads from how the steps before fared. For the step thread only."""

    def __init__(
        self,
        most: int,
        set_threads: Callable[[int], None] = torch.set_num_threads,
        wall_s: Callable[[], float] = time.monotonic,
        process_s: Callable[[], float] = time.process_time,
    ) -> None:
        """``most``: threads on a quiet machine. ``wall_s`` and ``process_s`` read the two clocks."""
        self.threads = most
        self._most = most
        self._set_threads = set_threads
        self._clocks = wall_s, process_s
        self._started = (0.0, 0.0)
        self._wall_s = 0.0
        self._process_s = 0.0
        self._is_trying = False
        """Whether the newest thread has yet to show that it gets a core."""
        self._retry_s = FIRST_RETRY_S
        self._retry_at_s = 0.0
        set_threads(most)

    def step_begins(self) -> None:
        """Start the clocks, and try one thread more if it is time to."""
        now_s = self._clocks[0]()
        if self.threads < self._most and now_s >= self._retry_at_s:
            self._is_trying = True
            self._use(self.threads + 1)
        self._started = now_s, self._clocks[1]()

    def step_ends(self) -> None:
        """Stop the clocks, and use one thread less if too little of the time was ours."""
        now_s = self._clocks[0]()
        self._wall_s += now_s - self._started[0]
        self._process_s += self._clocks[1]() - self._started[1]
        if self.threads == 1 or self._wall_s < WINDOW_S:
            return
        share = self._process_s / (self._wall_s * self.threads)
        if share < BUSY_SHARE:
            # Only tries become rarer: a load that takes several cores at once is no reason to wait for long.
            self._retry_s = min(2 * self._retry_s, LAST_RETRY_S) if self._is_trying else FIRST_RETRY_S
            self._retry_at_s = now_s + self._retry_s
            self._use(self.threads - 1)
        else:
            self._wall_s = self._process_s = 0.0
        self._is_trying = False

    def _use(self, threads: int) -> None:
        self.threads = threads
        self._wall_s = self._process_s = 0.0
        self._set_threads(threads)
