"""Many small arrays in one buffer, so that one copy brings all of them to a device.

Knows nothing of what they hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT = 16
"""Bytes. Triton compiles a kernel again for pointers that aren't aligned to 16."""


class Packing:
    """Where tensors of given shapes and types lie in a buffer, one after the other."""

    def __init__(self, fields: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._fields: list[tuple[int, int, tuple[int, ...], torch.dtype]] = []
        self.num_bytes = 0
        for shape, dtype in fields:
            size = math.prod(shape) * dtype.itemsize
            self._fields.append((self.num_bytes, size, shape, dtype))
            self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The fields of ``buffer [num_bytes]`` uint8, in the order given."""
        return [
            buffer[start : start + size].view(dtype).view(shape) for start, size, shape, dtype in self._fields
        ]


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """``[num_bytes]`` uint8 on the host, uninitialised, from which copies to ``device`` are asynchronous.

    It may be dropped at once: its allocator keeps pinned memory until the copies are done, then reuses it.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Each array as a tensor of its type on ``device``, by one asynchronous copy."""
    packing = Packing([(array.shape, torch.from_numpy(array).dtype) for array in arrays])
    host = host_buffer(packing.num_bytes, device)
    for view, array in zip(packing.views(host), arrays, strict=True):
        view.numpy()[...] = array
    return packing.views(host.to(device, non_blocking=True))
