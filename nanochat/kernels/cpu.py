"""The ops on the CPU: the fewest calls into PyTorch, since at a few tokens a call costs more than its work.

docs/kernels.md has the measurements. Knows nothing of models or schedules.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanochat.kernels.cache import LayerCache
from nanochat.kernels.cpu_attention import attention, decode_attention, prefill_attention
from nanochat.kernels.normed import Normed
from nanochat.kernels.reference import FLOAT16_MAX, INT8_MAX, JUST_BELOW_HALF, expand_rows

__all__ = [
    "attention",
    "decode_attention",
    "expand_rows",
    "gelu_tanh_mul",
    "linear",
    "linear_add_norm",
    "prefill_attention",
    "rms_norm",
    "rope",
    "rope_store",
    "silu_linear",
    "silu_mul",
    "store_kv",
]


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
    if plus_one:
        # 1 + weight may not fit a 16-bit type.
        return F.rms_norm(summed.float(), weight.shape, 1.0 + weight.float(), eps).to(weight.dtype), summed
    scale = weight if weight.dtype == summed.dtype else weight.to(summed.dtype)
    return F.rms_norm(summed, weight.shape, scale, eps).to(weight.dtype), summed


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `nanochat.kernels.rope`. Rotates q and k as one tensor of ``H + Hkv`` heads."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).split(half, dim=-1)
    parts = []
    for x, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            scale = 1.0 + weight.float() if plus_one else weight.float()
            x = F.rms_norm(x.float(), weight.shape, scale, eps)
        parts.append(x)
    # Always a new tensor, which may be changed in place.
    both = torch.cat(parts, dim=1).float()
    first, second = both[..., :half], both[..., half : 2 * half]
    rotated_first = (first * cos).addcmul_(second, sin, value=-1)
    second.copy_((second * cos).addcmul_(first, sin))
    first.copy_(rotated_first)
    new_q, new_k = both.to(q.dtype).split((q.shape[1], k.shape[1]), dim=1)
    return new_q, new_k


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `nanochat.kernels.silu_mul`. A 16-bit type is rounded once more, after the SiLU."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `nanochat.kernels.gelu_tanh_mul`. A 16-bit type is rounded once more, after the GELU."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def store_kv(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
    """See `nanochat.kernels.store_kv`."""
    if cache.k_scale is None or cache.v_scale is None:
        parts = [(cache.k, k), (cache.v, v)]
    else:
        values, scales = _quantize(torch.stack((k, v)).float())
        parts = [(cache.k, values[0]), (cache.v, values[1])]
        parts += [(cache.k_scale, scales[0]), (cache.v_scale, scales[1])]
    try:
        for target, source in parts:
            # view, because flatten would quietly write to a copy of a cache that isn't contiguous.
            target.view(-1, *target.shape[2:]).index_copy_(0, slots, source)
    except IndexError:
        # Negative slots are rare, and looking for them each time would cost as much as the copy.
        kept = slots >= 0
        if bool(kept.all()):
            raise
        store_kv(k[kept], v[kept], cache, slots[kept])


def _quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.quantize`, bit for bit, of a float32 tensor that is overwritten."""
    x.nan_to_num_(nan=0.0, posinf=float("inf"), neginf=float("-inf"))
    norm = torch.linalg.vector_norm(x, ord=float("inf"), dim=-1)
    scale = norm.div_(INT8_MAX).clamp_(max=FLOAT16_MAX).half()
    divisor = scale.float()
    divisor.masked_fill_(divisor == 0, float("inf"))
    x.div_(divisor.unsqueeze(-1)).clamp_(-INT8_MAX, INT8_MAX)
    x += torch.copysign(torch.tensor(JUST_BELOW_HALF), x)
    return x.to(torch.int8), scale  # which truncates


def linear(
    x: torch.Tensor | Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `nanochat.kernels.linear`."""
    rows = x.finished() if isinstance(x, Normed) else x
    out = F.linear(rows, weight, bias)
    return out if dtype is None else out.to(dtype)


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
    cos_sin: torch.Tensor,
    cache: LayerCache,
    slots: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
) -> torch.Tensor:
    """See `nanochat.kernels.rope_store`."""
    q, k = rope(q, k, positions, cos_sin, q_norm=q_norm, k_norm=k_norm, eps=eps, plus_one=plus_one)
    store_kv(k, v, cache, slots)
    return q
