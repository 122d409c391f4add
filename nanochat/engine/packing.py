"""Small arrays on their way between the host and a device, without anyone waiting for the copies.

Many arrays go to the device as one buffer. Knows nothing of what they hold.
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
        self._fields: list[tuple[int, int, tuple[int, ...], torch.dtype, np.dtype]] = []
        self.num_bytes = 0
        for shape, dtype in fields:
            size = math.prod(shape) * dtype.itemsize
            numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
            self._fields.append((self.num_bytes, size, shape, dtype, numpy_dtype))
            self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The fields of ``buffer [num_bytes]`` uint8, in the order given."""
        return [
            buffer[start : start + size].view(dtype).view(shape)
            for start, size, shape, dtype, _ in self._fields
        ]

    def arrays(self, buffer: np.ndarray) -> list[np.ndarray]:
        """The same of an array on the host, which costs a fifth."""
        return [
            buffer[start : start + size].view(dtype).reshape(shape)
            for start, size, shape, _, dtype in self._fields
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
    for view, array in zip(packing.arrays(host.numpy()), arrays, strict=True):
        view[...] = array
    return packing.views(host.to(device, non_blocking=True))


class HostCopies:
    """Copies of tensors, of one device, on the host: begun now, read later."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._copies = list(tensors)
        if tensors and tensors[0].device.type == "cuda":
            self._copies = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def are_ready(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> list[torch.Tensor]:
        """The copies, complete."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies
