"""Ctrl+C in a command: it always ends, soon, with status 130, and without a traceback.

Python raises ``KeyboardInterrupt`` wherever it happens to be; inside an import or a callback from native
code it may be swallowed or come out as another error, and while Python ends it is printed. So a clock runs
from the first interrupt on, and a second one ends the process at once. So does the first one within an import, where
native code may make an abort of the exception.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STATUS = 130
LEAVE_S = 1.5
"""An interrupted command is given this long to put its things in order."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, an interrupt raises ``KeyboardInterrupt``, and ends the process if that doesn't help.

    Nothing is changed where interrupts are ignored (a job in the background) or in another thread than
    the main one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not is_main or before is signal.SIG_IGN:
        yield
        return
    is_interrupted = False

    def interrupt(_: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        if is_interrupted or _is_importing(frame):
            os._exit(STATUS)
        is_interrupted = True
        threading.Thread(target=_end_at_last, daemon=True).start()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException:
        if is_interrupted:  # whatever native code has made of it, a broken model isn't what happened
            raise KeyboardInterrupt from None
        raise
    finally:
        if not is_interrupted:
            signal.signal(signal.SIGINT, before)
    if is_interrupted:
        raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _end_at_last() -> None:
    time.sleep(LEAVE_S)
    os._exit(STATUS)
