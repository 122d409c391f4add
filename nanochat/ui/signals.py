"""Ends the app when the system asks for it: an interrupt from outside, a shutdown, a dropped connection.

The app leaves as if the user had quit, so that chats are saved and the terminal is given back. Where it
can't, because its terminal is gone or takes nothing any more, the process ends all the same. Stopping and
going on (SIGTSTP, SIGCONT) is the driver's part: see `textual_private`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

GRACE_S = 4.0
"""The app is given this long to leave by itself."""

ENDING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
)


class EndingSignals:
    """Waits for a signal; ``number`` is the first that came, or None."""

    def __init__(self, save: Callable[[], object]) -> None:
        """``save``: what must be done even if the app hangs. It is called on another thread."""
        self.number: int | None = None
        self._save = save
        self._leave: Callable[[], object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._attributes: list[object] | None = None

    @property
    def status(self) -> int | None:
        """The exit status that tells of the signal, as shells have it: 130 for an interrupt."""
        return None if self.number is None else 128 + self.number

    def attach(self, leave: Callable[[], object]) -> None:
        """From now on, on the running event loop, ``leave`` is called when a signal comes."""
        self._loop, self._leave = asyncio.get_running_loop(), leave
        if self.number is not None:
            self._loop.call_soon(leave)

    def hang_up(self) -> None:
        """The terminal is gone, also where no signal says so because it is ignored (nohup). On any thread."""
        self._end(getattr(signal, "SIGHUP", 1))

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Inside, signals that would end the process end the app. Those that are ignored stay so (nohup)."""
        self._attributes = _terminal_attributes()
        before = {number: signal.getsignal(number) for number in ENDING}
        stopping = [getattr(signal, name) for name in ("SIGTSTP", "SIGCONT") if hasattr(signal, name)]
        before_stopping = {number: signal.getsignal(number) for number in stopping}

        def handle(number: int, _: FrameType | None) -> None:
            self._end(number)

        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in before_stopping.items():
                signal.signal(number, handler)
            for number, handler in before.items():
                # The process is about to end; another signal must not disturb it.
                signal.signal(number, handler if self.number is None else signal.SIG_IGN)

    def _end(self, number: int) -> None:
        if self.number is not None:
            return
        self.number = number
        threading.Thread(target=self._end_at_last, daemon=True).start()
        if self._loop is not None and self._leave is not None:
            with suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._leave)

    def _end_at_last(self) -> None:
        time.sleep(GRACE_S)
        with suppress(Exception):  # nobody is left to be told, and the terminal must be given back
            self._save()
        if self._attributes is not None:
            import termios

            with suppress(termios.error):
                termios.tcsetattr(sys.__stdin__.fileno(), termios.TCSANOW, self._attributes)  # type: ignore[union-attr, arg-type]
        os._exit(self.status or 1)


def _terminal_attributes() -> list[object] | None:
    try:
        import termios
    except ImportError:  # Windows
        return None
    try:
        return termios.tcgetattr(sys.__stdin__.fileno())  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError, termios.error):  # no standard input, or no terminal
        return None
