"""The ops on the CPU: the fewest calls into PyTorch, since at a few tokens a call costs more than its work.

docs/kernels.md has the measurements. Knows nothing of models or schedules.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from nanochat.kernels import cpu_linear
from nanochat.kernels.cache import LayerCache
from nanochat.kernels.composed import rope_then_store
from nanochat.kernels.cpu_attention import attention, decode_attention, prefill_attention
from nanochat.kernels.normed import Normed
from nanochat.kernels.reference import (
    FLOAT16_MAX,
    INT8_MAX,
    JUST_BELOW_HALF,
    expand_rows,
    hadamard_matrix,
    take_rows,
)

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
    "take_rows",
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
    if weight.dtype == torch.float32:
        # Bit for bit what transformers computes.
        scale = 1.0 + weight if plus_one else weight
        return F.rms_norm(summed.float(), weight.shape, scale, eps), summed
    # F.rms_norm is ten kernels on a CPU, each with a new tensor; a 16-bit result doesn't show the difference.
    size = weight.shape[0]
    wide = summed.float()
    # The root of (mean of squares + eps) times the size.
    root = torch.hypot(torch.linalg.vector_norm(wide, 2, -1, True), _scalar((size * eps) ** 0.5))
    # 1 + weight may not fit a 16-bit type.
    scaled = wide * (1.0 + weight.float() if plus_one else weight)
    out = torch.empty_like(scaled, dtype=weight.dtype)
    return torch.addcdiv(_scalar(0.0), scaled, root, value=size**0.5, out=out), summed


@functools.cache
def _scalar(value: float) -> torch.Tensor:
    """Kept, because making it costs as much as using it."""
    return torch.tensor(value, dtype=torch.float32)


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
    scratch: dict[Any, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `nanochat.kernels.rope`. Rotates q and k as one tensor of ``H + Hkv`` heads."""
    parts = []
    for x, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            scale = 1.0 + weight.float() if plus_one else weight.float()
            x = F.rms_norm(x.float(), weight.shape, scale, eps)
        parts.append(x)
    both = _side_by_side(*parts) if q_norm is None and k_norm is None else torch.cat(parts, dim=1)
    both = both.float()  # else each product would convert it anew
    if cos_sin is not None:
        half = cos_sin.shape[1] // 2
        cos, sin = _factors(positions, cos_sin, q.shape[2], scratch)
        first, second = both[..., :half], both[..., half : 2 * half]
        both = both * cos
        both[..., :half].addcmul_(second, sin, value=-1)
        both[..., half : 2 * half].addcmul_(first, sin)
    if spread:
        both = both @ _hadamard_matrix(q.shape[2])
    new_q, new_k = both.to(q.dtype).split((q.shape[1], k.shape[1]), dim=1)
    return new_q, new_k


_hadamard_matrix = functools.cache(hadamard_matrix)


def _factors(
    positions: torch.Tensor, cos_sin: torch.Tensor, head_dim: int, scratch: dict[Any, Any] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 ``[T, 1, D]`` that a head is multiplied by, 1 beyond the rotary part, and the sines."""
    key = ("rope", id(cos_sin))
    if scratch is not None and key in scratch:
        # The table stands beside them, so that no other can have its id meanwhile.
        _, cos, sin = scratch[key]
        return cos, sin
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    rest = cos.new_ones((*cos.shape[:-1], head_dim - cos_sin.shape[1]))
    factors = torch.cat((cos, cos, rest), dim=-1), sin.contiguous()
    if scratch is not None:
        scratch[key] = cos_sin, *factors
    return factors


def _side_by_side(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """``[T, H + Hkv, D]``: a view if they are parts of one tensor, as they come from one linear map."""
    begins = q.storage_offset() + q.shape[1] * q.shape[2]
    if (
        q.stride() == k.stride()
        and q.stride()[1:] == (q.shape[2], 1)
        and k.storage_offset() == begins
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    ):
        return q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride())
    return torch.cat((q, k), dim=1)


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
    out = cpu_linear.linear(rows, weight, bias)
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
    cos_sin: torch.Tensor | None,
    cache: LayerCache,
    slots: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    scratch: dict[Any, Any] | None = None,
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
        scratch=scratch,
    )
