"""Where output goes that nobody asked for: C and Rust code writes to descriptors 1 and 2 without asking.

It would corrupt the app's picture and a command's answer, and what a tokenizer prints may come from a
hostile model. Knows nothing of terminals or engines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_LOG_BYTES = 1_000_000
"""A log longer than this is started anew."""


def log_file() -> Path:
    """Where stray output and unexpected errors go."""
    from platformdirs import user_log_path

    return user_log_path("nanochat") / "app.log"


@contextmanager
def diverted(log: Path, descriptors: Sequence[int] = (1, 2)) -> Iterator[None]:
    """Inside, these descriptors lead to ``log``, or nowhere if it can't be written. Not for two threads."""
    _flush()
    saved: dict[int, int] = {}
    target = open_log(log)
    try:
        for descriptor in descriptors:
            with suppress(OSError):  # closed by whoever started us
                saved[descriptor] = os.dup(descriptor)
                os.dup2(target, descriptor)
        yield
    finally:
        _flush()
        for descriptor, original in saved.items():
            os.dup2(original, descriptor)
            os.close(original)
        os.close(target)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def open_log(path: Path) -> int:
    """A descriptor that appends to ``path``, or leads nowhere if that can't be written; the caller closes it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        too_long = path.exists() and path.stat().st_size > MAX_LOG_BYTES
        anew = os.O_TRUNC if too_long else 0
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | anew, 0o600)
    except OSError:  # a read-only home: the work is worth more than its log
        return os.open(os.devnull, os.O_WRONLY)
