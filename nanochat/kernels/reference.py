"""Every op in plain PyTorch, written to be read: the definition that faster versions are tested against.

All arithmetic is float32 and is rounded to the argument's type once, at the end. Rows are visited one by
one and lengths are read on the host, so nothing here is fast, and on a GPU nothing here is asynchronous.
Knows nothing of devices, models or schedules.

``T`` tokens, ``R`` rows, ``H`` query heads, ``Hkv`` KV heads, ``D`` head dim, ``N`` blocks of ``B`` tokens,
``M`` entries of a block table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.composed import rope_then_store
from nanochat.kernels.normed import Normed
from nanochat.kernels.rows import StepRows, StepTokens, allocate_tokens

INT8_MAX = 127.0
FLOAT16_MAX = 65504.0
JUST_BELOW_HALF = 0.49999997  # the float32 before 0.5: adding 0.5 itself would round 0.49999997 up to 1


def take_rows(
    table: torch.Tensor, rows: torch.Tensor, *, scale: float = 1.0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `nanochat.kernels.take_rows`."""
    taken = F.embedding(rows, table)
    return (taken if scale == 1.0 else taken * scale).to(dtype or table.dtype)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `nanochat.kernels.rms_norm`."""
    summed = x if residual is None else x + residual
    return normalize(summed, weight, eps, plus_one).to(weight.dtype), summed


def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
    """Root-mean-square norm of ``x [..., n]`` over its last dim, in float32."""
    x = x.float()
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return scaled * (1.0 + weight.float() if plus_one else weight.float())


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    spread: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `nanochat.kernels.rope`."""

    def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        cos, sin = angles[positions].unsqueeze(1).chunk(2, dim=-1)
        half = cos.shape[-1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    def norm_and_rotate(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        y = x.float() if weight is None else normalize(x, weight, eps, plus_one)
        y = y if cos_sin is None else rotate(y, cos_sin)
        return (y @ hadamard_matrix(x.shape[-1]).to(y.device) if spread else y).to(x.dtype)

    return norm_and_rotate(q, q_norm), norm_and_rotate(k, k_norm)


def hadamard_matrix(dim: int) -> torch.Tensor:
    """``[D, D]`` float32, orthogonal and symmetric: mixes ``S`` dims at a time, the largest power of two in ``D``.

    Dim ``(side, block, i)`` of ``[2, D / S, S / 2]`` is mixed with those of the same block, by a Walsh-Hadamard
    matrix over ``(side, i)``: entries of one size, which share out what one dim holds among all ``S``.
    """
    size = dim & -dim

    def signs(n: int) -> torch.Tensor:
        matrix = torch.ones(1, 1)
        while matrix.shape[0] < n:
            matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
        return matrix

    within = torch.kron(torch.eye(dim // size), signs(size // 2))
    return torch.kron(signs(2), within) * size**-0.5 if size > 1 else torch.eye(dim)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `nanochat.kernels.silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `nanochat.kernels.gelu_tanh_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [..., D]`` to int8 ``[..., D]`` and float16 scales ``[...]``, as `nanochat.kernels.store_kv` says."""
    x = x.float().nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf"))
    scale = (x.abs().amax(-1) / INT8_MAX).clamp(max=FLOAT16_MAX).half()
    # A vector too small for a float16 scale is stored as zeros.
    divisor = torch.where(scale > 0, scale.float(), float("inf")).unsqueeze(-1)
    scaled = (x / divisor).clamp(-INT8_MAX, INT8_MAX)
    rounded = torch.trunc(scaled + torch.copysign(torch.tensor(JUST_BELOW_HALF), scaled))
    return rounded.to(torch.int8), scale


def store_kv(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
    """See `nanochat.kernels.store_kv`."""
    kept = slots >= 0
    blocks, offsets = slots[kept] // cache.block_size, slots[kept] % cache.block_size
    if cache.k_scale is None or cache.v_scale is None:
        cache.k[blocks, offsets] = k[kept].to(cache.k.dtype)
        cache.v[blocks, offsets] = v[kept].to(cache.v.dtype)
    else:
        cache.k[blocks, offsets], cache.k_scale[blocks, offsets] = quantize(k[kept])
        cache.v[blocks, offsets], cache.v_scale[blocks, offsets] = quantize(v[kept])


def read_kv(
    cache: LayerCache, block_table: torch.Tensor, context_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one row's first ``context_len`` tokens, ``[context_len, Hkv, D]`` float32 each.

    Entries of ``block_table [M]`` past the context, and slots past it in the last block, are not read.
    """
    size = cache.block_size
    blocks = block_table[: (context_len + size - 1) // size].long()

    def read(data: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        values = data[blocks].flatten(0, 1)[:context_len].float()
        if scale is None:
            return values
        return values * scale[blocks].flatten(0, 1)[:context_len].float().unsqueeze(-1)

    return read(cache.k, cache.k_scale), read(cache.v, cache.v_scale)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int, softcap: float
) -> torch.Tensor:
    """Causal attention of one row's last ``n`` tokens to all its ``L``.

    ``q [n, H, D]``, ``k``, ``v`` ``[L, Hkv, D]`` float32; returns ``[n, H, D]`` float32.
    """
    n, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    grouped = q.float().unflatten(1, (kv_heads, heads // kv_heads))
    scores = torch.einsum("nkgd,lkd->kgnl", grouped, k) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    query_positions = torch.arange(length - n, length, device=q.device).unsqueeze(1)
    key_positions = torch.arange(length, device=q.device)
    visible = key_positions <= query_positions
    if window:
        visible &= key_positions > query_positions - window
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.einsum("kgnl,lkd->nkgd", weights, v).flatten(1, 2)


def attention(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """See `nanochat.kernels.attention`."""
    out = torch.zeros_like(q)
    starts = batch.query_starts.tolist()
    for row, context_len in enumerate(batch.context_lens.tolist()):
        if context_len == 0:
            continue
        tokens = slice(starts[row], starts[row + 1])
        k, v = read_kv(cache, batch.block_tables[row], context_len)
        out[tokens] = attend(q[tokens], k, v, scale=scale, window=window, softcap=softcap).to(q.dtype)
    return out


def decode_attention(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """See `nanochat.kernels.decode_attention`."""
    return attention(q, cache, batch, scale=scale, window=window, softcap=softcap)[: batch.num_decodes]


def prefill_attention(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """See `nanochat.kernels.prefill_attention`."""
    return attention(q, cache, batch, scale=scale, window=window, softcap=softcap)[batch.num_decodes :]


def expand_rows(
    rows: StepRows, last_ids: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> StepTokens:
    """See `nanochat.kernels.expand_rows`."""
    tokens = allocate_tokens(rows, block_tables.shape[1])
    tokens.input_ids.zero_()
    tokens.positions.zero_()
    tokens.slots.fill_(-1)
    for row, context_len in enumerate(rows.context_lens.tolist()):
        first, end = rows.query_starts[row : row + 2].tolist()
        tokens.last_tokens[row] = max(end - 1, 0)
        tokens.next_positions[row] = context_len
        if context_len == 0:
            continue
        seat, first_new = int(rows.seats[row]), int(rows.first_new[row])
        new_start, new_end = rows.new_starts[row : row + 2].tolist()
        table = block_tables[seat]
        table[first_new : first_new + new_end - new_start] = rows.new_blocks[new_start:new_end]
        width = -(-context_len // block_size)
        tokens.block_tables[row, :width] = table[:width]
        ids = rows.token_ids[first:end].long()
        tokens.input_ids[first:end] = torch.where(ids < 0, last_ids[seat], ids)
        positions = torch.arange(context_len - (end - first), context_len, device=ids.device)
        tokens.positions[first:end] = positions
        blocks = table[positions // block_size].long()
        tokens.slots[first:end] = blocks * block_size + positions % block_size
    return tokens


def linear(
    x: torch.Tensor | Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `nanochat.kernels.linear`."""
    rows = x.finished() if isinstance(x, Normed) else x
    exact = rows.float() @ weight.float().T + (0.0 if bias is None else bias.float())
    return exact.to(dtype or weight.dtype)


def silu_linear(
    x: torch.Tensor | Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See `nanochat.kernels.silu_linear`."""
    return silu_mul(linear(x, weight, bias))


def linear_add_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
) -> tuple[Normed, torch.Tensor]:
    """See `nanochat.kernels.linear_add_norm`."""
    normed, summed = rms_norm(linear(x, weight, bias), norm_weight, eps, residual, plus_one=plus_one)
    return Normed(normed), summed


def rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    cache: LayerCache,
    slots: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
) -> torch.Tensor:
    """See `nanochat.kernels.rope_store`."""
    return rope_then_store(
        rope,
        store_kv,
        q,
        k,
        v,
        positions,
        cos_sin,
        cache,
        slots,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        plus_one=plus_one,
    )
