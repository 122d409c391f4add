"""Decode attention over the paged cache: one kernel for every batch, context length and cache type.

Bandwidth is all that matters here, so the work is cut by bytes, not by rows. Every row and KV head is a run
of key tiles; the static grid's programs each take an equal share of all tiles of the batch, computed on the
device from the context lengths, so that one CUDA graph serves every length. A run that falls to one program
is finished there; a run cut over several leaves partial results, which the last of them to finish merges by
log-sum-exp. Where cutting would spare less than a merge costs, programs take whole runs. The query heads that
share a KV head share its tile through one `tl.dot`.

Sources: split KV and its merge as in Flash-Decoding (arXiv:2205.14135 gives the softmax); equal shares as in
Stream-K (arXiv:2301.03598). Knows nothing of requests or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanochat.kernels.attention_common import (
    check_layout,
    load_blocks,
    score_scales,
    slots_of,
    split_to_int8,
    unpack_int8_pairs,
)
from nanochat.kernels.attention_merge import merge_pieces
from nanochat.kernels.attention_runs import PLAN_WIDTH, next_run, plan_runs
from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.triton_utils import (
    INTERPRETED,
    dependent_launch,
    device_info,
    next_power_of_2,
    tanh,
)
from nanochat.kernels.tuning import DecodeConfig, decode_config

READ_EARLY = {"plan_ptr": "_plan_kernel", "block_tables_ptr": "_expand_kernel"}
"""What is read before the kernel before this one has ended, and the kernel that writes it."""


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Where programs that share a row leave partial results. Not for two streams at once.

    ``P`` programs; each leaves at most two unfinished pieces: ``2 p`` continues a run that began in an
    earlier program, ``2 p + 1`` begins one that a later program continues.
    """

    partial_out: torch.Tensor
    """``[2 P, group, D]`` float32: attention over the piece alone, normalised."""
    partial_lse: torch.Tensor
    """``[2 P, group]`` float32: base-2 log-sum-exp of the piece's scores."""
    arrivals: torch.Tensor
    """``[P]`` int32 semaphores: pieces done of the run that begins in program ``p``. Zero between launches."""


def allocate_workspace(num_programs: int, group: int, head_dim: int, device: torch.device) -> DecodeWorkspace:
    """A workspace for ``num_programs`` programs; ``group`` query heads share a KV head."""
    return DecodeWorkspace(
        torch.empty((2 * num_programs, group, head_dim), dtype=torch.float32, device=device),
        torch.empty((2 * num_programs, group), dtype=torch.float32, device=device),
        torch.zeros(num_programs, dtype=torch.int32, device=device),
    )


def decode_attention(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `nanochat.kernels.decode_attention`. ``out [num_decodes, H, D]``, if given, receives the result.

    The workspace stays in ``batch.scratch`` for the next layers, and must outlive a graph captured here.
    """
    check_layout(q, cache, batch)
    rows, (_, heads, head_dim) = batch.num_decodes, q.shape
    if out is None:
        out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    if rows == 0:
        return out
    info = device_info(q.device)
    kv_heads = cache.k.shape[2]
    block_d, kv_bytes = next_power_of_2(head_dim), cache.k.element_size()
    config = decode_config(info.capability, block_d, kv_bytes, rows, kv_heads)
    key = ("decode_workspace", heads // kv_heads, head_dim, config.programs_per_sm)
    workspace = batch.scratch.get(key)
    if workspace is None:
        workspace = allocate_workspace(info.num_sms * config.programs_per_sm, key[1], head_dim, q.device)
        batch.scratch[key] = workspace
    launch_decode(q[:rows], cache, batch, out, workspace, config, scale=scale, window=window, softcap=softcap)
    return out


def launch_decode(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    out: torch.Tensor,
    workspace: DecodeWorkspace,
    config: DecodeConfig,
    *,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """Launch for ``q [num_decodes, H, D]``, without checks; as many programs as ``workspace`` has room for."""
    rows, heads, head_dim = q.shape
    kv_heads = cache.k.shape[2]
    qk_scale, cap = score_scales(scale, softcap)
    int8, programs = cache.k_scale is not None, workspace.arrivals.shape[0]
    key = (programs, kv_heads, config.block_n, config.min_tiles, window, int8)
    plan = batch.plans.get(key)
    # A kernel that starts early may read what older ones wrote, but not what the one before it writes.
    early = plan is not None and config.early and dependent_launch(q.device)
    if plan is None:
        plan = batch.plans[key] = plan_runs(batch, programs, kv_heads, config, window=window, int8=int8)
    _decode_kernel[(programs,)](
        q,
        cache.k,
        cache.v,
        cache.k_scale,
        cache.v_scale,
        batch.block_tables,
        batch.context_lens,
        plan,
        out,
        workspace.partial_out,
        workspace.partial_lse,
        workspace.arrivals,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        cache.k.stride(1),
        cache.k.stride(2),
        0 if cache.k_scale is None else cache.k_scale.stride(1),
        batch.block_tables.stride(0),
        rows,
        window,
        qk_scale,
        cap,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.block_size,
        BLOCK_M=max(16, next_power_of_2(heads // kv_heads)),
        BLOCK_N=config.block_n,
        BLOCK_D=max(32 if int8 else 16, next_power_of_2(head_dim)),
        MERGE=config.merge,
        WINDOWED=window > 0,
        CAPPED=softcap > 0,
        NATIVE=not INTERPRETED,
        INTEGER_DOT=device_info(q.device).capability >= 80,
        DEPENDENT=dependent_launch(q.device),
        EARLY=early,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=early,
    )


@triton.jit(do_not_specialize=["table_stride", "num_rows", "window"])
def _decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor | None,
    v_scale_ptr: tl.tensor | None,
    block_tables_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    plan_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_out_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    q_stride_row: int,
    q_stride_head: int,
    out_stride_row: int,
    kv_stride_token: int,
    kv_stride_head: int,
    scale_stride_token: int,
    table_stride: int,
    num_rows: int,
    window: int,
    qk_scale: float,
    cap: float,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    NATIVE: tl.constexpr,
    INTEGER_DOT: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if DEPENDENT:
        # Once all programs of this grid have their places, those of the next kernel may take what is left and
        # fetch their weights.
        tl.extra.cuda.gdc_launch_dependents()
    # INT8 values are read as pairs of neighbouring dims: even and odd dims are multiplied apart.
    INT8: tl.constexpr = k_scale_ptr is not None
    STEP: tl.constexpr = 2 if INT8 else 1
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    members = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    dim_mask = dims < HEAD_DIM
    cols = tl.arange(0, BLOCK_D // STEP)
    col_mask = cols < HEAD_DIM // STEP
    member_mask = (members < GROUP)[:, None] & col_mask[None, :]
    if INT8:
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16))

    # What this program's first run is and where its keys lie was there before the step's layers began.
    plan = plan_ptr + program * PLAN_WIDTH
    tile, stop = tl.load(plan), tl.load(plan + 1)
    row, head, context_len = tl.load(plan + 2), tl.load(plan + 3), tl.load(plan + 4)
    begin, share, whole = tl.load(plan + 5), tl.load(plan + 6), tl.load(plan + 7) != 0
    first_tile = context_len * 0
    if WINDOWED:
        first_tile = tl.maximum(context_len - window, 0) // BLOCK_N
    table = block_tables_ptr + row.to(tl.int64) * table_stride
    blocks = load_blocks(table, first_tile + begin, keys, context_len, BLOCK_N, BLOCK_SIZE)
    if EARLY:
        tl.extra.cuda.gdc_wait()  # for q, and for this step's K and V
    while tile < stop:
        run = tl.cdiv(context_len, BLOCK_N) - first_tile
        end = tl.minimum(run, begin + stop - tile)
        heads = head * GROUP + members
        q_ptrs = q_ptr + row.to(tl.int64) * q_stride_row + heads[:, None] * q_stride_head + dims[None, :]
        q = tl.load(q_ptrs, mask=(members < GROUP)[:, None] & dim_mask[None, :], other=0.0)
        acc = tl.zeros([BLOCK_M, BLOCK_D // STEP], tl.float32)
        if INT8:
            acc_odd = acc
            if INTEGER_DOT:
                q_high, q_low, q_scale = split_to_int8(q)
                q_scale *= qk_scale
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        norm = tl.zeros([BLOCK_M], tl.float32)

        head_k = k_ptr + head * kv_stride_head + dims[None, :]
        head_v = v_ptr + head * (kv_stride_head // STEP) + cols[None, :]
        # Block numbers and scales are fetched a tile ahead: loads that wait for loads pipeline badly.
        if INT8:
            visible = (first_tile + begin) * BLOCK_N + keys < context_len
            scale_offsets = (
                slots_of(blocks, first_tile + begin, keys, BLOCK_N, BLOCK_SIZE) * scale_stride_token + head
            )
            k_scale = tl.load(k_scale_ptr + scale_offsets, mask=visible, other=0.0)
            v_scale = tl.load(v_scale_ptr + scale_offsets, mask=visible, other=0.0)
        for index in range(first_tile + begin, first_tile + end):
            positions = index * BLOCK_N + keys
            visible = positions < context_len
            slots = slots_of(blocks, index, keys, BLOCK_N, BLOCK_SIZE)[:, None]
            k = tl.load(head_k + slots * kv_stride_token, mask=visible[:, None] & dim_mask[None, :], other=0)
            v = tl.load(
                head_v + slots * (kv_stride_token // STEP), mask=visible[:, None] & col_mask[None, :], other=0
            )
            blocks = load_blocks(table, index + 1, keys, context_len, BLOCK_N, BLOCK_SIZE)

            if INT8:
                # With its power of two moved into the scores, the rest of V's scale is from 1 to 2, so that
                # the weights below fit FP16 whatever the scales. Where a scale is 0 the values are, too.
                v_scale_bits = tl.maximum(v_scale.to(tl.float32), 2.0**-24).to(tl.int32, bitcast=True)
                exponent = (v_scale_bits >> 23) - 127
                v_scale_rest = ((v_scale_bits & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
                v_scale_power = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
                if INTEGER_DOT:
                    products = tl.dot(q_high, tl.trans(k), out_dtype=tl.int32)
                    products = tl.dot(q_low, tl.trans(k), products * 256, out_dtype=tl.int32)
                    scores = products.to(tl.float32) * q_scale[:, None]
                else:
                    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * qk_scale
                scores *= k_scale.to(tl.float32)[None, :]
            else:
                scores = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
            if CAPPED:
                scores = tanh(scores) * cap
            if INT8:
                scores += exponent.to(tl.float32)[None, :]
            if WINDOWED:
                visible = visible & (positions >= context_len - window)
            scores = tl.where(visible[None, :], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2(scores - new_peak[:, None])
            shrink = tl.exp2(peak - new_peak)
            peak = new_peak
            if INT8:
                norm = norm * shrink + tl.sum(weights * v_scale_power[None, :], 1)
                weights = (weights * v_scale_rest[None, :]).to(tl.float16)
                v_even, v_odd = unpack_int8_pairs(v, NATIVE)
                acc = tl.dot(weights, v_even, acc * shrink[:, None])
                acc_odd = tl.dot(weights, v_odd, acc_odd * shrink[:, None])
                visible = positions + BLOCK_N < context_len
                scale_offsets = (
                    slots_of(blocks, index + 1, keys, BLOCK_N, BLOCK_SIZE) * scale_stride_token + head
                )
                k_scale = tl.load(k_scale_ptr + scale_offsets, mask=visible, other=0.0)
                v_scale = tl.load(v_scale_ptr + scale_offsets, mask=visible, other=0.0)
            else:
                norm = norm * shrink + tl.sum(weights, 1)
                acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")

        run_start = tile - begin
        first_program = run_start // share
        pieces = (run_start + run - 1) // share - first_program + 1
        if whole:
            pieces = 1
        out_row = out_ptr + row.to(tl.int64) * out_stride_row + head * GROUP * HEAD_DIM
        columns = members[:, None] * HEAD_DIM + cols[None, :] * STEP
        if pieces == 1:
            tl.store(out_row + columns, acc / norm[:, None], mask=member_mask)
            if INT8:
                tl.store(out_row + columns + 1, acc_odd / norm[:, None], mask=member_mask)
        else:
            piece = (2 * program + (program == first_program).to(tl.int32)) * GROUP
            partial = partial_out_ptr + piece * HEAD_DIM + columns
            tl.store(partial, acc / norm[:, None], mask=member_mask)
            if INT8:
                tl.store(partial + 1, acc_odd / norm[:, None], mask=member_mask)
            tl.store(partial_lse_ptr + piece + members, peak + tl.log2(norm), mask=members < GROUP)
            # All threads' stores come before the one thread's release, and its acquire before their loads.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals_ptr + first_program, 1, sem="acq_rel")
            tl.debug_barrier()
            if arrived == pieces - 1:
                tl.store(arrivals_ptr + first_program, 0)
                merge_pieces(
                    partial_out_ptr,
                    partial_lse_ptr,
                    out_row,
                    first_program,
                    pieces,
                    GROUP,
                    HEAD_DIM,
                    BLOCK_D,
                    MERGE,
                )
        tile += end - begin
        if tile < stop:
            row, head, context_len = next_run(row, head, context_len, context_lens_ptr, KV_HEADS)
            begin = begin * 0
            if WINDOWED:
                first_tile = tl.maximum(context_len - window, 0) // BLOCK_N
            table = block_tables_ptr + row.to(tl.int64) * table_stride
            blocks = load_blocks(table, first_tile + begin, keys, context_len, BLOCK_N, BLOCK_SIZE)

    # Rows of no context have no tiles, so nobody above wrote them.
    row = program
    while row < num_rows:
        if tl.load(context_lens_ptr + row) == 0:
            for head in range(KV_HEADS):
                out_row = out_ptr + row.to(tl.int64) * out_stride_row + head * GROUP * HEAD_DIM
                zeros = tl.zeros([BLOCK_M, BLOCK_D // STEP], out_ptr.dtype.element_ty)
                columns = members[:, None] * HEAD_DIM + cols[None, :] * STEP
                tl.store(out_row + columns, zeros, mask=member_mask)
                if INT8:
                    tl.store(out_row + columns + 1, zeros, mask=member_mask)
        row += num_programs
