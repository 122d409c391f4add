"""The CPU's weight formats against plain products with what they stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from nanochat.kernels import cpu_linear
from nanochat.kernels.cpu_linear import LinearKernel

SHAPES = [(64, 96), (576, 1536), (48, 32), (50, 40)]
ROWS = [1, 2, 4, 5, 8, 9, 16, 17, 70, 513]
TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 1e-5}


def weights(num_rows: int, num_columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_rows, num_columns, generator=generator) * 0.05 + 0.01
    return weight, torch.randn(num_rows, generator=generator)


def inputs(rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, num_columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def never(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError(f"{x.shape[0]} rows are few")


def assert_close(kernel: LinearKernel, x: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    y = kernel(x)
    assert y.dtype == x.dtype
    assert y.shape == expected.shape
    assert y.is_contiguous()
    assert float((y.float() - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [cpu_linear.plain, cpu_linear.packed])
class TestFullWeights:
    @pytest.mark.parametrize("biased", [False, True])
    def test_equal_a_product_in_float32(
        self, make: object, shape: tuple[int, int], dtype: torch.dtype, biased: bool
    ) -> None:
        weight, bias = (x.to(dtype) for x in weights(*shape))
        kernel = make(weight, bias if biased else None)  # type: ignore[operator]
        for rows in ROWS:
            x = inputs(rows, shape[1], dtype)
            expected = F.linear(x.float(), weight.float(), bias.float() if biased else None)
            assert_close(kernel, x, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
class TestFewBits:
    @pytest.mark.parametrize("shape", SHAPES[:3])
    def test_int4_equals_its_dequantised_weight(
        self, shape: tuple[int, int], dtype: torch.dtype, biased: bool
    ) -> None:
        weight, bias = weights(*shape)
        quantized = cpu_linear.quantize_int4(weight)
        kernel = cpu_linear.int4(quantized, bias.to(dtype) if biased else None, never)
        for rows in (rows for rows in ROWS if rows <= cpu_linear.INT4_MAX_ROWS):
            x = inputs(rows, shape[1], dtype)
            expected = F.linear(
                x.float(), cpu_linear.dequantize_int4(quantized), bias.to(dtype).float() if biased else None
            )
            assert_close(kernel, x, expected, TOLERANCE[torch.bfloat16])

    @pytest.mark.parametrize("shape", SHAPES[:3])
    def test_int8_equals_its_dequantised_weight(
        self, shape: tuple[int, int], dtype: torch.dtype, biased: bool
    ) -> None:
        weight, bias = (x.to(dtype) for x in weights(*shape))
        wide = cpu_linear.dequantize_int8(cpu_linear.quantize_int8(weight))
        kernel = cpu_linear.int8(weight, bias if biased else None, never)
        for rows in (rows for rows in ROWS if rows <= cpu_linear.INT8_MAX_ROWS):
            x = inputs(rows, shape[1], dtype)
            expected = F.linear(x.float(), wide, bias.float() if biased else None)
            assert_close(kernel, x, expected, TOLERANCE[torch.bfloat16])

    def test_many_rows_go_to_the_other_kernel(self, dtype: torch.dtype, biased: bool) -> None:
        weight, bias = (x.to(dtype) for x in weights(64, 96))
        many = cpu_linear.plain(weight, bias if biased else None)
        x = inputs(9, 96, dtype)
        for kernel in (
            cpu_linear.int4(cpu_linear.quantize_int4(weight), bias, many),
            cpu_linear.int8(weight, bias, many),
        ):
            assert torch.equal(kernel(x), many(x))


class TestQuantising:
    @pytest.mark.parametrize("seed", range(5))
    def test_each_weight_is_less_than_a_step_away(self, seed: int) -> None:
        weight, _ = weights(100, 320, seed)
        quantized = cpu_linear.quantize_int4(weight)
        error = (cpu_linear.dequantize_int4(quantized) - weight).abs().unflatten(1, (-1, 32)).amax(-1)
        low, high = weight.unflatten(1, (-1, 32)).aminmax(dim=-1)
        assert quantized.deviation <= 0.5
        assert bool((error < (high - low) / 15).all())

    @pytest.mark.parametrize("num_rows", [1, 100, 1000])
    def test_int8_errs_by_half_a_step_at_most(self, num_rows: int) -> None:
        weight, _ = weights(num_rows, 320)  # some in pieces of several rows, the last one smaller
        error = (cpu_linear.dequantize_int8(cpu_linear.quantize_int8(weight)) - weight).abs().amax(1)
        assert bool((error <= 0.501 * weight.abs().amax(1) / 127).all())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("seed", range(5))
    def test_weights_that_were_q4_1_blocks_are_found_and_kept(self, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        levels = torch.randint(0, 16, (64, 6, 32), generator=generator)
        levels[..., 3], levels[..., 7] = 0, 15
        step = torch.rand(64, 6, 1, generator=generator).half().float() * 0.01 + 1e-3
        weight = (levels * step - 7 * step).flatten(1).to(dtype)
        quantized = cpu_linear.four_bit(weight)
        assert quantized is not None
        assert torch.equal(quantized.levels, levels.flatten(1))
        error = cpu_linear.dequantize_int4(quantized) - weight.float()
        assert float(error.norm() / weight.float().norm()) < 3e-3

    def test_weights_with_more_levels_are_not_taken_for_such(self) -> None:
        weight, _ = weights(64, 96)
        assert cpu_linear.four_bit(weight) is None
        assert cpu_linear.four_bit(weight[:, :40].contiguous()) is None
        few = cpu_linear.dequantize_int4(cpu_linear.quantize_int4(weight))
        few[-1, -1] += (few[-1].max() - few[-1].min()) / 45
        assert cpu_linear.four_bit(few) is None

    def test_a_group_of_one_value_stays_that_value(self) -> None:
        weight = torch.full((16, 64), 0.25)
        weight[:, 32:] = 0
        assert torch.equal(cpu_linear.dequantize_int4(cpu_linear.quantize_int4(weight)), weight)
        assert torch.equal(
            cpu_linear.dequantize_int8(cpu_linear.quantize_int8(weight[:, 32:])), weight[:, 32:]
        )

    def test_the_argument_is_left_as_it_was(self) -> None:
        weight, _ = weights(64, 96)
        before = weight.clone()
        cpu_linear.four_bit(weight)
        cpu_linear.quantize_int8(weight)
        assert torch.equal(weight, before)


class TestNumbersOfRows:
    """oneDNN keeps code for each number of rows that it has met."""

    def test_are_few_and_little_more_than_needed(self) -> None:
        sizes = [cpu_linear.rows_computed(rows) for rows in range(1, 2049)]
        assert len(set(sizes)) <= 80
        for rows, size in enumerate(sizes, start=1):
            assert rows <= size <= rows + max(15, rows / 16)
            assert cpu_linear.rows_computed(size) == size

    @pytest.mark.parametrize("make", [cpu_linear.plain, cpu_linear.packed])
    def test_reach_the_library_in_these_sizes_only(
        self, make: Callable[[torch.Tensor], LinearKernel], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        weight, _ = weights(48, 32)
        given = []
        in_few_sizes = cpu_linear.in_few_sizes

        def watched(multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            def product(rows: torch.Tensor) -> torch.Tensor:
                given.append(rows.shape[0])
                return multiply(rows)

            return in_few_sizes(product, x)

        monkeypatch.setattr(cpu_linear, "in_few_sizes", watched)
        kernel = make(weight.bfloat16())
        for rows in range(1, 300):
            assert kernel(inputs(rows, 32, torch.bfloat16)).shape == (rows, 48)
        assert set(given) <= {*range(1, 17), *range(32, 513, 16)}
        assert len(given) > 280

    def test_what_fills_up_changes_no_row(self) -> None:
        x = inputs(70, 32, torch.float32)

        def multiply(rows: torch.Tensor) -> torch.Tensor:
            assert rows.shape[0] == 80
            assert not rows[70:].any()
            return rows * 2

        assert torch.equal(cpu_linear.in_few_sizes(multiply, x), x * 2)
