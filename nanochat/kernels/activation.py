"""Gated activations: one pass over the two halves of a packed projection. Knows nothing of models."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanochat.kernels.checks import check_dense
from nanochat.kernels.triton_utils import dependent_launch, enter, tanh

_BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `nanochat.kernels.silu_mul`."""
    return _gate(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `nanochat.kernels.gelu_tanh_mul`."""
    return _gate(gate_up, gelu=True)


def _gate(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    check_dense(gate_up=gate_up)
    tokens, width = gate_up.shape
    out = torch.empty((tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (tokens, triton.cdiv(width // 2, _BLOCK))
        dependent = dependent_launch(gate_up.device)
        _gate_kernel[grid](
            gate_up,
            out,
            gate_up.stride(0),
            width // 2,
            GELU=gelu,
            BLOCK=_BLOCK,
            DEPENDENT=dependent,
            num_warps=4,
            launch_pdl=dependent,
        )
    return out


@triton.jit
def _gate_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_token: int,
    width: int,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    enter(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(gate_up_ptr + token * stride_token + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * stride_token + width + cols, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        activated = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    else:
        activated = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + token * width + cols, activated * up, mask=mask)
