"""The terminal around the app: refuses one that can't show it, and keeps stray output off the screen.

C code (CUDA, tokenizers, compilers) writes to file descriptors 1 and 2 without asking, which would
corrupt the picture. While the app runs both lead to a log file, and Textual alone has the terminal.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nanochat.errors import NanochatError
from nanochat.stray_output import diverted
from nanochat.ui.web import is_in_browser

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MIN_COLUMNS = 40
MIN_ROWS = 10


class UnfitTerminal(NanochatError):
    """The app can't be shown here; the message says why and what to do."""


def check_terminal() -> None:
    """Make sure that the app can be shown.

    Raises:
        UnfitTerminal: there is no terminal, it is too plain, or too small.
    """
    if is_in_browser():
        return
    if not sys.stdin.isatty() or _screen_descriptor() is None:
        raise UnfitTerminal(
            "The chat app needs a terminal for its input and output; in a pipe or script, "
            'use nanochat ask "your question".'
        )
    if os.name == "posix" and os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        raise UnfitTerminal(
            "This terminal says that it can't move its cursor (TERM is unset, dumb or unknown); use another "
            'terminal, set TERM to its real type, or use nanochat ask "your question".'
        )
    columns, rows = os.get_terminal_size(_screen_descriptor() or 0)
    if 0 < columns < MIN_COLUMNS or 0 < rows < MIN_ROWS:  # 0 means that the terminal doesn't know
        raise UnfitTerminal(
            f"The terminal has {columns} columns and {rows} rows, but the app needs {MIN_COLUMNS} and "
            f"{MIN_ROWS} at least; enlarge it and start again."
        )


def _screen_descriptor() -> int | None:
    """The terminal's output: where Textual writes, or standard output when that is redirected.

    For a browser, Textual writes packets to standard output.
    """
    if is_in_browser():
        return 1
    return next((descriptor for descriptor in (2, 1) if os.isatty(descriptor)), None)


class _Screen(io.FileIO):
    """What Textual writes to: nothing that happens to the terminal is an error there.

    Textual's thread that writes would end with the first one, and the app wait for it for ever.
    """

    def __init__(self, descriptor: int, lost: Callable[[], object]) -> None:
        super().__init__(descriptor, "w")
        self._lost: Callable[[], object] | None = lost

    def write(self, data: ReadableBuffer) -> int:
        """What the terminal has taken, at least a byte; or all of it, once the terminal has failed."""
        try:
            while self._lost is not None:
                if (written := super().write(data)) is not None:
                    return written
                # Not to be waited for: other programs that have the terminal open leave that behind.
                os.set_blocking(self.fileno(), True)
        except OSError:
            lost, self._lost = self._lost, None
            if lost is not None:
                lost()
        return memoryview(data).nbytes


@contextmanager
def reserved_screen(log: Path, lost: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Inside, descriptors 1 and 2 lead to ``log``; Textual's own output still reaches the terminal.

    Textual writes to ``sys.__stderr__`` and asks ``sys.__stdout__`` for the terminal's size, so both
    are given a descriptor of their own meanwhile. ``lost`` is called, on the thread that writes, when the terminal
    takes nothing any more.
    """
    descriptor = _screen_descriptor()
    if descriptor is None:
        yield
        return
    saved_streams = sys.__stdout__, sys.__stderr__
    is_blocking = os.get_blocking(descriptor)
    screen = _Screen(os.dup(descriptor), lost)
    terminal = io.TextIOWrapper(
        io.BufferedWriter(screen), encoding="utf-8", errors="replace", line_buffering=True
    )
    try:
        with diverted(log):
            sys.__stdout__ = sys.__stderr__ = terminal  # type: ignore[misc]
            yield
    finally:
        sys.__stdout__, sys.__stderr__ = saved_streams  # type: ignore[misc]
        terminal.close()
        with suppress(OSError):
            os.set_blocking(descriptor, is_blocking)
