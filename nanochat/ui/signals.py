"""Ends the app when the system asks for it: an interrupt from outside, a shutdown, a dropped connection.

The app leaves as if the user had quit, so that chats are saved and the terminal is given back. Where it
can't, because its terminal is gone or takes nothing any more, the process ends all the same. Stopping and
going on (SIGTSTP, SIGCONT) is Textual's part, but it acts within the signal's handler, which may have come upon
code that holds the lock of the queue to the terminal: it would wait for itself. So its handlers are called on
the event loop. It clears the screen but draws only what changes afterwards, so the whole screen is drawn again
here. A stop that nobody can notice (SIGSTOP) is the app's own part: Textual would begin a second time, with
threads beside those that it has, and hang when it ends.
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
        self._is_awaiting = False

    @property
    def status(self) -> int | None:
        """The exit status that tells of the signal, as shells have it: 130 for an interrupt."""
        return None if self.number is None else 128 + self.number

    def attach(
        self,
        leave: Callable[[], object],
        has_left_terminal: Callable[[], bool],
        go_on: Callable[[bool], object],
    ) -> None:
        """From now on, on the running event loop, ``leave`` is called when a signal comes.

        ``go_on`` is called when the process has been stopped, with whether the terminal had been given back before,
        as ``has_left_terminal`` says: Textual has taken it again then.
        """
        self._loop, self._leave = asyncio.get_running_loop(), leave
        if self._is_awaiting and hasattr(signal, "SIGTSTP"):
            _on_loop(self._loop, signal.SIGTSTP, lambda stop: None if has_left_terminal() else stop())

            def take_up(retake: Callable[[], object]) -> None:
                has_left = has_left_terminal()
                if has_left:
                    retake()
                go_on(has_left)

            _on_loop(self._loop, signal.SIGCONT, take_up)
        if self.number is not None:
            self._loop.call_soon(leave)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Inside, signals that would end the process end the app. Those that are ignored stay so (nohup)."""
        attributes = _terminal_attributes()
        before = {number: signal.getsignal(number) for number in ENDING}
        stopping = [getattr(signal, name) for name in ("SIGTSTP", "SIGCONT") if hasattr(signal, name)]
        before_stopping = {number: signal.getsignal(number) for number in stopping}
        self._is_awaiting = True

        def handle(number: int, _: FrameType | None) -> None:
            if self.number is not None:
                return
            self.number = number
            threading.Thread(target=self._end_at_last, args=(attributes,), daemon=True).start()
            if self._loop is not None and self._leave is not None:
                with suppress(RuntimeError):  # the loop has just been closed
                    self._loop.call_soon_threadsafe(self._leave)

        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, handle)
        try:
            yield
        finally:
            self._is_awaiting = False
            for number, handler in before_stopping.items():
                signal.signal(number, handler)
            for number, handler in before.items():
                # The process is about to end; another signal must not disturb it.
                signal.signal(number, handler if self.number is None else signal.SIG_IGN)

    def _end_at_last(self, attributes: list[object] | None) -> None:
        time.sleep(GRACE_S)
        with suppress(Exception):  # nobody is left to be told, and the terminal must be given back
            self._save()
        if attributes is not None:
            import termios

            with suppress(termios.error):
                termios.tcsetattr(sys.__stdin__.fileno(), termios.TCSANOW, attributes)  # type: ignore[union-attr, arg-type]
        os._exit(self.status or 1)


def _on_loop(
    loop: asyncio.AbstractEventLoop, number: signal.Signals, handle: Callable[[Callable[[], object]], object]
) -> None:
    """When the signal comes, have ``handle`` called on the loop, with what has handled it until now."""
    first = signal.getsignal(number)

    def call_first() -> None:
        if callable(first):
            first(number, None)

    def schedule(_: int, __: FrameType | None) -> None:
        with suppress(RuntimeError):  # the loop has just been closed
            loop.call_soon_threadsafe(handle, call_first)

    signal.signal(number, schedule)


def _terminal_attributes() -> list[object] | None:
    try:
        import termios
    except ImportError:  # Windows
        return None
    try:
        return termios.tcgetattr(sys.__stdin__.fileno())  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError, termios.error):  # no standard input, or no terminal
        return None
