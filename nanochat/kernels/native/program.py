"""Programs: the native operations of a step, recorded once and then run in one call, for any number of rows.

While a program records, every native op appends itself instead of running. Its pointers stay valid because
results come from the program's own memory, and inputs are buffers that the caller fills before each run. How
many rows an operation has is read when it runs, from a counter that belongs to the tensor it reads. Whatever
else is computed meanwhile comes to light when its result is read, since that lies elsewhere; only changes in
place of a program's tensors do not. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from nanochat.kernels.native.library import Library, Op

_ALIGNMENT = 64
_local = threading.local()


class NotNative(ValueError):
    """An operation has no native version for these tensors."""


class Counter:
    """How many rows a program's next run has of some kind, up to ``most``."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._number = ctypes.c_int32(0)
        self.address = ctypes.addressof(self._number)

    def set(self, number: int) -> None:
        """Raises ValueError if that is more than there is room for."""
        if not 0 <= number <= self.most:
            raise ValueError(f"there is room for {self.most} rows, not {number}")
        self._number.value = number


class _Lease(np.ndarray):
    """Memory in use by tensors; unlike a plain array, others may be told when it is dropped."""


class Arena:
    """Memory that results take turns to use, as they would with PyTorch's allocator; kept until the arena goes."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self.num_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, whose memory is given to another once nothing refers to it."""
        size = max(1, math.prod(shape)) * dtype.itemsize
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        free = self._free.setdefault(size, [])
        block = free.pop() if free else self._allocate(size)
        lease = block.view(_Lease)
        weakref.finalize(lease, free.append, block)
        count = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(lease)[:count].view(dtype).view(shape)

    def _allocate(self, size: int) -> np.ndarray:
        self.num_bytes += size
        whole = np.empty(
            size + _ALIGNMENT, dtype=np.uint8
        )  # zeros would take memory for rows that never come
        start = -whole.ctypes.data % _ALIGNMENT
        return whole[start : start + size]


class Program:
    """Operations in order, and what they read and write."""

    def __init__(self, library: Library, arena: Arena) -> None:
        self._library = library
        self._arena = arena
        self._ops: list[Op] = []
        self._array: ctypes.Array[Op] | None = None
        self._counters: dict[int, Counter] = {}
        """By the address of a tensor's memory."""
        self._kept: list[Any] = []
        """Tensors that operations point to."""
        self.wants_all = Counter(1)
        """0 where only the largest of each row of a `linear_largest` matters to the next run."""
        self.wants_all.set(1)

    def __len__(self) -> int:
        return len(self._ops)

    def input(self, tensor: torch.Tensor, counter: Counter) -> torch.Tensor:
        """Tell of a contiguous tensor that is filled before each run; its first ``counter`` rows count."""
        self._counters[_memory(tensor)] = counter
        self._kept.append(tensor)
        return tensor

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, native ops of this thread are appended to this program.

        Raises:
            NotNative: something else was computed, or an op can't be native.
        """
        if getattr(_local, "program", None) is not None:
            raise RuntimeError("a program is being recorded already")
        _local.program = self
        try:
            yield
        finally:
            _local.program = None
        self._array = (Op * len(self._ops))(*self._ops)

    def counter(self, *tensors: torch.Tensor) -> Counter:
        """Of tensors that this program fills, all with as many rows.

        Raises:
            NotNative: one of them comes from elsewhere.
        """
        counters = {self._counters.get(_memory(tensor)) for tensor in tensors}
        counter = counters.pop()
        if counter is None or counters:
            raise NotNative("a tensor was not computed by the program")
        return counter

    def result(self, shape: tuple[int, ...], dtype: torch.dtype, counter: Counter) -> torch.Tensor:
        tensor = self._arena.take(shape, dtype)
        self._counters[_memory(tensor)] = counter
        return tensor

    def append(self, op: Op, kept: list[Any]) -> None:
        self._ops.append(op)
        self._kept += kept

    def run(self) -> None:
        """Run everything that was recorded, on as many threads as PyTorch's ops would use here."""
        if self._array is None:
            raise RuntimeError("nothing has been recorded")
        self._library.run(self._array, len(self._ops), torch.get_num_threads())


def current_program() -> Program | None:
    """The one that this thread is recording."""
    program: Program | None = getattr(_local, "program", None)
    return program


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
