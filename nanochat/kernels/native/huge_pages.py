"""Memory for weights in pages of 2 MiB, where the system has them.

A step reads all weights, one after the other. In pages of 4 KiB the processor looks up an address every 4 KiB, and its
prefetching ends there as often (docs/kernels.md has what that costs). Knows nothing of what the memory is for.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref

import torch

_PAGE = 2 << 20
_AT_ONCE = 16 << 20
"""Bytes of addresses; memory is taken only for those that are written to."""
_ALIGNMENT = 64


class Room:
    """Tensors side by side, since most weights are smaller than a page; large ones apart. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: weakref.ref[mmap.mmap] | None = None
        """The newest; it goes when its tensors have gone."""
        self._used = 0

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A uint8 tensor of any content."""
        size = math.prod(shape)
        if size >= _AT_ONCE:
            # Beside small ones it would stay for as long as the last of them.
            return torch.frombuffer(_map(size), dtype=torch.uint8, count=size).view(shape)
        with self._lock:
            region = None if self._region is None else self._region()
            if region is None or self._used + size > len(region):
                region = _map(_AT_ONCE)
                self._region, self._used = weakref.ref(region), 0
            start, self._used = self._used, self._used + -(-size // _ALIGNMENT) * _ALIGNMENT
        return torch.frombuffer(region, dtype=torch.uint8, count=size, offset=start).view(shape)


def _map(size: int) -> mmap.mmap:
    region = mmap.mmap(-1, -(-size // _PAGE) * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # of a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE)
    return region


ROOM = Room()
"""Of this process."""
