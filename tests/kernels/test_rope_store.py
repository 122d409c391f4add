"""Rotation and store in one op: what the cache holds, and what an INT8 cache's keys are turned into first."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from nanochat import kernels
from nanochat.kernels import cpu, reference
from tests.kernels.paged import empty_cache

DIMS = [64, 80, 96, 128, 256]
BACKENDS = [reference, cpu]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dim", [1, 6, 16, *DIMS])
def test_the_matrix_is_orthogonal_and_shares_out_every_dim_evenly(dim: int) -> None:
    matrix = reference.hadamard_matrix(dim)
    torch.testing.assert_close(matrix @ matrix, torch.eye(dim))
    assert torch.equal(matrix, matrix.T)
    mixed = {1: 1, 6: 2, 80: 16, 96: 32}.get(dim, dim)
    assert (matrix != 0).sum(0).tolist() == [mixed] * dim
    torch.testing.assert_close(matrix.abs().amax(0), torch.full((dim,), mixed**-0.5))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rotates", [False, True])
def test_spreading_changes_no_score(backend: ModuleType, dim: int, rotates: bool) -> None:
    q, k, positions = randn(7, 6, dim), randn(7, 2, dim, seed=1), torch.arange(7) * 5
    angles = randn(40, dim, seed=2) if rotates else None
    plain = reference.rope(q, k, positions, angles)
    spread = backend.rope(q, k, positions, angles, spread=True)
    scores = [torch.einsum("qkgd,lkd->kgql", a.unflatten(1, (2, 3)), b) for a, b in (plain, spread)]
    torch.testing.assert_close(scores[1], scores[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("norm", [False, True])
def test_the_cpu_spreads_as_the_definition(dtype: torch.dtype, dim: int, norm: bool) -> None:
    q, k = randn(5, 3, dim, dtype=dtype), randn(5, 1, dim, dtype=dtype, seed=1)
    norms = {"q_norm": randn(dim, dtype=dtype, seed=2), "k_norm": randn(dim, dtype=dtype, seed=3)}
    options = {**(norms if norm else {}), "spread": True}
    for angles in (None, randn(9, dim, seed=4), randn(9, dim // 2, seed=4)):
        arguments = (q, k, torch.arange(5), angles)
        expected, got = reference.rope(*arguments, **options), cpu.rope(*arguments, **options)
        torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("backend", [*BACKENDS, kernels])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rotates", [False, True])
def test_only_an_int8_cache_has_its_keys_spread(backend: ModuleType, int8: bool, rotates: bool) -> None:
    q, k, v = randn(6, 4, 16), randn(6, 2, 16, seed=1), randn(6, 2, 16, seed=2)
    positions, slots = torch.arange(6), torch.tensor([4, -1, 11, 0, 7, 2])
    angles = randn(6, 16, seed=3) if rotates else None
    got, expected = (empty_cache(3, 4, 2, 16, torch.float32, int8=int8) for _ in range(2))
    new_q = backend.rope_store(q, k, v, positions, angles, got, slots)
    expected_q, expected_k = reference.rope(q, k, positions, angles, spread=int8)
    reference.store_kv(expected_k, v, expected, slots)
    torch.testing.assert_close(new_q, expected_q)
    for name in ("k", "v", "k_scale", "v_scale"):
        if getattr(expected, name) is not None:
            # A value on the edge of two steps may go to the other.
            steps = 1 if name in ("k", "v") and int8 else 1e-3
            torch.testing.assert_close(
                getattr(got, name), getattr(expected, name), atol=steps, rtol=0, equal_nan=True
            )


@pytest.mark.parametrize("dim", DIMS)
def test_a_few_large_dims_no_longer_cost_the_others_their_bits(dim: int) -> None:
    """Real keys look like this: their largest dim is five times the others' root mean square or more."""
    k = randn(64, 2, dim)
    k[..., 3] += 12.0
    k[..., dim - 2] -= 8.0
    errors = []
    for spread in (False, True):
        _, keys = reference.rope(k, k, torch.arange(64), None, spread=spread)
        values, scale = reference.quantize(keys)
        errors.append(float((values * scale.float().unsqueeze(-1) - keys).pow(2).mean()))
    assert errors[1] < errors[0] / 3
