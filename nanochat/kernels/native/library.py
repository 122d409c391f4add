"""The compiled kernels, if this installation has them: loads the library and describes an operation to it.

Knows nothing of tensors.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p

from nanochat.kernels.native.build import LIBRARY, sources_hash

FLOAT32, BFLOAT16, INT8 = range(3)
(
    TAKE_ROWS,
    RMS_NORM,
    GATED_SILU,
    GATED_GELU,
    QUANTIZE,
    LINEAR_INT4,
    LINEAR_INT8,
    LINEAR_FLOAT,
    ROPE_STORE,
    ATTENTION,
    ARGMAX,
    SAMPLE,
    PACK_INT4,
    PACK_INT8,
    LINEAR_WIDE_INT4,
    LINEAR_WIDE_INT8,
    LINEAR_WIDE_FLOAT,
    ATTENTION_WIDE,
    LINEAR_UPPER,
    BOUND,
    LINEAR_REST,
    PACK_HALVES,
    LINEAR_WIDE_HALVES,
    WIDEN,
) = range(24)
GROUP, PANEL, LANES = 32, 16, 16
MAX_GROUP_HEADS, MAX_HEAD_DIM = 16, 256
MAX_FEW_ROWS = 32
"""Steps of more rows multiply many of them by weights that are unpacked once."""
_OUT_OF_MEMORY = 2


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Op(ctypes.Structure):
    """``Op`` of ``op.h``, which explains the fields."""

    _fields_ = [
        *_fields(
            c_int32, "kind x_type y_type w_type residual_type cache_type n inner heads kv_heads head_dim"
        ),
        *_fields(c_int32, "rotary_dim block_size table_width window plus_one"),
        *_fields(c_float, "eps scale softcap unused"),
        *_fields(c_int64, "x_stride k_stride v_stride"),
        *_fields(c_void_p, "rows batch_rows x k v y w w_scales bias residual summed index slots cos_sin"),
        *_fields(c_void_p, "q_norm k_norm k_cache v_cache k_scale v_scale"),
        *_fields(c_void_p, "block_tables context_lens query_starts"),
        *_fields(c_void_p, "temperature top_p min_p top_k seeds"),
    ]


class Library:
    """The loaded kernels, for one instruction set."""

    def __init__(self, handle: ctypes.CDLL, name: str) -> None:
        self.name = name
        """Instruction set."""
        self._name = name.encode()
        self._run = handle.nanochat_run

    def run(self, ops: ctypes.Array[Op], count: int, threads: int) -> None:
        """Run the first ``count`` operations, one after the other, without Python's lock."""
        failure = self._run(ops, count, threads, self._name)
        if failure == _OUT_OF_MEMORY:
            raise MemoryError("native kernels need more memory than there is")
        if failure:
            raise ValueError(f"this processor can't run {self.name} kernels")


@functools.cache
def find(name: str = "") -> Library | None:
    """The kernels for the instruction set of that name, by default this processor's best.

    None where there is no library, it was built from other sources, or the processor can't run them.
    """
    handle = _load()
    if handle is None:
        return None
    found = handle.nanochat_kernels(name.encode())
    return None if found is None else Library(handle, found.decode())


def rounds_to_bf16() -> bool:
    """Whether many rows are multiplied as BF16 here, whatever type they have."""
    found = find()
    return found is not None and found.name in ("amx", "avx512")


@functools.cache
def _load() -> ctypes.CDLL | None:
    try:
        handle = ctypes.CDLL(str(LIBRARY))
        handle.nanochat_sources.restype = handle.nanochat_kernels.restype = c_char_p
        handle.nanochat_kernels.argtypes = [c_char_p]
        handle.nanochat_run.argtypes = [ctypes.POINTER(Op), ctypes.c_int, ctypes.c_int, c_char_p]
        is_current = handle.nanochat_sources().decode() == sources_hash()
        return handle if is_current and handle.nanochat_op_bytes() == ctypes.sizeof(Op) else None
    except (OSError, AttributeError):
        return None
