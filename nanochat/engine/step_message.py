"""A step as the first rank of a divided model tells the others of it: numbers on the host, in one message.

The others plan nothing and know no requests. Ids that only the device knows are sampled on the first rank and
handed on from device to device. Knows nothing of models or processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nanochat.engine.batch import HostBatch
from nanochat.engine.step_inputs import StepShape

_RECORDED, _PACKED = 0, 1
_DTYPES: list[np.dtype] = [np.dtype(name) for name in ["i8", "i8", "i8", "i4", "i4", "i4", "i8", "i8"]]
"""Of each array of a batch, and of the seats."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One that is replayed."""

    shape: StepShape
    inputs: np.ndarray
    """``[n]`` uint8, as `pack_step` made them."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One that is launched kernel by kernel."""

    batch: HostBatch
    seats: np.ndarray
    """``[S]`` int64: the seat of each sampling row."""
    num_decodes: int
    has_pending_ids: bool
    """Whether decodes take ids from their seats."""


def encode(step: PackedStep | RecordedStep) -> bytes:
    """As bytes, for `decode`."""
    if isinstance(step, RecordedStep):
        return _numbers(_RECORDED, *step.shape) + step.inputs.tobytes()
    arrays = [*step.batch, step.seats]
    rows, width = step.batch.block_tables.shape
    sizes = [len(step.batch.input_ids), rows, width, len(step.seats)]
    header = _numbers(_PACKED, step.num_decodes, int(step.has_pending_ids), *sizes)
    return header + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def decode(message: bytes) -> PackedStep | RecordedStep:
    """What was given to `encode`."""
    buffer = bytearray(message)  # torch wants arrays that could be written to
    (kind,) = np.frombuffer(buffer, np.int64, 1)
    if kind == _RECORDED:
        shape = StepShape(*np.frombuffer(buffer, np.int64, 5, 8).tolist())
        return RecordedStep(shape, np.frombuffer(buffer, np.uint8, offset=48))
    num_decodes, pending, tokens, rows, width, samples = np.frombuffer(buffer, np.int64, 6, 8).tolist()
    sizes: list[tuple[int, ...]] = [*[(tokens,)] * 3, (rows, width), (rows,), (rows + 1,)]
    arrays, at = [], 56
    for size, dtype in zip([*sizes, (samples,), (samples,)], _DTYPES, strict=True):
        count = math.prod(size)
        arrays.append(np.frombuffer(buffer, dtype, count, at).reshape(size))
        at += count * dtype.itemsize
    *batch, seats = arrays
    return PackedStep(HostBatch(*batch), seats, num_decodes, bool(pending))


def _numbers(*values: int) -> bytes:
    return np.array(values, dtype=np.int64).tobytes()
