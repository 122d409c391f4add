"""The pieces of a decoder layer: linear maps, attention, MLP, mixture of experts.

Each holds its weights as plain tensors, packed so that one matrix product does the work of two or three.
Knows nothing of files, requests or schedules.

``T`` packed tokens, ``H`` query heads, ``Hkv`` KV heads, ``D`` head dim, ``I`` intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanochat import kernels
from nanochat.engine.models.families import Activation, LayerConfig, ModelConfig, MoEConfig
from nanochat.engine.parallel import ALONE, Collectives
from nanochat.kernels import Normed
from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.cpu_linear import LinearKernel

_WIDE_SUM_ROWS = 64
"""Outputs of up to so many rows are added up over ranks in float32, as one device adds them to the residual: they
are few bytes either way. Those of more are rounded to the weights' type first."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm's parameters."""

    weight: torch.Tensor
    """``[hidden]``"""
    eps: float
    plus_one: bool
    """Whether rows are multiplied by ``weight + 1``."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed sum and the sum itself, ``[T, hidden]`` each."""
        return kernels.rms_norm(x, self.weight, self.eps, residual, plus_one=self.plus_one)


class Linear:
    """``y = x @ weight.T + bias``, and what may be computed with it, by the kernel given to `use` if there is one.

    One whose inputs are divided among ``ranks`` adds up what all of them get.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, ranks: Collectives = ALONE
    ) -> None:
        self.weight = weight
        """``[out, in]``"""
        self.bias = bias
        """``[out]``"""
        self._kernel: LinearKernel | None = None
        self._ranks = ranks
        self._is_partial = ranks.shard.size > 1

    def use(self, kernel: LinearKernel, *, keep_weight: bool) -> None:
        """Compute with ``kernel`` from now on, which holds the weight in a form of its own."""
        self._kernel = kernel
        if not keep_weight:
            self.weight = torch.empty(0, dtype=self.weight.dtype)

    def __call__(
        self,
        x: torch.Tensor | Normed,
        dtype: torch.dtype | None = None,
        scratch: dict[Any, Any] | None = None,
    ) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``, of ``x``'s type or ``dtype``; ``scratch`` as in `kernels.linear`."""
        if self._kernel is None:
            y = kernels.linear(x, self.weight, self.bias, dtype=dtype, scratch=scratch)
        else:
            y = self._kernel(kernels.finished(x) if isinstance(x, Normed) else x, dtype)
        return self._ranks.all_reduce(y) if self._is_partial else y

    def silu(self, x: Normed, scratch: dict[Any, Any]) -> torch.Tensor:
        """``[T, in]`` to ``[T, out / 2]``: SiLU of the first half of the outputs, times the second."""
        if self._kernel is None:
            return kernels.silu_linear(x, self.weight, self.bias, scratch=scratch)
        return kernels.silu_mul(self(x))

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm, scratch: dict[Any, Any]
    ) -> tuple[Normed, torch.Tensor]:
        """Added to the residual stream and normed: the normed sum and the sum, ``[T, out]`` each."""
        if self._kernel is None and not self._is_partial:
            return kernels.linear_add_norm(
                x,
                self.weight,
                self.bias,
                residual,
                norm.weight,
                norm.eps,
                plus_one=norm.plus_one,
                scratch=scratch,
            )
        wide = torch.float32 if self._is_partial and x.shape[0] <= _WIDE_SUM_ROWS else None
        normed, residual = norm(self(x, wide, scratch), residual)
        return Normed(normed), residual


class Allocator:
    """Makes a model's uninitialised tensors, all of one type on one device, and counts their bytes."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.allocated_bytes = 0

    def tensor(self, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, device=self.device, dtype=self.dtype)
        self.allocated_bytes += tensor.nbytes
        return tensor

    def linear(
        self, in_size: int, out_size: int, *, bias: bool = False, ranks: Collectives = ALONE
    ) -> Linear:
        return Linear(self.tensor(out_size, in_size), self.tensor(out_size) if bias else None, ranks)


class Attention:
    """Grouped-query attention over the paged cache."""

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, allocate: Allocator, ranks: Collectives
    ) -> None:
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.sizes = (q_size, kv_size, kv_size)
        self.qkv = allocate.linear(config.hidden_size, sum(self.sizes), bias=config.qkv_bias)
        """Rows: q of every head, then k, then v."""
        self.out = allocate.linear(q_size, config.hidden_size, bias=config.o_bias, ranks=ranks)
        self.q_norm = allocate.tensor(self.head_dim) if config.qk_norm else None
        self.k_norm = allocate.tensor(self.head_dim) if config.qk_norm else None
        self.window = layer.window
        self.scale = config.attention_scale
        self.softcap = config.attention_softcap
        self.eps = config.rms_norm_eps
        self.plus_one = config.norm_plus_one

    def __call__(
        self,
        x: Normed,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cos_sin: torch.Tensor | None,
        batch: AttentionBatch,
        cache: LayerCache,
    ) -> torch.Tensor:
        """``[T, hidden]`` to ``[T, H * D]``, for ``out``; K and V are stored before anything is attended to."""
        q, k, v = self.qkv(x, scratch=batch.scratch).split(self.sizes, dim=-1)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        q = kernels.rope_store(
            q,
            k,
            v,
            positions,
            cos_sin,
            cache,
            slots,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self.eps,
            plus_one=self.plus_one,
            scratch=batch.scratch,
        )
        mixed = kernels.attention(q, cache, batch, scale=self.scale, window=self.window, softcap=self.softcap)
        return mixed.flatten(1)


class MLP:
    """Gated MLP: ``down(act(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, allocate: Allocator, ranks: Collectives) -> None:
        inner = config.intermediate_size
        self.gate_up = allocate.linear(config.hidden_size, 2 * inner, bias=config.mlp_bias)
        """Rows: gate, then up."""
        self.down = allocate.linear(inner, config.hidden_size, bias=config.mlp_bias, ranks=ranks)
        self.activate = activation(config.activation)
        self.is_silu = config.activation == "silu"

    def __call__(self, x: Normed, scratch: dict[Any, Any]) -> torch.Tensor:
        """``[T, hidden]`` to ``[T, I]``, for ``down``; ``scratch`` as in `kernels.linear`."""
        if self.is_silu:
            return self.gate_up.silu(x, scratch)
        return self.activate(self.gate_up(x, scratch=scratch))


class MoE:
    """A softmax router and gated MLPs; each token goes to its few best experts.

    Divided among ranks, each has a part of every expert, so that all have the same to do.
    The loop over experts reads on the host which of them are in use, so a step with this layer can't be
    part of a CUDA graph.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig, allocate: Allocator, ranks: Collectives) -> None:
        inner, hidden = moe.intermediate_size, config.hidden_size
        self._ranks = ranks
        self.experts_per_token = moe.experts_per_token
        self.normalize = moe.normalize
        self.router = allocate.linear(hidden, moe.num_experts)
        self.gate_up = allocate.tensor(moe.num_experts, 2 * inner, hidden)
        self.down = allocate.tensor(moe.num_experts, hidden, inner)
        self.activate = activation(config.activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` to ``[T, hidden]``."""
        probabilities = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.experts_per_token, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x.dtype)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens, ranks = torch.where(chosen == expert)
            inner = self.activate(kernels.linear(x[tokens], self.gate_up[expert]))
            mixed = kernels.linear(inner, self.down[expert]) * weights[tokens, ranks].unsqueeze(-1)
            out.index_add_(0, tokens, mixed)
        return self._ranks.all_reduce(out)


class DecoderLayer:
    """Attention and MLP, each on a normalised input and added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        allocate: Allocator,
        ranks: Collectives = ALONE,
    ) -> None:
        """``config``: the sizes of this rank's part."""

        def norm() -> Norm:
            return Norm(allocate.tensor(config.hidden_size), config.rms_norm_eps, config.norm_plus_one)

        self.attention = Attention(config, layer, allocate, ranks)
        self.mlp: MLP | MoE
        if layer.sparse and config.moe is not None:
            self.mlp = MoE(config, config.moe, allocate, ranks)
        else:
            self.mlp = MLP(config, allocate, ranks)
        self.attention_norm = norm()
        self.mlp_norm = norm()
        self.attention_out_norm = norm() if config.output_norms else None
        self.mlp_out_norm = norm() if config.output_norms else None

    def __call__(
        self,
        x: Normed,
        residual: torch.Tensor,
        next_norm: Norm,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cos_sin: torch.Tensor | None,
        batch: AttentionBatch,
        cache: LayerCache,
        *,
        finish: bool = False,
    ) -> tuple[Normed, torch.Tensor]:
        """``x`` is ``residual`` under this layer's first norm; returns the new one under ``next_norm``, and it.

        With ``finish`` the norm's division is done, whatever that costs.
        """
        mixed = self.attention(x, positions, slots, cos_sin, batch, cache)
        scratch = batch.scratch
        x, residual = _add_norm(
            self.attention.out, mixed, self.attention_out_norm, residual, self.mlp_norm, scratch
        )
        if isinstance(self.mlp, MoE):
            return _normed(self.mlp(kernels.finished(x)), self.mlp_out_norm, residual, next_norm)
        inner = self.mlp(x, scratch)
        if finish:
            out = self.mlp.down(inner, scratch=scratch)
            return _normed(out, self.mlp_out_norm, residual, next_norm)
        return _add_norm(self.mlp.down, inner, self.mlp_out_norm, residual, next_norm, scratch)


def _add_norm(
    linear: Linear,
    x: torch.Tensor,
    out_norm: Norm | None,
    residual: torch.Tensor,
    norm: Norm,
    scratch: dict[Any, Any],
) -> tuple[Normed, torch.Tensor]:
    """``residual`` plus the linear map of ``x``, itself under ``out_norm`` if there is one; and the sum normed."""
    if out_norm is None:
        return linear.add_norm(x, residual, norm, scratch)
    return _normed(linear(x, scratch=scratch), out_norm, residual, norm)


def _normed(
    x: torch.Tensor, out_norm: Norm | None, residual: torch.Tensor, norm: Norm
) -> tuple[Normed, torch.Tensor]:
    if out_norm is not None:
        x, _ = out_norm(x)
    normed, residual = norm(x, residual)
    return Normed(normed), residual


def activation(name: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    """The gated activation: ``[T, 2I]``, gate first, to ``[T, I]``."""
    return kernels.silu_mul if name == "silu" else kernels.gelu_tanh_mul
