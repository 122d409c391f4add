"""Linear maps of which a row's largest result may be all that is wanted: that one has all bits, the others are near."""

from __future__ import annotations

import pytest
import torch

from nanochat.kernels.cpu_linear import LinearKernel
from nanochat.kernels.native import library, linear, linear_ops
from nanochat.kernels.native.program import Arena, Counter, Program
from tests.kernels.test_native import FLOATS, ROWS, instruction_set, on_threads, weights
from tests.kernels.test_ops import randn

__all__ = ["instruction_set"]


def near(kernel: LinearKernel, x: torch.Tensor) -> torch.Tensor:
    """What a program computes that only wants the largest: ``[T, N]`` float32."""
    found = library.find()
    assert found is not None
    program, rows = Program(found, Arena()), Counter(len(x))
    rows.set(len(x))
    with program.recording():
        y = kernel(program.input(x, rows), torch.float32)
    program.wants_all.set(0)
    program.run()
    return y.clone()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("size", "columns"), [(2000, 96), (50, 32), (1103, 256)])
def test_the_largest_are_those_of_eight_bits(
    size: int, columns: int, biased: bool, dtype: torch.dtype
) -> None:
    weight, bias = weights(size, columns), randn(size, dtype=dtype, seed=4) if biased else None
    half, whole = linear.largest(weight, bias), linear.int8(weight, bias)
    for rows in ROWS:
        x = randn(rows, columns, dtype=dtype, seed=rows)
        exact = whole(x, torch.float32)
        assert torch.equal(on_threads(half, x, torch.float32), exact)  # where all are wanted
        y = on_threads(near, half, x)
        assert torch.equal(y.argmax(1), exact.argmax(1))
        assert torch.equal(y.amax(1), exact.amax(1))
        assert bool(((y - exact).abs().amax(1) < 0.7 * exact.std(1)).all())
    if dtype == torch.bfloat16 or not library.rounds_to_bf16():
        x = randn(40, columns, dtype=dtype)
        assert torch.equal(half(x, torch.float32), whole(x, torch.float32))


def test_the_largest_is_found_where_its_upper_halves_are_far_from_it() -> None:
    # What is cut off makes up most of some outputs.
    weight = torch.zeros(64, 64)
    weight[:, 0] = 127.0
    weight[10, 1:] = 16.0
    weight[40, 1::2], weight[40, 2::2] = 31.0, 15.0
    weight[20:30, 1:] = 15.0
    half, whole = linear.largest(weight, None), linear.int8(weight, None)
    x = torch.ones(3, 64)
    x[1, 1::2], x[2, 2::2] = 0.5, -1.0
    assert torch.equal(near(half, x).argmax(1), whole(x).argmax(1))


def heavy_tailed(tail: float, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[800, 576]`` with few far weights, and ``[rows, 576]`` whose large numbers meet those of some output."""
    weight = randn(800, 576, seed=1) * torch.exp(tail * randn(800, 576, seed=2))
    x, generator = randn(rows, 576, seed=3), torch.Generator().manual_seed(4)
    for row in range(rows):
        output = int(torch.randint(800, (), generator=generator))
        far = weight[output].abs().topk(30).indices[torch.randperm(30, generator=generator)[:3]]
        signed = x[row, far].abs() * weight[output, far].sign()
        x[row, far] = signed * (1, 40, 80)[row % 3]
    return weight, x


@pytest.mark.parametrize("tail", [0.5, 1.0, 1.5, 2.0])
def test_the_largest_is_found_where_few_far_weights_meet_few_large_numbers(tail: float) -> None:
    weight, x = heavy_tailed(tail, 240)
    half, whole = linear.largest(weight, None), linear.int8(weight, None)
    for part in x.split(12):
        exact, y = whole(part, torch.float32), near(half, part)
        assert torch.equal(y.argmax(1), exact.argmax(1))
        assert torch.equal(y.amax(1), exact.amax(1))


@pytest.mark.parametrize("tail", [0.5, 1.0, 1.5, 2.0])
def test_rough_results_are_within_six_deviations_of_the_exact_ones(tail: float) -> None:
    weight, x = heavy_tailed(tail, 48)
    vectors = linear_ops.pack_halves(weight)[1]
    deviation = vectors[:, 3].reshape(-1).clamp(min=0)  # where it is below 0, results are exact
    half, whole = linear.largest(weight, None), linear.int8(weight, None)
    for part in x.split(12):
        off = (near(half, part) - whole(part, torch.float32)).abs()
        assert bool((off <= 6 * deviation * part.norm(dim=1, keepdim=True) * 1.01).all())


def test_outputs_of_which_the_upper_halves_tell_little_have_all_bits() -> None:
    weight = weights(64, 64)
    weight[5, 0] = 20 * weight[5].abs().max()  # one far weight, beside which only the others' signs are left
    weight[40] = torch.linspace(112, 127, 64)  # all have the same upper half
    half, whole = linear.largest(weight, None), linear.int8(weight, None)
    x = randn(5, 64)
    y, exact = near(half, x), whole(x, torch.float32)
    for first in (0, 32):
        assert torch.equal(y[:, first : first + 16], exact[:, first : first + 16])
    assert not torch.equal(y, exact)


def test_a_row_does_not_depend_on_those_beside_it_or_on_the_threads() -> None:
    half, x = linear.largest(weights(1000, 128), None), randn(21, 128)
    together = on_threads(near, half, x)
    x[5] *= float("nan")
    assert torch.equal(near(half, x)[:5], together[:5])
    assert bool(near(half, x)[5].isnan().all())
    for row in (0, 4, 16, 20):
        assert torch.equal(near(half, x[row : row + 1].clone())[0], together[row])


def test_equal_results_and_zeros_are_exact() -> None:
    half = linear.largest(weights(1, 64).repeat(100, 1), None)
    y = near(half, randn(2, 64))
    assert bool((y == y[:, :1]).all())
    assert not near(half, torch.zeros(2, 64)).any()


def test_what_is_no_number_is_not_hidden() -> None:
    x = torch.zeros(2, 64)
    x[0, 3], x[1, 40] = float("nan"), float("inf")
    assert bool(near(linear.largest(weights(64, 64), None), x).isnan().all())
