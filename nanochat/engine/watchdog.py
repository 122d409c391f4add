"""Notices a step that takes very long, and tells what it is doing. It never ends one: a machine may be slow.

The step thread says when a step begins and ends; a thread of the watchdog's own looks now and then, and writes
what it finds to the log. Knows nothing of torch, of requests or of how a step is computed.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nanochat.engine.stats import SlowStep

logger = logging.getLogger(__name__)

LIMIT_S = 30.0
"""A step that has taken longer is told of."""
CHECK_S = 5.0
"""How often it is looked for."""


class Watchdog:
    """Watches one thread's steps."""

    def __init__(self, describe: Callable[[], str], clock: Callable[[], float] = time.monotonic) -> None:
        """``describe`` says in a few words what the step does; called on any thread. ``clock`` in seconds."""
        self._describe = describe
        self._clock = clock
        self._begun_s: float | None = None
        self._what = ""
        """What the step in progress does, if its thread has said so."""
        self._told_s = LIMIT_S
        """When the step in progress is told of next, in seconds from its begin."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, watched: threading.Thread) -> None:
        """Begin to watch this thread, on a thread that ends with :meth:`close`."""

        def watch() -> None:
            while not self._closed.wait(CHECK_S):
                self.check(watched.ident)

        self._thread = threading.Thread(target=watch, name="nanochat-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more. The thread has ended on return: Python must not tear itself down under it."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def step(self, what: str = "") -> Iterator[None]:
        """Inside, the thread steps. ``what`` is said of it rather than what ``describe`` says."""
        self._told_s = LIMIT_S
        self._what = what
        self._begun_s = self._clock()
        try:
            yield
        finally:
            self._begun_s = None

    def slow(self) -> SlowStep | None:
        """The step in progress, if it has taken longer than ``LIMIT_S``. For any thread."""
        begun_s = self._begun_s  # once: the step may end meanwhile
        if begun_s is None or (seconds := self._clock() - begun_s) <= LIMIT_S:
            return None
        return SlowStep(seconds, self._what or self._describe())

    def check(self, ident: int | None = None) -> None:
        """Log a slow step, with where its thread is; again each time that it has taken twice as long."""
        slow = self.slow()
        if slow is None or slow.seconds <= self._told_s:
            return
        self._told_s = 2 * slow.seconds
        frame = sys._current_frames().get(ident) if ident is not None else None
        where = "".join(traceback.format_stack(frame)) if frame is not None else "(its thread has ended)\n"
        logger.warning("a step has taken %.0f s so far: %s\n%s", slow.seconds, slow.what, where)
