"""The native ops against the reference, for every instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from nanochat.engine import sampler
from nanochat.engine.sampler import SamplingBatch
from nanochat.kernels import cpu_linear, reference
from nanochat.kernels.native import library, linear, linear_ops, ops
from nanochat.kernels.native.program import NotNative
from tests.kernels.paged import empty_cache, make_case
from tests.kernels.test_ops import cos_sin_table, randn
from tests.native import require_native

FLOATS = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""Of what is compared, a unit in the last place or so; sums have a few more."""
ROWS = [1, 3, 4, 9, 32]


@pytest.fixture(params=["amx", "avx512", "avx2", "plain"], autouse=True)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    require_native()
    found = library.find(request.param)
    if found is None:
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setattr(library, "find", lambda: found)  # for ops that run at once
    return request.param


def on_threads(compute: Callable[..., torch.Tensor], *inputs: Any, **options: Any) -> torch.Tensor:
    """What 1, 2 and 4 threads compute, which must be the same bits."""
    before = torch.get_num_threads()
    results = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        results.append(compute(*inputs, **options))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert torch.equal(results[0], other)
    return results[0]


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    limit = CLOSE[actual.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(actual, expected, atol=limit, rtol=limit)


def eight_bits(x: torch.Tensor) -> torch.Tensor:
    """The rows that `linear_ops.quantize` stands for, and multiplies by: ``[T, K]`` float32."""
    rows, size = x.shape
    quantized = on_threads(linear_ops.quantize, x)
    levels = quantized[:, :size].contiguous().view(torch.int8).view(rows, -1, 32).float()
    numbers = quantized[:, size:].contiguous().view(torch.float32).view(rows, 3, -1)
    assert torch.equal(numbers[:, 2].contiguous().view(torch.int32).float(), -128 * levels.sum(-1))
    close(numbers[:, 1], numbers[:, 0] * levels.sum(-1))
    return (levels * numbers[:, 0].unsqueeze(-1)).flatten(1)


def weights(size: int, columns: int) -> torch.Tensor:
    return randn(size, columns, seed=3) * 0.05 + 0.01


class TestLinear:
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_rows_become_the_nearest_of_255_levels_in_each_group(self, dtype: torch.dtype) -> None:
        x = randn(9, 96, dtype=dtype) * 10.0 ** torch.arange(-4, 5).unsqueeze(1)
        x = x.to(dtype)
        x[3, 32:64] = 0.0
        errors = (eight_bits(x) - x.float()).abs().unflatten(1, (-1, 32)).amax(-1)
        steps = x.float().abs().unflatten(1, (-1, 32)).amax(-1) / 127
        assert bool((errors <= 0.5001 * steps).all())

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("biased", [False, True])
    @pytest.mark.parametrize(("size", "columns"), [(64, 96), (50, 32), (576, 1536)])
    def test_compact_weights(
        self,
        size: int,
        columns: int,
        biased: bool,
        dtype: torch.dtype,
    ) -> None:
        bias = randn(size, dtype=dtype, seed=4) if biased else None
        weight = weights(size, columns)
        quantized = cpu_linear.quantize_int4(weight)
        wide8 = cpu_linear.dequantize_int8(cpu_linear.quantize_int8(weight))
        for make, wide in (
            (
                lambda: linear.int4(linear.quantize_int4(weight), bias),
                cpu_linear.dequantize_int4(quantized),
            ),
            (lambda: linear.int8(weight, bias), wide8),
        ):
            kernel = make()
            for rows in ROWS:
                x = randn(rows, columns, dtype=dtype, seed=rows)
                expected = eight_bits(x) @ wide.T + (0.0 if bias is None else bias.float())
                scale = float(expected.abs().max())
                close(on_threads(kernel, x, torch.float32) / scale, expected / scale, 2e-5)
                close(kernel(x) / scale, (expected / scale).to(dtype), max(CLOSE[dtype], 2e-5))

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("biased", [False, True])
    @pytest.mark.parametrize(("size", "columns"), [(64, 96), (50, 32), (577, 512)])
    def test_full_weights(
        self,
        size: int,
        columns: int,
        biased: bool,
        dtype: torch.dtype,
    ) -> None:
        weight, bias = weights(size, columns).to(dtype), randn(size, dtype=dtype, seed=4) if biased else None
        for rows in ROWS:
            x = randn(rows, columns, dtype=dtype, seed=rows)
            expected = reference.linear(x, weight, bias, dtype=torch.float32)
            scale = float(expected.abs().max())
            close(
                on_threads(ops.linear, x, weight, bias, dtype=torch.float32) / scale,
                expected / scale,
                1e-5,
            )
            close(ops.linear(x, weight, bias) / scale, (expected / scale).to(dtype), max(CLOSE[dtype], 1e-5))

    def test_a_row_does_not_depend_on_those_beside_it_or_on_the_threads(self) -> None:
        weight = weights(208, 256)
        kernels = [
            linear.int4(linear.quantize_int4(weight), None),
            linear.int8(weight, None),
        ]
        kernels += [linear.plain(weight), linear.plain(weight.bfloat16())]
        before = torch.get_num_threads()
        for kernel, dtype in zip(kernels, [torch.float32] * 3 + [torch.bfloat16], strict=True):
            x = randn(27, 256, dtype=dtype)
            together = kernel(x)
            x[5] *= float("nan")
            for count in (1, 2, 4):
                torch.set_num_threads(count)
                assert torch.equal(kernel(x)[:5], together[:5])
                for row in (0, 4, 16, 26):
                    assert torch.equal(kernel(x[row : row + 1])[0], together[row])
            torch.set_num_threads(before)

    def test_many_rows_go_to_the_other_kernel(self) -> None:
        asked = []

        def many(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
            asked.append(x.shape[0])
            return x

        kernel = linear.int4(linear.quantize_int4(weights(32, 32)), None, many)
        for rows in (linear.MAX_FEW_ROWS, linear.MAX_FEW_ROWS + 1):
            kernel(randn(rows, 32))
        assert asked == [linear.MAX_FEW_ROWS + 1]

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_few_bits_are_those_of_pytorch(self, dtype: torch.dtype) -> None:
        weight = weights(50, 96).to(dtype)
        weight[7, 32:64] = 0.25
        weight[9] = 0.0
        ours, theirs = linear.quantize_int4(weight), cpu_linear.quantize_int4(weight)
        assert ours.num_outputs == 50
        assert ours.deviation == pytest.approx(theirs.deviation, abs=1e-4)
        groups = ours.levels[:, :, :256].view(4, 3, 4, 16, 4)
        halves = torch.stack((groups & 15, groups >> 4), dim=2)  # panel, group, half, quad, output, byte
        levels = halves.permute(0, 4, 1, 2, 3, 5).reshape(64, 96)
        pairs = ours.levels[:, :, 256:].contiguous().view(torch.bfloat16).view(4, 3, 16, 2).transpose(0, 1)
        pairs = pairs.reshape(3, 64, 2)
        assert not levels[50:].any()
        wide = cpu_linear.dequantize_int4(cpu_linear.Int4Weight(levels[:50].int(), pairs[:, :50], 0.0))
        # A number half way between two levels may go to either.
        steps = (cpu_linear.dequantize_int4(theirs) - wide).abs() / (
            theirs.scales_and_zeros[..., 0].float().abs().max()
        )
        assert float((steps > 0.02).float().mean()) < 0.02
        packed, scales = linear_ops.pack_int8(weight)
        quantized = cpu_linear.quantize_int8(weight)
        assert torch.equal(scales[:50], quantized.scales)
        values = (packed.view(4, 3, 8, 16, 4).permute(0, 3, 1, 2, 4).reshape(64, 96) ^ 128).view(torch.int8)
        assert torch.equal(values[:50], quantized.values)

    def test_sixteen_levels_in_each_group_are_found(self) -> None:
        wide = cpu_linear.dequantize_int4(cpu_linear.quantize_int4(weights(48, 64))).half().float()
        found = linear.four_bit(wide)
        assert found is not None
        assert found.deviation < cpu_linear.EXACT_DEVIATION
        assert linear.four_bit(weights(48, 64)) is None
        wide[40, 3] += 0.4 * float(wide[40].abs().max())
        assert linear.four_bit(wide) is None

    def test_zeros_and_rows_of_one_value(self) -> None:
        kernel = linear.int8(weights(16, 64), None)
        assert torch.equal(kernel(torch.zeros(2, 64)), torch.zeros(2, 16))
        wide = cpu_linear.dequantize_int8(cpu_linear.quantize_int8(weights(16, 64)))
        close(kernel(torch.full((1, 64), -3.0)), wide.sum(1).mul(-3).unsqueeze(0), 1e-5)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_tiny_numbers_count_as_zeros_and_nan_is_not_hidden(self, dtype: torch.dtype) -> None:
        weight = weights(16, 64)
        x = torch.zeros(4, 64, dtype=dtype)
        x[0, :32] = 1e-38
        x[1, 3], x[2, 40] = float("nan"), float("inf")
        for kernel in (linear.int4(linear.quantize_int4(weight), None), linear.int8(weight, None)):
            y = kernel(x)
            assert not y[[0, 3]].any()
            assert bool(y[1:3].isnan().all())


class TestRows:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("plus_one", [False, True])
    def test_norm(self, dtype: torch.dtype, plus_one: bool) -> None:
        x, weight = randn(9, 576, dtype=dtype) * 3, randn(576, dtype=dtype, seed=2)
        for residual in (None, randn(9, 576, seed=1), randn(9, 576, dtype=dtype, seed=1)):
            actual = ops.rms_norm(x, weight, 1e-5, residual, plus_one=plus_one)
            expected = reference.rms_norm(x, weight, 1e-5, residual, plus_one=plus_one)
            close(actual[0], expected[0])
            assert torch.equal(actual[1], expected[1])
        wide = x.float()
        close(ops.rms_norm(wide, weight, 1e-5)[0], reference.rms_norm(wide, weight, 1e-5)[0])

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_gated_activations(self, dtype: torch.dtype) -> None:
        x = randn(9, 192, dtype=dtype) * 8
        x[0, :4] = torch.tensor([200.0, -200.0, 0.0, -88.5])
        close(on_threads(ops.silu_mul, x), reference.silu_mul(x))
        close(ops.gelu_tanh_mul(x), reference.gelu_tanh_mul(x), max(CLOSE[dtype], 1e-5))

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("scale", [1.0, 24.0, 0.3])
    def test_rows_of_a_table(self, dtype: torch.dtype, scale: float) -> None:
        table, rows = randn(20, 48, dtype=dtype), torch.tensor([3, 19, 0, 3])
        for kind in (None, torch.float32):
            expected = reference.take_rows(table, rows, scale=scale, dtype=kind)
            assert torch.equal(ops.take_rows(table, rows, scale=scale, dtype=kind), expected)

    def test_largest_of_each_row(self) -> None:
        nan, inf = float("nan"), float("inf")
        x = randn(8, 203)
        x[1, [5, 70]] = 9.0
        x[2, [200, 202]] = 9.0
        x[3, :100] = nan
        x[4] = nan
        x[5] = -inf
        x[6, [17, 3]] = inf
        expected = x.nan_to_num(nan=-inf, neginf=-inf, posinf=inf).max(-1).indices
        assert torch.equal(on_threads(ops.argmax, x), expected)

    @pytest.mark.parametrize("size", [9, 500, 4099])
    def test_draws_are_those_of_pytorch(self, size: int) -> None:
        rows = 400
        scores = randn(rows, size, seed=size) * 4
        scores[:, 3] = scores[:, 7]  # equals
        scores[::3] = scores[::3].round()  # many of them, zeros of both signs among them
        generator = torch.Generator().manual_seed(size)

        def pick(*values: float) -> torch.Tensor:
            return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]

        batch = SamplingBatch(
            temperature=pick(0.0, 0.3, 1.0, 4.0),
            top_k=pick(0, 0, 1, 5, 40).int(),
            top_p=pick(1.0, 1.0, 0.0, 0.3, 0.95),
            min_p=pick(0.0, 0.0, 0.1, 1.0),
            repetition_penalty=torch.ones(rows),
            seeds=torch.arange(rows) * 7919,
            positions=torch.arange(rows) + 3,
            seen=None,
            all_greedy=False,
            any_greedy=True,
            any_top_k=True,
            any_top_p=True,
            any_min_p=True,
            any_penalty=False,
            num_logprobs=None,
        )
        arguments = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seeds, batch.positions)
        drawn = on_threads(ops.sample_tokens, scores, *arguments)
        assert torch.equal(drawn, sampler._draw_tokens(scores, batch))

    def test_what_is_not_native_is_refused(self) -> None:
        with pytest.raises(NotNative, match="float16"):
            ops.silu_mul(randn(1, 64, dtype=torch.float16))
        with pytest.raises(NotNative, match="vectors"):
            ops.rms_norm(randn(1, 40), torch.ones(40), 1e-5)
        with pytest.raises(NotNative, match="one piece"):
            ops.silu_mul(randn(32, 4).T)
        with pytest.raises(NotNative, match="dims"):
            ops.store_kv(
                *[randn(1, 2, 24)] * 2, empty_cache(1, 4, 2, 24, torch.float32, int8=False), torch.tensor([0])
            )
        case = make_case([(1, 3)], heads=34)
        with pytest.raises(NotNative, match="query heads"):
            ops.attention(case.q, case.cache, case.batch, scale=1.0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("int8", [False, True])
class TestCache:
    @pytest.mark.parametrize("rotary_dim", [64, 24, 8, 0])
    @pytest.mark.parametrize("normed", [False, True])
    def test_rotation_and_store(self, dtype: torch.dtype, int8: bool, rotary_dim: int, normed: bool) -> None:
        tokens, heads, kv_heads, dim = 9, 6, 2, 64
        both = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
        q, k, v = both.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        q, k, v = (x.unflatten(-1, (-1, dim)) for x in (q, k, v))
        norms = (
            {"q_norm": randn(dim, dtype=dtype, seed=5), "k_norm": randn(dim, dtype=dtype, seed=6)}
            if normed
            else {}
        )
        positions = torch.tensor([0, 3, 99, 7, 7, 50, 1, 2, 4])
        slots = torch.tensor([0, 13, -1, 5, 7, 19, -1, 2, 4])
        caches = [empty_cache(5, 4, kv_heads, dim, dtype, int8=int8) for _ in range(2)]
        table = cos_sin_table(100, rotary_dim) if rotary_dim else None
        for plus_one in (False, True):
            actual, expected = (
                store(q, k, v, positions, table, cache, slots, eps=1e-5, plus_one=plus_one, **norms)
                for store, cache in zip((ops.rope_store, reference.rope_store), caches, strict=True)
            )
            close(actual, expected, max(CLOSE[dtype], 1e-5))
            ours, theirs = (
                [x.float() for x in (c.k, c.v, c.k_scale, c.v_scale) if x is not None] for c in caches
            )
            for x, y in zip(ours, theirs, strict=True):
                # Of INT8 values a rounding may go the other way.
                torch.testing.assert_close(
                    x, y, atol=1.0 if int8 else 1e-5, rtol=CLOSE[torch.bfloat16], equal_nan=True
                )

    def test_store_alone_is_the_references_bit_for_bit(self, dtype: torch.dtype, int8: bool) -> None:
        k, v = (
            randn(7, 2, 32, dtype=dtype, seed=seed) * 10.0 ** torch.arange(-6, 1).view(-1, 1, 1)
            for seed in (0, 1)
        )
        k, v = k.to(dtype), v.to(dtype)
        k[0, 0] = 0.0
        k[1, 1, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
        v[2, 0] = 3e38
        slots = torch.tensor([3, 0, -1, 7, 12, -1, 19])
        caches = [empty_cache(5, 4, 2, 32, dtype, int8=int8) for _ in range(2)]
        for store, cache in zip((ops.store_kv, reference.store_kv), caches, strict=True):
            store(k, v, cache, slots)
        ours, theirs = (
            [x.float() for x in (c.k, c.v, c.k_scale, c.v_scale) if x is not None] for c in caches
        )
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y, atol=0, rtol=0, equal_nan=True)

    @pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (7, 0.0), (0, 5.0), (64, 3.0)])
    def test_attention(
        self,
        dtype: torch.dtype,
        int8: bool,
        window: int,
        softcap: float,
    ) -> None:
        rows = [(1, 1), (1, 4), (1, 130), (1, 0), (1, 64), (3, 12), (24, 75)]
        for heads, kv_heads, dim in ((6, 2, 32), (9, 3, 64), (4, 4, 128)):
            case = make_case(rows, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, int8=int8)
            options = {"scale": dim**-0.5, "window": window, "softcap": softcap}
            expected = reference.attention(case.q, case.cache, case.batch, **options)
            actual = on_threads(ops.attention, case.q, case.cache, case.batch, **options)
            close(actual, expected, max(CLOSE[dtype], 1e-5))

    def test_a_tokens_attention_does_not_depend_on_the_rows_beside_it(
        self, dtype: torch.dtype, int8: bool
    ) -> None:
        rows = [(1, 100), (1, 33), (5, 80)]
        case = make_case(rows, dim=32, dtype=dtype, int8=int8)
        together = ops.attention(case.q, case.cache, case.batch, scale=0.2)
        batch = case.batch
        batch.block_tables, batch.context_lens = batch.block_tables[1:2], batch.context_lens[1:2]
        batch.query_starts, batch.num_decodes = torch.tensor([0, 1], dtype=torch.int32), 1
        alone = ops.attention(case.q[1:3], case.cache, batch, scale=0.2)
        assert torch.equal(alone[0], together[1])
        assert torch.equal(alone[1], torch.zeros_like(alone[1]))  # a token of no row


def test_several_callers_at_once_get_what_each_gets_alone() -> None:
    kernel = linear.plain(weights(208, 256))
    inputs = [randn(rows, 256, seed=rows) for rows in (1, 5, 9, 16)]
    alone = [kernel(x) for x in inputs]

    def repeat(x: torch.Tensor) -> list[torch.Tensor]:
        torch.set_num_threads(3)  # this thread's own
        return [kernel(x) for _ in range(50)]

    with ThreadPoolExecutor(len(inputs)) as callers:
        for results, expected in zip(callers.map(repeat, inputs), alone, strict=True):
            assert all(torch.equal(result, expected) for result in results)
