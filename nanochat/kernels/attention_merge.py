"""The end of a split decode attention: what several programs found of one run of keys becomes one result.

Source: Flash-Decoding's merge by log-sum-exp.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_pieces(
    partial_out_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    out_row: tl.tensor,
    first_program: tl.tensor,
    pieces: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE: tl.constexpr,
) -> None:
    """Combine one run's pieces, which lie in consecutive programs, for each query head of its group."""
    MEMBERS: tl.constexpr = min(GROUP, 2)  # heads at once: their loads overlap
    dims = tl.arange(0, BLOCK_D)[None, None, :]
    for base in range(0, GROUP, MEMBERS):
        members = base + tl.arange(0, MEMBERS)[:, None]
        peak = tl.full([MEMBERS], float("-inf"), tl.float32)
        norm = tl.zeros([MEMBERS], tl.float32)
        acc = tl.zeros([MEMBERS, BLOCK_D], tl.float32)
        for start in range(0, pieces, MERGE // MEMBERS):
            index = start + tl.arange(0, MERGE // MEMBERS)[None, :]
            mask = (index < pieces) & (members < GROUP)
            piece = (2 * (first_program + index) + (index == 0).to(tl.int32)) * GROUP + members
            # Read from the L2: another multiprocessor wrote them.
            lse = tl.load(partial_lse_ptr + piece, mask=mask, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(
                partial_out_ptr + piece[:, :, None] * HEAD_DIM + dims,
                mask=mask[:, :, None] & (dims < HEAD_DIM),
                other=0.0,
                cache_modifier=".cg",
            )
            new_peak = tl.maximum(peak, tl.max(lse, 1))
            safe_peak = tl.where(members < GROUP, new_peak[:, None], 0.0)
            weights = tl.exp2(lse - safe_peak)
            shrink = tl.where(peak == float("-inf"), 0.0, tl.exp2(peak - new_peak))
            norm = norm * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.sum(part * weights[:, :, None], 1)
            peak = new_peak
        dims_of_out = tl.arange(0, BLOCK_D)[None, :]
        mask = (members < GROUP) & (dims_of_out < HEAD_DIM)
        tl.store(out_row + members * HEAD_DIM + dims_of_out, acc / norm[:, None], mask=mask)
