"""The Triton KV store, norms, rope and activations against the definitions: see `conftest` for where this runs."""

from __future__ import annotations

import pytest
import torch

from nanochat.kernels import gpu, reference
from nanochat.kernels.normed import Normed
from nanochat.kernels.triton_utils import INTERPRETED
from tests.kernels.paged import empty_cache

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The interpreter cuts BF16 off instead of rounding it: one unit in the last place more.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 576, 3000])
@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm(dtype: torch.dtype, hidden: int, plus_one: bool) -> None:
    x, weight = randn(5, hidden, dtype=dtype), randn(hidden, dtype=dtype, seed=1)
    for residual in (None, randn(5, hidden, dtype=dtype, seed=2), randn(5, hidden, seed=3)):
        got = gpu.rms_norm(x, weight, 1e-6, residual, plus_one=plus_one)
        expected = reference.rms_norm(x, weight, 1e-6, residual, plus_one=plus_one)
        assert_close(got[0], expected[0], dtype)
        assert_close(got[1], expected[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden", "parts"), [(5, 576, 9), (1, 64, 1), (33, 3000, 47)])
def test_divide_norm(dtype: torch.dtype, rows: int, hidden: int, parts: int) -> None:
    squares = torch.rand(parts, rows, generator=torch.Generator().manual_seed(1)).to(DEVICE) * hidden
    normed = Normed(randn(rows, hidden, dtype=dtype), squares, 1e-5)
    assert_close(gpu.divide_norm(normed), normed.finished(), dtype)
    assert gpu.divide_norm(Normed(normed.values)) is normed.values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"),
    [(4, 2, 64, 64), (9, 3, 80, 80), (7, 1, 96, 48), (2, 2, 256, 64), (3, 1, 96, None), (2, 1, 128, 128)],
)
@pytest.mark.parametrize("spread", [False, True])
def test_rope(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, rotary_dim: int | None, spread: bool
) -> None:
    packed = randn(5, (heads + kv_heads) * dim, dtype=dtype)
    q, k = (part.unflatten(1, (-1, dim)) for part in packed.split((heads * dim, kv_heads * dim), dim=1))
    angles = None if rotary_dim is None else randn(40, rotary_dim, seed=1)
    positions = torch.tensor([0, 39, 7, 7, 1], device=DEVICE)
    for norms in ((None, None), (randn(dim, dtype=dtype, seed=2), randn(dim, dtype=dtype, seed=3))):
        for plus_one in (False, True) if norms[0] is not None else (False,):
            arguments = {"q_norm": norms[0], "k_norm": norms[1], "plus_one": plus_one, "spread": spread}
            got = gpu.rope(q, k, positions, angles, **arguments)
            expected = reference.rope(q, k, positions, angles, **arguments)
            assert_close(got[0], expected[0], dtype)
            assert_close(got[1], expected[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(dtype: torch.dtype) -> None:
    gate_up = randn(3, 2 * 1500, dtype=dtype) * 4
    assert_close(gpu.silu_mul(gate_up), reference.silu_mul(gate_up), dtype)
    assert_close(gpu.gelu_tanh_mul(gate_up), reference.gelu_tanh_mul(gate_up), dtype)
    assert gpu.silu_mul(gate_up[:0]).shape == (0, 1500)


def extreme_vectors(tokens: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random vectors, the first few of them special."""
    x = randn(tokens, kv_heads, dim, dtype=dtype, seed=seed)
    x[0] = 0
    x[1] = float("nan")
    x[2, 0, 3] = float("inf")
    x[3, -1, 4] = float("-inf")
    x[4] = 1e-7
    x[5] *= 1e-4
    x[6, 0, :5] = torch.tensor([127.0, 0.5, 1.5, -2.5, -126.5], device=DEVICE, dtype=dtype)
    x[6, 0, 5:] = 0
    x[7] = torch.finfo(dtype).max
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("kv_heads", "dim"), [(2, 64), (3, 80)])
def test_store_kv(dtype: torch.dtype, int8: bool, kv_heads: int, dim: int) -> None:
    k, v = (extreme_vectors(40, kv_heads, dim, dtype, seed) for seed in (0, 1))
    slots = torch.randperm(6 * 16, generator=torch.Generator().manual_seed(2))[:40].to(DEVICE)
    slots[9] = -1
    got, expected = (empty_cache(6, 16, kv_heads, dim, dtype, int8=int8) for _ in range(2))
    for cache in (got, expected):
        for name in ("k", "v", "k_scale", "v_scale"):
            value = getattr(cache, name)
            if value is not None:
                setattr(cache, name, value.to(DEVICE))
    gpu.store_kv(k, v, got, slots)
    reference.store_kv(k, v, expected, slots)
    for name in ("k", "v", "k_scale", "v_scale"):
        value = getattr(got, name)
        if value is not None:
            torch.testing.assert_close(value, getattr(expected, name), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"),
    [
        (4, 2, 64, 64),
        (9, 3, 80, 80),
        (2, 1, 96, 96),
        (4, 1, 128, 128),
        (2, 1, 256, 256),
        (7, 1, 128, 64),
        (4, 2, 64, None),
    ],
)
def test_rope_store(
    dtype: torch.dtype, int8: bool, heads: int, kv_heads: int, dim: int, rotary_dim: int | None
) -> None:
    """One launch where a head's halves turn into each other, more elsewhere: the cache is as after two."""
    tokens = 5
    packed = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in packed.split(sizes, dim=1))
    angles = None if rotary_dim is None else randn(40, rotary_dim, seed=1)
    positions = torch.tensor([0, 39, 7, 7, 1], device=DEVICE)
    slots = torch.tensor([17, 3, -1, 40, 0], device=DEVICE)
    for norms in ((None, None), (randn(dim, dtype=dtype, seed=2), randn(dim, dtype=dtype, seed=3))):
        arguments = {"q_norm": norms[0], "k_norm": norms[1], "plus_one": norms[0] is not None}
        got, expected = (empty_cache(3, 16, kv_heads, dim, dtype, int8=int8, device=DEVICE) for _ in range(2))
        new_q = gpu.rope_store(q, k, v, positions, angles, got, slots, **arguments)
        expected_q, new_k = reference.rope(q, k, positions, angles, **arguments, spread=int8)
        gpu.store_kv(new_k, v, expected, slots)
        assert_close(new_q, expected_q, dtype)
        for name in ("k", "v", "k_scale", "v_scale"):
            value = getattr(got, name)
            if value is not None:
                # A rotated value, and the greatest of its head, may be rounded the other way: a step each.
                steps = 2 if value.dtype == torch.int8 else TOLERANCE[dtype]
                torch.testing.assert_close(
                    value, getattr(expected, name), atol=steps, rtol=TOLERANCE[dtype], equal_nan=True
                )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantisation_rounds_every_half_away_from_zero(dtype: torch.dtype) -> None:
    """Values on a half of a step, and their neighbours, for a scale of one and of many bits."""
    rows = []
    for scale in (1.0, 1.25, 1.0009765625, 1.9990234375, 0.75):
        steps = torch.arange(0, 64, dtype=torch.float64)
        values = torch.stack(((steps + 0.5) * scale, steps * scale)).flatten()
        values[-1] = 127 * scale
        rows.append(values)
    x = torch.stack(rows).to(dtype).unsqueeze(1).to(DEVICE)
    got, expected = (empty_cache(1, 16, 1, 128, dtype, int8=True) for _ in range(2))
    for cache in (got, expected):
        for name in ("k", "v", "k_scale", "v_scale"):
            setattr(cache, name, getattr(cache, name).to(DEVICE))
    slots = torch.arange(x.shape[0], device=DEVICE)
    gpu.store_kv(x, -x, got, slots)
    reference.store_kv(x, -x, expected, slots)
    assert torch.equal(got.k, expected.k)
    assert torch.equal(got.v, expected.v)


def test_layouts_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(ValueError, match="x must be dense"):
        gpu.rms_norm(randn(8, 4).T, randn(8), 1e-6)
    with pytest.raises(ValueError, match="weight must be dense"):
        gpu.rms_norm(randn(4, 8), randn(8, 2)[:, 0], 1e-6)
    with pytest.raises(ValueError, match="gate_up must be dense"):
        gpu.silu_mul(randn(8, 4).T)
    with pytest.raises(ValueError, match="q must be dense"):
        gpu.rope(
            randn(2, 8, 4).transpose(1, 2), randn(2, 4, 8), torch.zeros(2, dtype=torch.int64), randn(4, 8)
        )
    cache = empty_cache(1, 16, 4, 8, torch.float32, int8=False)
    slots = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="k must be dense"):
        gpu.store_kv(randn(2, 8, 4).transpose(1, 2), randn(2, 4, 8), cache, slots)


@pytest.mark.parametrize("tokens", [3, 200])
@pytest.mark.parametrize("name", ["positions", "slots", "q_norm", "k_norm"])
def test_numbers_that_lie_apart_are_refused(name: str, tokens: int) -> None:
    """Every other of twice as many: read as neighbours, they were others' positions, and K went to others' slots."""
    heads, numbers = randn(tokens, 2, 8), torch.arange(2 * tokens, device=DEVICE)
    arguments: dict[str, torch.Tensor] = {"positions": numbers[:tokens], "slots": numbers[:tokens]}
    arguments[name] = randn(8, 2)[:, 0] if "norm" in name else numbers[::2]
    positions, slots = arguments.pop("positions"), arguments.pop("slots")
    cache = empty_cache(32, 16, 2, 8, torch.float32, int8=False, device=DEVICE)
    with pytest.raises(ValueError, match=f"{name} must be dense"):
        gpu.rope_store(heads, heads, heads, positions, randn(400, 8), cache, slots, **arguments)
    if "norm" in name:
        with pytest.raises(ValueError, match=f"{name} must be dense"):
            gpu.rope(heads, heads, positions, randn(400, 8), **arguments)
    assert cache.k.isnan().all()
