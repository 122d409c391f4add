"""The ops on a GPU: their Triton versions, gathered, and the one that needs two of them."""

from __future__ import annotations

import torch

from nanochat.kernels.activation import gelu_tanh_mul, silu_mul
from nanochat.kernels.attention_decode import decode_attention
from nanochat.kernels.attention_prefill import prefill_attention
from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.gpu_linear import linear, linear_add_norm, silu_linear
from nanochat.kernels.kv_convert import most_converted_bytes, most_converted_tokens
from nanochat.kernels.kv_store import store_kv
from nanochat.kernels.norm_rope import divide_norm, rms_norm, rope
from nanochat.kernels.reference import take_rows
from nanochat.kernels.rope_and_store import rope_store
from nanochat.kernels.row_expansion import expand_rows

__all__ = [
    "attention",
    "decode_attention",
    "divide_norm",
    "expand_rows",
    "gelu_tanh_mul",
    "linear",
    "linear_add_norm",
    "most_converted_bytes",
    "most_converted_tokens",
    "prefill_attention",
    "rms_norm",
    "rope",
    "rope_store",
    "silu_linear",
    "silu_mul",
    "store_kv",
    "take_rows",
]


def attention(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """See `nanochat.kernels.attention`. Decode rows and prefill rows write to one result."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decodes = batch.num_decodes
    if decodes:
        decode_attention(q, cache, batch, scale=scale, window=window, softcap=softcap, out=out[:decodes])
    if q.shape[0] > decodes:
        prefill_attention(q, cache, batch, scale=scale, window=window, softcap=softcap, out=out[decodes:])
    return out
