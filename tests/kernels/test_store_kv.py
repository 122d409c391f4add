"""Storing K and V: which slots change, and what INT8 makes of a vector."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import kernels
from nanochat.kernels import LayerCache, cpu, reference
from tests.kernels.paged import empty_cache

FLOAT16_MAX = 65504.0
BACKENDS = [reference.store_kv, cpu.store_kv]


def tensors(cache: LayerCache) -> list[torch.Tensor]:
    return [x for x in (cache.k, cache.v, cache.k_scale, cache.v_scale) if x is not None]


def stored(vector: list[float], store: Callable[..., None] = kernels.store_kv) -> tuple[list[int], float]:
    """INT8 values and scale of one vector."""
    cache = empty_cache(1, 1, 1, len(vector), torch.float32, int8=True)
    x = torch.tensor(vector).view(1, 1, -1)
    store(x, x, cache, torch.tensor([0]))
    assert cache.k_scale is not None
    return cache.k.flatten().tolist(), float(cache.k_scale)


@pytest.mark.parametrize("store", BACKENDS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_the_named_slots_change(store: Callable[..., None], int8: bool, dtype: torch.dtype) -> None:
    cache = empty_cache(5, 4, 2, 8, dtype, int8=int8)
    before = [x.clone() for x in tensors(cache)]
    slots = torch.tensor([19, 0, -1, 7, 12, -1])
    k, v = torch.randn(6, 2, 8).to(dtype), torch.randn(6, 2, 8).to(dtype)
    store(k, v, cache, slots)
    written = torch.zeros(20, dtype=torch.bool)
    written[slots[slots >= 0]] = True
    for old, new in zip(before, tensors(cache), strict=True):
        assert torch.equal(old.flatten(0, 1)[~written].nan_to_num(), new.flatten(0, 1)[~written].nan_to_num())
        assert not new.flatten(0, 1)[written].float().isnan().any()
    table = torch.arange(5)
    for read, original in zip(reference.read_kv(cache, table, 20), (k, v), strict=True):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                step = float(original[token].abs().max()) / 127
                error = (read[slot] - original[token].float()).abs().max()
                assert error <= (0.51 * step if int8 else 0)


@pytest.mark.parametrize("store", BACKENDS)
@pytest.mark.parametrize("int8", [False, True])
def test_all_slots_negative_or_no_tokens(store: Callable[..., None], int8: bool) -> None:
    cache = empty_cache(2, 2, 1, 4, torch.float32, int8=int8)
    before = [x.clone() for x in tensors(cache)]
    for tokens in (0, 3):
        x = torch.randn(tokens, 1, 4)
        store(x, x, cache, torch.full((tokens,), -1))
    for old, new in zip(before, tensors(cache), strict=True):
        assert torch.equal(old.nan_to_num(), new.nan_to_num())


@pytest.mark.parametrize("int8", [False, True])
def test_a_slot_past_the_cache_is_an_error(int8: bool) -> None:
    cache = empty_cache(2, 2, 1, 4, torch.float32, int8=int8)
    x = torch.randn(2, 1, 4)
    with pytest.raises(IndexError):
        kernels.store_kv(x, x, cache, torch.tensor([0, 4]))
    with pytest.raises(IndexError):
        kernels.store_kv(x, x, cache, torch.tensor([-1, 4]))


def test_k_and_v_may_be_views_of_one_projection() -> None:
    qkv = torch.randn(3, 6 * 8)
    before = qkv.clone()
    k, v = qkv[:, 16:32].unflatten(1, (2, 8)), qkv[:, 32:].unflatten(1, (2, 8))
    for int8 in (False, True):
        cache = empty_cache(1, 4, 2, 8, torch.float32, int8=int8)
        kernels.store_kv(k, v, cache, torch.arange(3))
        read_k, read_v = reference.read_kv(cache, torch.tensor([0]), 3)
        torch.testing.assert_close((read_k, read_v), (k, v), atol=0.02, rtol=0)
    assert torch.equal(qkv, before)


class TestInt8:
    @pytest.mark.parametrize("store", BACKENDS)
    @pytest.mark.parametrize(
        ("vector", "values", "scale"),
        [
            ([0.0, 0.0], [0, 0], 0.0),
            ([127.0, -127.0, 1.0], [127, -127, 1], 1.0),
            # Halves go away from zero; what is just below a half goes to zero.
            ([127.0, 0.5, -0.5, 1.5, 2.5, -2.5], [127, 1, -1, 2, 3, -3], 1.0),
            ([127.0, 0.49999997, -0.49999997], [127, 0, 0], 1.0),
            # Too small for a float16 scale.
            ([3e-6, -1e-6], [0, 0], 0.0),
            # So small that the scale's own rounding matters: clamped, not wrapped.
            ([127 * 8.9e-8, 1e-6], [127, 17], 2**-24),
            # Past what a float16 scale can hold.
            ([1e9, -3e38, 127 * FLOAT16_MAX], [127, -127, 127], FLOAT16_MAX),
            ([float("nan"), 127.0, 3.0], [0, 127, 3], 1.0),
            ([float("inf"), float("-inf"), 1.0, float("nan")], [127, -127, 0, 0], FLOAT16_MAX),
            ([float("nan")], [0], 0.0),
        ],
    )
    def test_values(
        self, store: Callable[..., None], vector: list[float], values: list[int], scale: float
    ) -> None:
        assert stored(vector, store) == (values, scale)

    @given(
        st.integers(0, 10**6),
        st.sampled_from([1e-9, 1e-6, 1e-4, 1.0, 100.0, 1e6, 1e30]),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    )
    @settings(max_examples=60, deadline=None)
    def test_the_fast_version_stores_the_same_bits(self, seed: int, size: float, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        k, v = ((torch.randn(5, 2, 16, generator=generator) * size).to(dtype) for _ in range(2))
        caches = [empty_cache(2, 4, 2, 16, dtype, int8=True) for _ in BACKENDS]
        for cache, store in zip(caches, BACKENDS, strict=True):
            store(k, v, cache, torch.tensor([1, 0, 7, 6, 3]))
        for a, b in zip(*(tensors(cache) for cache in caches), strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())

    def test_the_stored_scale_is_the_one_divided_by(self) -> None:
        """Rounding the scale to float16 after the division would cost up to 2^-11 of every value."""
        x = torch.randn(4000, 1, 64, generator=torch.Generator().manual_seed(0))
        cache = empty_cache(4000, 1, 1, 64, torch.float32, int8=True)
        kernels.store_kv(x, x, cache, torch.arange(4000))
        assert cache.k_scale is not None
        scale = cache.k_scale.float().view(-1, 1, 1)
        error = (cache.k.view(4000, 1, 64) * scale - x).abs() / scale
        # Half a step, but for the largest value, which the clamp may cut where the scale was rounded down.
        assert float(error.max()) <= 0.5 + 127 * 2**-11


K = torch.zeros(3, 2, 8)
SLOTS = torch.arange(3)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("k", (K[..., :4], K, SLOTS)),
        ("k", (K[:, :1], K, SLOTS)),
        ("k", (K[0], K, SLOTS)),
        ("k", (K.half(), K, SLOTS)),
        ("v", (K, K[:2], SLOTS)),
        ("v", (K, K.half(), SLOTS)),
        ("slots", (K, K, SLOTS.int())),
        ("slots", (K, K, SLOTS[:2])),
    ],
)
def test_a_wrong_argument_is_named(name: str, arguments: tuple[torch.Tensor, ...]) -> None:
    cache = empty_cache(2, 4, 2, 8, torch.float32, int8=False)
    k, v, slots = arguments
    with pytest.raises(ValueError, match=f"^{name} must be "):
        kernels.store_kv(k, v, cache, slots)
