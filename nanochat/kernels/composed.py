"""Ops that are others one after the other, wherever no single kernel does their work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nanochat.kernels.cache import LayerCache


def rope_then_store(
    rope: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    store_kv: Callable[[torch.Tensor, torch.Tensor, LayerCache, torch.Tensor], None],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    cache: LayerCache,
    slots: torch.Tensor,
    **norms: Any,
) -> torch.Tensor:
    """`nanochat.kernels.rope_store` by a backend's own ``rope``, which is given ``norms``, and ``store_kv``."""
    q, k = rope(q, k, positions, cos_sin, spread=cache.k_scale is not None, **norms)
    store_kv(k, v, cache, slots)
    return q
