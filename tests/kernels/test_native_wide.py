"""The native ops for many rows against the reference, for every instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from nanochat.kernels import cpu_linear, reference
from nanochat.kernels.native import library, linear, linear_ops, ops
from nanochat.kernels.native.program import NotNative
from tests.kernels.paged import make_case
from tests.kernels.test_native import CLOSE, FLOATS, close, instruction_set, on_threads, weights
from tests.kernels.test_ops import randn

__all__ = ["instruction_set"]
MANY_ROWS = [33, 47, 64, 100]


def skip_what_would_be_rounded(dtype: torch.dtype) -> None:
    if dtype == torch.float32 and library.rounds_to_bf16():
        pytest.skip("float32 stays with PyTorch here")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("size", "columns"), [(64, 96), (50, 32), (577, 512), (16, 1536)])
def test_linear_maps(size: int, columns: int, biased: bool, dtype: torch.dtype) -> None:
    skip_what_would_be_rounded(dtype)
    bias = randn(size, dtype=dtype, seed=4) if biased else None
    weight = weights(size, columns).to(dtype)
    wide4 = cpu_linear.dequantize_int4(cpu_linear.quantize_int4(weight))
    wide8 = cpu_linear.dequantize_int8(cpu_linear.quantize_int8(weight))
    kernels: list[tuple[Callable[..., torch.Tensor], torch.Tensor]] = [
        (linear.int4(linear.quantize_int4(weight), bias), wide4),
        (linear.int8(weight, bias), wide8),
        (linear.plain(weight, bias), weight.float()),
    ]
    for kernel, wide in kernels:
        for rows in MANY_ROWS:
            x = randn(rows, columns, dtype=dtype, seed=rows)
            expected = x.float() @ wide.T + (0.0 if bias is None else bias.float())
            scale = float(expected.abs().max())
            # A weight that lies half way between two levels may take either, and levels are rounded to BF16.
            tolerance = 1e-5 if wide is weight else 2e-2
            close(on_threads(kernel, x, torch.float32) / scale, expected / scale, tolerance)
            close(kernel(x) / scale, (expected / scale).to(dtype), max(CLOSE[dtype], tolerance))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_does_not_depend_on_those_beside_it(dtype: torch.dtype) -> None:
    skip_what_would_be_rounded(dtype)
    weight = weights(208, 256).to(dtype)
    for kernel in (
        linear.int4(linear.quantize_int4(weight), None),
        linear.int8(weight, None),
        linear.plain(weight),
    ):
        x = randn(90, 256, dtype=dtype)
        together = kernel(x)
        x[5] *= float("nan")
        assert torch.equal(kernel(x)[:5], together[:5])
        for first in (0, 17, 40):
            assert torch.equal(kernel(x[first + 6 : first + 40]), together[first + 6 : first + 40])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (17, 0.0), (0, 5.0), (100, 3.0)])
def test_attention(dtype: torch.dtype, int8: bool, window: int, softcap: float) -> None:
    skip_what_would_be_rounded(dtype)
    for rows, heads, kv_heads, dim in (
        ([(1, 1), (1, 0), (2, 66), (1, 130), (50, 50), (40, 170), (3, 90)], 9, 3, 64),
        ([(100, 300)], 4, 4, 32),
        ([(1, 64), (37, 37), (5, 90)], 6, 2, 48),
        ([(70, 70), (60, 260)], 32, 2, 128),
    ):
        case = make_case(rows, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, int8=int8)
        options = {"scale": dim**-0.5, "window": window, "softcap": softcap}
        expected = reference.attention(case.q, case.cache, case.batch, **options)
        actual = on_threads(ops.attention, case.q, case.cache, case.batch, **options)
        close(actual, expected, 1.6e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("window", [0, 100])
def test_attention_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype, window: int) -> None:
    skip_what_would_be_rounded(dtype)
    case = make_case(
        [(1, 70), (6, 90), (1, 1), (35, 35), (2, 280), (65, 400)], heads=9, kv_heads=3, dim=32, dtype=dtype
    )
    options = {"scale": 32**-0.5, "window": window}
    together = ops.attention(case.q, case.cache, case.batch, **options)
    starts = case.batch.query_starts
    for first in range(1, case.batch.num_rows):
        begin = int(starts[first])
        batch = replace(
            case.batch,
            block_tables=case.batch.block_tables[first:],
            context_lens=case.batch.context_lens[first:],
            query_starts=starts[first:] - begin,
        )
        alone = ops.attention(case.q[begin:], case.cache, batch, **options)
        assert torch.equal(alone, together[begin:]), f"rows from {first} on"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("int8", [False, True])
def test_attention_of_all_sizes_of_heads(dtype: torch.dtype, int8: bool) -> None:
    skip_what_would_be_rounded(dtype)
    for heads, kv_heads, dim, block_size in (
        (1, 1, 16, 16),
        (16, 1, 16, 1),
        (5, 1, 80, 7),
        (14, 2, 112, 16),
        (2, 1, 256, 64),
        (16, 1, 256, 5),
    ):
        sizes = [(1, 128), (34, 64), (3, 65), (9, 127), (2, 2), (20, 192)]
        case = make_case(
            sizes, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size, dtype=dtype, int8=int8
        )
        for options in ({"window": 64}, {"window": 1}, {"softcap": 20.0}):
            expected = reference.attention(case.q, case.cache, case.batch, scale=dim**-0.5, **options)
            actual = ops.attention(case.q, case.cache, case.batch, scale=dim**-0.5, **options)
            close(actual, expected, 1.6e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("row", [(5, 40), (40, 40)])
def test_a_key_that_is_no_number_shows_in_the_answer(dtype: torch.dtype, row: tuple[int, int]) -> None:
    """A broken model must not look healthy: few rows and many, every query that sees the key."""
    if row[0] > 32:
        skip_what_would_be_rounded(dtype)
    case = make_case([row], dtype=dtype)
    slot = int(case.batch.block_tables[0, 0]) * case.cache.block_size
    case.cache.k.flatten(0, 1)[slot] = float("nan")
    assert reference.attention(case.q, case.cache, case.batch, scale=0.1).isnan().all()
    assert ops.attention(case.q, case.cache, case.batch, scale=0.1).isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_reaches_only_queries_that_see_it(
    dtype: torch.dtype, window: int, number: float
) -> None:
    """As it is when each query is alone with the keys it sees."""
    skip_what_would_be_rounded(dtype)
    case = make_case([(90, 100)], dtype=dtype)
    options = {"scale": 0.1, "window": window}
    clean = ops.attention(case.q, case.cache, case.batch, **options)
    place, size = 70, case.cache.block_size
    slot = int(case.batch.block_tables[0, place // size]) * size + place % size
    case.cache.v.flatten(0, 1)[slot] = number
    spoilt = ops.attention(case.q, case.cache, case.batch, **options)
    positions = torch.arange(10, 100)
    sees = (positions >= place) & ((positions < place + window) if window else torch.tensor(True))
    assert torch.equal(spoilt[sees].isfinite(), torch.zeros_like(spoilt[sees], dtype=torch.bool))
    close(spoilt[~sees], clean[~sees], 1.6e-2 if dtype == torch.bfloat16 else 1e-5)


def test_what_is_not_native_is_refused() -> None:
    x = randn(40, 64, dtype=torch.bfloat16)
    with pytest.raises(NotNative, match="groups"):
        linear_ops.linear_wide(x[:, :48], randn(16, 48).bfloat16(), None, 16, None, torch.bfloat16)
    with pytest.raises(NotNative, match="differ"):
        linear_ops.linear_wide(x, randn(16, 64).bfloat16(), None, 16, randn(16), torch.bfloat16)
    if library.rounds_to_bf16():
        with pytest.raises(NotNative, match="float32"):
            linear_ops.linear_wide(x.float(), randn(16, 64), None, 16, None, torch.float32)
        case = make_case([(40, 40)])
        with pytest.raises(NotNative, match="float32"):
            ops.attention(case.q, case.cache, case.batch, scale=1.0)
