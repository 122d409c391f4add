"""How an operation comes to be: its descriptor filled from tensors, then recorded where a program is, else run at once.

What the C code can't do is refused before anything is touched.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from nanochat.kernels.native import library as c
from nanochat.kernels.native.library import Op
from nanochat.kernels.native.program import NotNative, current_program

_TYPES = {torch.float32: c.FLOAT32, torch.bfloat16: c.BFLOAT16, torch.int8: c.INT8}


def emit(op: Op, read: list[torch.Tensor], kept: list[Any]) -> None:
    """Append to the program that is recorded, or run. ``read``: tensors of a step, all with as many rows."""
    program = current_program()
    if program is not None:
        op.rows = program.counter(*read).address
        program.append(op, kept)
        return
    rows = ctypes.c_int32(read[0].shape[0])
    op.rows = ctypes.addressof(rows)
    found = c.find()
    if found is None:
        raise NotNative("there are no native kernels here")
    found.run((Op * 1)(op), 1, torch.get_num_threads())


def result_like(shape: tuple[int, ...], dtype: torch.dtype, read: torch.Tensor) -> torch.Tensor:
    program = current_program()
    if program is None:
        return torch.empty(shape, dtype=dtype)
    return program.result(shape, dtype, program.counter(read))


def type_of(tensor: torch.Tensor) -> int:
    known = _TYPES.get(tensor.dtype)
    if known is None or tensor.device.type != "cpu":
        raise NotNative(f"{tensor.dtype} on {tensor.device} isn't native")
    return known


def row_stride(tensor: torch.Tensor) -> int:
    """Numbers from one row to the next; each row lies in one piece, of whole vectors."""
    size = 1
    for dim in range(tensor.dim() - 1, 0, -1):
        if tensor.stride(dim) != size and tensor.shape[dim] != 1:
            raise NotNative("a row doesn't lie in one piece")
        size *= tensor.shape[dim]
    if tensor.shape[-1] % c.LANES:
        raise NotNative(f"rows of {tensor.shape[-1]} aren't whole vectors")
    return tensor.stride(0) if tensor.shape[0] > 1 else size


def require_whole(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise NotNative("a tensor isn't contiguous")


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
