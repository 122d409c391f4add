"""The Walsh-Hadamard transform of heads that lie in registers: sums and differences, log2 of its size times.

Triton turns a stage whose pairs lie in one thread, or in two threads of a warp, into adds and shuffles; only one of
the seven stages of a head of 128 went through shared memory when this was compiled for Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl


def hadamard_size(head_dim: int) -> int:
    """The largest power of two that divides ``head_dim``: so many dims are mixed with each other."""
    return head_dim & -head_dim


@triton.jit
def hadamard(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """``x [rows, columns]``, each run of ``SIZE`` columns times the unscaled matrix of ones and minus ones."""
    for stage in tl.static_range(20):
        if 2**stage < SIZE:
            x = _sums_and_differences(x, 2**stage)
    return x


@triton.jit
def _sums_and_differences(x: tl.tensor, DISTANCE: tl.constexpr) -> tl.tensor:
    """Every two columns ``DISTANCE`` apart, replaced by their sum and their difference."""
    ROWS: tl.constexpr = x.shape[0]
    COLS: tl.constexpr = x.shape[1]
    pairs = tl.reshape(x, [ROWS, COLS // (2 * DISTANCE), 2, DISTANCE])
    first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2)), [ROWS, COLS])
