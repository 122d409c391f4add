"""Opens the backend on a thread of its own, so that the screen is up and takes typing meanwhile."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

from nanochat.engine.progress import Progress
from nanochat.errors import NanochatError
from nanochat.ui.markdown_layout import highlighted

if TYPE_CHECKING:
    from nanochat.backend.interface import Backend
    from nanochat.backend.opening import BackendConfig

logger = logging.getLogger(__name__)

ENGINE_NICENESS = 3
YOUNG_ROUNDS = 1_000
"""So many of the garbage collector's quick rounds come before it looks through everything by itself: after some seven
million objects more than before, or half an hour with 8 answers. The app has it do so when nothing is answering."""
REPORT_INTERVAL_S = 0.05
"""Progress within a stage is passed on at most this often."""


class _AbandonedError(BaseException):
    """The app has quit; raised from the progress callback to end loading early.

    No ``Exception``: whatever runs the callback must not take it for a failure of its own.
    """


@dataclass
class LoadProgressed(Message):
    """Loading has come this far."""

    progress: Progress


@dataclass
class LoadFailed(Message):
    """The model can't be had; ``error`` is a sentence that says what to do."""

    error: str


@dataclass
class BackendReady(Message):
    """The backend takes requests; it is the receiver's to close."""

    backend: Backend


def _let_the_screen_go_first() -> None:
    """Make this thread, and those it starts, give way to the screen's when there are too few cores.

    The engine computes on every core without a pause; a key press should not wait for its turn. Linux
    counts niceness by thread, and new threads inherit it; elsewhere it would slow the screen too.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + ENGINE_NICENESS)


def _spare_the_collector() -> None:
    """Take what has been loaded out of the garbage collector's rounds.

    PyTorch and the tokenizers make about a million objects that stay to the end; looking through them
    stops every thread for more than 0.1 s, several times a second while answers are drawn. Looking through
    what the answers themselves have made takes as long in the end, and is put off.
    """
    gc.collect()
    gc.freeze()
    first, second, _ = gc.get_threshold()
    gc.set_threshold(first, second, YOUNG_ROUNDS)


class Loader:
    """A daemon thread that posts what it does.

    Not a Textual worker: those are waited for on exit, and importing PyTorch can't be interrupted.
    """

    def __init__(
        self,
        config: BackendConfig,
        post: Callable[[Message], object],
        before: Callable[[], object] | None = None,
    ) -> None:
        """``post`` must be safe to call from any thread; ``before`` is called on the loader's own first."""
        self._before = before
        self._config = config
        self._post = post
        self._is_abandoned = threading.Event()
        self._last_stage = ""
        self._last_report_s = 0.0
        self._thread = threading.Thread(target=self._run, name="nanochat-loader", daemon=True)

    def start(self) -> None:
        """Begin loading."""
        self._thread.start()

    def abandon(self, timeout_s: float) -> bool:
        """Ask to stop and wait a little; False if the thread is still busy after that."""
        self._is_abandoned.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_idle(self) -> bool:
        """Whether the thread has ended, or never began."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        _let_the_screen_go_first()
        try:
            if self._before is not None:
                self._report(Progress("Ending the model before"))
                self._before()
                self._before = None  # it may hold the model that has just ended
                gc.collect()
            from nanochat.backend.opening import open_backend

            backend = open_backend(self._config, self._report)
        except _AbandonedError:
            return
        except NanochatError as error:
            self._post(LoadFailed(str(error)))
        except Exception as error:  # whatever it is, the person in front of the screen must hear of it
            logger.exception("loading failed")
            kind = type(error).__name__
            self._post(
                LoadFailed(f"The model could not be loaded because of an internal error ({kind}: {error}).")
            )
        else:
            if self._is_abandoned.is_set():
                backend.close()
            else:
                highlighted("pass", "python")  # the first time takes 20 ms, which an answer would stand still
                _spare_the_collector()
                self._post(BackendReady(backend))

    def _report(self, progress: Progress) -> None:
        if self._is_abandoned.is_set():
            raise _AbandonedError
        now = time.monotonic()
        if progress.stage != self._last_stage or now - self._last_report_s >= REPORT_INTERVAL_S:
            self._last_stage, self._last_report_s = progress.stage, now
            self._post(LoadProgressed(progress))
