"""Norm, rotary embedding and activations: the reference against transformers, the CPU's version against it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from nanochat import kernels
from nanochat.kernels import cpu, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cos_sin_table(positions: int, rotary_dim: int) -> torch.Tensor:
    frequencies = 10_000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(positions).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class TestRmsNorm:
    @pytest.mark.parametrize("backend", [reference, cpu])
    @pytest.mark.parametrize(("norm", "plus_one"), [(LlamaRMSNorm, False), (GemmaRMSNorm, True)])
    def test_equals_transformers_bit_for_bit_in_float32(
        self, backend: object, norm: Callable, plus_one: bool
    ) -> None:
        module = norm(48, eps=1e-5)
        module.weight.data = randn(48, seed=1)
        x = randn(7, 48) * 3
        normed, residual = backend.rms_norm(x, module.weight.data, 1e-5, plus_one=plus_one)  # type: ignore[attr-defined]
        assert torch.equal(normed, module(x).detach())
        assert residual is x

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("plus_one", [False, True])
    @pytest.mark.parametrize("tokens", [0, 1, 5])
    def test_residual(self, dtype: torch.dtype, plus_one: bool, tokens: int) -> None:
        x, residual = randn(tokens, 64, dtype=dtype), randn(tokens, 64, dtype=dtype, seed=1)
        weight = randn(64, dtype=dtype, seed=2)
        expected = reference.rms_norm(x, weight, 1e-6, residual, plus_one=plus_one)
        actual = kernels.rms_norm(x, weight, 1e-6, residual, plus_one=plus_one)
        assert torch.equal(actual[1], x + residual)
        assert actual[0].dtype == dtype
        torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

    @pytest.mark.parametrize("backend", [reference, cpu])
    @pytest.mark.parametrize("plus_one", [False, True])
    def test_a_float32_residual_stays_so_and_what_is_normed_has_the_weights_type(
        self, backend: object, plus_one: bool
    ) -> None:
        x, residual = randn(5, 64, dtype=torch.bfloat16), randn(5, 64, seed=1)
        weight = randn(64, dtype=torch.bfloat16, seed=2)
        normed, summed = backend.rms_norm(x, weight, 1e-6, residual, plus_one=plus_one)  # type: ignore[attr-defined]
        assert torch.equal(summed, x.float() + residual)
        exact, _ = reference.rms_norm(summed, weight.float(), 1e-6, plus_one=plus_one)
        assert normed.dtype == torch.bfloat16
        torch.testing.assert_close(normed.float(), exact, atol=1e-2, rtol=1e-2)
        first, same = backend.rms_norm(residual, weight, 1e-6, plus_one=plus_one)  # type: ignore[attr-defined]
        assert first.dtype == torch.bfloat16
        assert same is residual

    def test_large_values_do_not_overflow_half_precision(self) -> None:
        x = torch.full((1, 64), 3e4, dtype=torch.float16)
        normed, _ = kernels.rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6)
        torch.testing.assert_close(normed, torch.ones_like(normed))


class TestRope:
    def test_equals_transformers(self) -> None:
        q, k, positions = randn(6, 4, 16), randn(6, 2, 16, seed=1), torch.tensor([0, 1, 5, 99, 7, 7])
        table = cos_sin_table(100, 16)
        cos, sin = (x.repeat(1, 2)[positions].unsqueeze(0) for x in table.chunk(2, dim=-1))
        expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
        for backend in (reference, cpu):
            actual = backend.rope(q, k, positions, table)
            torch.testing.assert_close(actual, tuple(x[0].transpose(0, 1) for x in expected))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rotary_dim", [2, 16, 32])
    @pytest.mark.parametrize("norm", [False, True])
    @pytest.mark.parametrize("plus_one", [False, True])
    def test_partial_rotation_and_head_norm(
        self, dtype: torch.dtype, rotary_dim: int, norm: bool, plus_one: bool
    ) -> None:
        qkv = randn(9, 8 * 32, dtype=dtype)  # q and k are views of one projection
        q, k = qkv[:, :160].unflatten(1, (5, 32)), qkv[:, 160:192].unflatten(1, (1, 32))
        before = qkv.clone()
        norms = {"q_norm": randn(32, dtype=dtype, seed=3), "k_norm": randn(32, dtype=dtype, seed=4)}
        arguments = (q, k, torch.arange(9) * 3, cos_sin_table(40, rotary_dim))
        options = {**(norms if norm else {}), "eps": 1e-5, "plus_one": plus_one}
        expected = reference.rope(*arguments, **options)
        actual = kernels.rope(*arguments, **options)
        assert [x.dtype for x in actual] == [dtype, dtype]
        assert torch.equal(qkv, before)
        torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        if not norm:
            assert torch.equal(actual[0][..., rotary_dim:], q[..., rotary_dim:])

    def test_only_one_norm(self) -> None:
        arguments = (randn(3, 2, 8), randn(3, 2, 8, seed=1), torch.arange(3), cos_sin_table(3, 8))
        weight = randn(8, seed=2)
        for name in ("q_norm", "k_norm"):
            expected = reference.rope(*arguments, **{name: weight})
            torch.testing.assert_close(kernels.rope(*arguments, **{name: weight}), expected)

    def test_rotation_keeps_length_and_relative_angle(self) -> None:
        x = randn(1, 1, 32).expand(50, 1, 32).contiguous()
        q, k = kernels.rope(x, x, torch.arange(50), cos_sin_table(50, 32))
        torch.testing.assert_close(q.norm(dim=-1), x.norm(dim=-1))
        products = (q[5:] * k[:-5]).sum(-1)
        torch.testing.assert_close(products, products[:1].expand_as(products), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activations(name: str, tokens: int, dtype: torch.dtype) -> None:
    gate_up = randn(tokens, 2 * 24, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    functional = torch.nn.functional
    exact = functional.silu(gate) if name == "silu_mul" else functional.gelu(gate, approximate="tanh")
    before = gate_up.clone()
    for function in (getattr(reference, name), getattr(kernels, name)):
        out = function(gate_up)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), exact * up, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(gate_up, before)


X = torch.zeros(3, 8)
HEADS = torch.zeros(3, 2, 8)
TABLE = torch.zeros(5, 8)
POSITIONS = torch.zeros(3, dtype=torch.int64)
META = torch.device("meta")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda: kernels.rms_norm(X[0], X[0], 1e-5)),
        ("x", lambda: kernels.rms_norm(X.int(), X[0], 1e-5)),
        ("weight", lambda: kernels.rms_norm(X, X[0, :4], 1e-5)),
        ("weight", lambda: kernels.rms_norm(X, X[0].to(META), 1e-5)),
        ("residual", lambda: kernels.rms_norm(X, X[0], 1e-5, X.half())),
        ("residual", lambda: kernels.rms_norm(X, X[0], 1e-5, X[:2])),
        ("q", lambda: kernels.rope(X, HEADS, POSITIONS, TABLE)),
        ("k", lambda: kernels.rope(HEADS, HEADS[:2], POSITIONS, TABLE)),
        ("k", lambda: kernels.rope(HEADS, HEADS.half(), POSITIONS, TABLE)),
        ("positions", lambda: kernels.rope(HEADS, HEADS, POSITIONS.int(), TABLE)),
        ("positions", lambda: kernels.rope(HEADS, HEADS, POSITIONS[:2], TABLE)),
        ("cos_sin", lambda: kernels.rope(HEADS, HEADS, POSITIONS, TABLE.half())),
        ("cos_sin", lambda: kernels.rope(HEADS, HEADS, POSITIONS, TABLE[:, :7])),
        ("cos_sin", lambda: kernels.rope(HEADS, HEADS, POSITIONS, torch.zeros(5, 10))),
        ("q_norm", lambda: kernels.rope(HEADS, HEADS, POSITIONS, TABLE, q_norm=X[0, :4])),
        ("q_norm", lambda: kernels.rope(HEADS, HEADS, POSITIONS, TABLE, q_norm=X[0].half())),
        ("k_norm", lambda: kernels.rope(HEADS, HEADS, POSITIONS, TABLE, k_norm=X)),
        ("gate_up", lambda: kernels.silu_mul(X[:, :7])),
        ("gate_up", lambda: kernels.gelu_tanh_mul(X.int())),
    ],
)
def test_a_wrong_argument_is_named(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be "):
        call()
