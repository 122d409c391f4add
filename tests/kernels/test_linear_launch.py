"""What the linear kernel is launched with, without a GPU: PyTorch does what the kernel would with its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nanochat.kernels import gpu_linear, reference, triton_utils
from nanochat.kernels.normed import Normed
from nanochat.kernels.triton_utils import INTERPRETED, DeviceInfo

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter's launchers leave it to PyTorch anyway")


class PlainKernel:
    """Stands in for the kernel: checks that the arguments belong together, and computes from them alone."""

    launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            self.launches += 1
            self.run(grid[0], constants, *args)

        return launch

    def run(
        self,
        programs: int,
        constants: dict[str, Any],
        x: torch.Tensor,
        squares: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        out: torch.Tensor,
        summed: torch.Tensor | None,
        out_squares: torch.Tensor | None,
        rows: int,
        x_stride: int,
        residual_stride: int,
        eps: float,
    ) -> None:
        in_size, out_size = constants["IN_SIZE"], constants["OUT_SIZE"]
        assert in_size % (constants["SPLIT"] * constants["STEP"]) == 0
        assert programs * 16 * constants["REPEAT"] == out_size
        assert constants["ROW_TILE"] * constants["ROW_TILES"] >= rows
        assert out.shape == (rows, out_size)
        assert out.is_contiguous()
        result = x.as_strided((rows, in_size), (x_stride, 1)).float() @ weight.float().T
        if squares is not None:
            assert squares.shape == (constants["SQUARES"], rows)
            assert constants["SQUARES_TILE"] >= constants["SQUARES"]
            result *= torch.rsqrt(squares.sum(0) / in_size + eps).unsqueeze(1)
        if bias is not None:
            result += bias.float()
        if constants["GATED"]:
            gate, up = result.chunk(2, dim=-1)
            result = F.silu(gate) * up
        if residual is not None:
            assert norm_weight is not None
            assert summed is not None
            assert out_squares is not None
            assert out_squares.shape == (programs, rows)
            result += residual.as_strided((rows, out_size), (residual_stride, 1))
            summed.copy_(result)
            out_squares.copy_(result.pow(2).unflatten(1, (programs, -1)).sum(-1).T)
            result *= norm_weight.float() + (1.0 if constants["PLUS_ONE"] else 0.0)
        out.copy_(result)


@pytest.mark.parametrize("rows", [1, 8, 13, 20, 40])
@pytest.mark.parametrize("plus_one", [False, True])
def test_a_layers_maps_one_after_another(monkeypatch: pytest.MonkeyPatch, rows: int, plus_one: bool) -> None:
    """Norms whose division is left to the next map, and types and shapes that are left to PyTorch."""
    kernel = PlainKernel()
    for module in (gpu_linear, triton_utils):
        monkeypatch.setattr(module, "device_info", lambda device: DeviceInfo(90, 30))
    monkeypatch.setattr(gpu_linear, "_linear_kernel", kernel)
    monkeypatch.setattr(gpu_linear, "rms_norm", reference.rms_norm)
    monkeypatch.setattr(gpu_linear, "silu_mul", reference.silu_mul)
    generator = torch.Generator().manual_seed(rows)

    def randn(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator) / size[-1] ** 0.5).bfloat16()

    mixed, residual = randn(rows, 1152) * 30, torch.randn(rows, 576, generator=generator) * 3
    out, gate_up, down, head = randn(576, 1152), randn(3072, 576), randn(576, 1536), randn(640, 576)
    norms, bias = [randn(576) * 24 for _ in range(2)], randn(576)
    results = []
    for ops in (gpu_linear, reference):
        x, first = ops.linear_add_norm(mixed, out, bias, residual, norms[0], 1e-5, plus_one=plus_one)
        inner = ops.silu_linear(x, gate_up)
        x, second = ops.linear_add_norm(inner, down, None, first, norms[1], 1e-5, plus_one=plus_one)
        results.append((first, inner, second, ops.linear(x, head, dtype=torch.float32)))
        if ops is gpu_linear:
            assert (x.squares is not None) == (rows <= 16)
    for got, expected in zip(*results, strict=True):
        assert got.dtype == expected.dtype
        assert (got.float() - expected.float()).norm() < 0.02 * expected.float().norm()
    assert kernel.launches == (4 if rows <= 16 else 2 if rows <= 32 else 0)
    # Rows that are not 16-byte aligned are not for the kernel.
    launches = kernel.launches
    gpu_linear.linear(Normed(randn(rows, 600)[:, 1:577]), head)
    # Nor is a bias whose values lie apart.
    apart = torch.stack([bias, -bias], dim=1)[:, 0]
    assert torch.equal(gpu_linear.linear(mixed, out, apart), F.linear(mixed, out, bias))
    assert kernel.launches == launches


@pytest.mark.parametrize("odd", ["residual", "norm_weight", "types"])
def test_what_the_kernel_cannot_read_is_normed_apart(monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    kernel = PlainKernel()
    for module in (gpu_linear, triton_utils):
        monkeypatch.setattr(module, "device_info", lambda device: DeviceInfo(90, 30))
    monkeypatch.setattr(gpu_linear, "_linear_kernel", kernel)
    monkeypatch.setattr(gpu_linear, "rms_norm", reference.rms_norm)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 576, generator=generator).bfloat16() for n in (3, 640))
    residual, norm_weight = (torch.randn(n, 640, generator=generator) for n in (3, 1))
    norm_weight = norm_weight[0] if odd == "types" else norm_weight[0].bfloat16()
    if odd == "residual":
        residual = residual.t().contiguous().t()
    elif odd == "norm_weight":
        norm_weight = torch.stack([norm_weight, norm_weight], dim=1)[:, 0]
    normed, summed = gpu_linear.linear_add_norm(x, weight, None, residual, norm_weight, 1e-6)
    expected, expected_sum = reference.linear_add_norm(x, weight, None, residual, norm_weight, 1e-6)
    assert normed.squares is None
    assert normed.values.dtype == norm_weight.dtype
    torch.testing.assert_close(normed.values, expected.values, atol=0.05, rtol=0.02)
    torch.testing.assert_close(summed, expected_sum, atol=0.5, rtol=0.02)
