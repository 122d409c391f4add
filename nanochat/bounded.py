"""Reads files of which nobody knows how large they are: a device, say, never ends."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def read_at_most(file: Path, limit: int) -> bytes:
    """All of a file.

    Raises:
        OSError: it can't be read, or has more than ``limit`` bytes, which is told as the system does.
    """
    with file.open("rb") as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(file))
    return content
