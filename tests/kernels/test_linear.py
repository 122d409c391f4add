"""Linear maps and what is computed with them against the definitions: on the CPU, and on a GPU if there is one."""

from __future__ import annotations

import itertools
from bisect import bisect_left

import pytest
import torch

from nanochat import kernels
from nanochat.engine.step_graphs import decode_sizes
from nanochat.kernels import reference
from nanochat.kernels.normed import Normed
from nanochat.kernels.tuning import (
    MAX_SHARED_TILES,
    SPLIT_TILE,
    decode_config,
    linear_config,
    split_config,
)

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
SIZES = [(576, 1536), (1024, 3072), (896, 4864), (48, 40), (2048, 1024), (3072, 1024), (2560, 960)]
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the norm; float32 is multiplied in TF32 at worst."""


def randn(device: str, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, float(error)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 32, 33, 64, 70])
def test_linear_and_silu_linear(device: str, dtype: torch.dtype, rows: int) -> None:
    for in_size, out_size in SIZES:
        x = randn(device, dtype, rows, in_size)
        weight = randn(device, dtype, 2 * out_size, in_size, seed=1) / in_size**0.5
        bias = randn(device, dtype, 2 * out_size, seed=2)
        # As a kernel leaves it that can't divide yet.
        parts = torch.rand(5, rows, generator=torch.Generator().manual_seed(3)).to(device) * in_size
        for rows_in, each in ((x, None), (Normed(x), None), (Normed(x, parts, 1e-5), bias)):
            got, expected = kernels.linear(rows_in, weight, each), reference.linear(rows_in, weight, each)
            assert_near(got, expected, TOLERANCE[dtype])
            got = kernels.silu_linear(rows_in, weight, each)
            assert_near(got, reference.silu_linear(rows_in, weight, each), TOLERANCE[dtype])
        wide = kernels.linear(x, weight, dtype=torch.float32)
        if device == "cuda" and dtype != torch.float32:
            assert not torch.equal(wide, wide.to(dtype).float())  # never rounded
        assert_near(wide, reference.linear(x, weight, dtype=torch.float32), TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 16, 32, 47, 70])
@pytest.mark.parametrize("plus_one", [False, True])
def test_linear_add_norm(device: str, dtype: torch.dtype, rows: int, plus_one: bool) -> None:
    for in_size, out_size in SIZES:
        x = randn(device, dtype, rows, in_size)
        weight = randn(device, dtype, out_size, in_size, seed=1) / in_size**0.5
        bias = randn(device, dtype, out_size, seed=2)
        norm_weight = randn(device, dtype, out_size, seed=3)
        residual = randn(device, torch.float32, rows, out_size, seed=4) * 3
        arguments = (x, weight, bias, residual, norm_weight, 1e-5)
        normed, summed = kernels.linear_add_norm(*arguments, plus_one=plus_one)
        expected, expected_sum = reference.linear_add_norm(*arguments, plus_one=plus_one)
        assert_near(summed, expected_sum, TOLERANCE[dtype])
        assert_near(normed.finished(), expected.finished(), TOLERANCE[dtype])


def test_rows_that_a_caller_sees_as_views() -> None:
    """Rows of a packed projection have a stride of their own."""
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        weight = randn(device, torch.bfloat16, 2048, 1024, seed=1) / 32
        for rows in (4, 20, 40):
            packed = randn(device, torch.bfloat16, rows, 3072)
            for start in (0, 1024, 1025):
                x = packed[:, start : start + 1024]
                assert_near(kernels.linear(x, weight), reference.linear(x, weight), 1e-2)


def test_every_config_divides_its_shape() -> None:
    """Whatever a model's sizes are: the kernel masks rows, but neither inputs nor outputs."""
    for in_size in (64, 96, 576, 896, 1024, 1536, 2048, 2560, 3072, 4096, 4864, 8192, 14_336):
        for rows in (1, 8, 16, 32):
            for parts in (1, 2):
                config = linear_config(90, rows, in_size, 1024, parts)
                if config is not None:
                    assert in_size % (config.split * config.step) == 0
                    assert 1024 % (16 * config.repeat) == 0
                    assert config.row_tile >= min(rows, 32)
    assert linear_config(90, 1, 1024, 1000, 1) is None
    assert linear_config(75, 1, 1024, 1024, 1) is None
    assert linear_config(90, 65, 1024, 1024, 1) is None


def test_every_split_config_divides_its_shape_and_fits_shared_memory() -> None:
    found = 0
    for in_size in (64, 96, 576, 896, 1024, 1536, 2048, 2560, 3072, 4096, 4864, 8192, 14_336):
        for out_size in (32, 576, 1000, 1024, 3072, 4096, 14_336, 151_936):
            for rows in (1, 8, 9, 16, 17, 32, 33, 64, 65):
                for parts, num_sms in itertools.product((1, 2), (78, 114, 132)):
                    config = split_config(90, num_sms, rows, in_size, out_size, parts)
                    if config is None:
                        continue
                    found += 1
                    tiles = parts * out_size // SPLIT_TILE
                    assert tiles * config.splits <= num_sms
                    assert in_size % (config.splits * config.step) == 0
                    assert parts * out_size % SPLIT_TILE == 0
                    assert config.splits == 1 or tiles <= MAX_SHARED_TILES
                    assert config.row_tile >= rows
                    steps = in_size // (config.splits * config.step)
                    assert config.ring == steps or 3 < config.ring < steps
                    pieces = steps * SPLIT_TILE + config.ring * config.row_tile
                    assert 2 * config.step * pieces <= 227 << 10
    assert found > 100
    for capability, rows in ((80, 32), (100, 32), (90, 8), (90, 65)):
        assert split_config(capability, 132, rows, 1024, 1024, 1) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_shared_tiles_add_up_in_one_order_and_leave_their_counters_as_they_were() -> None:
    x, weight = randn("cuda", torch.bfloat16, 20, 3072), randn("cuda", torch.bfloat16, 1024, 3072, seed=1)
    residual, norm = randn("cuda", torch.float32, 20, 1024, seed=2), randn("cuda", torch.bfloat16, 1024)
    scratch: dict[str, torch.Tensor] = {}
    results = [
        kernels.linear_add_norm(x, weight, None, residual, norm, 1e-6, scratch=scratch) for _ in range(50)
    ]
    for normed, summed in results:
        assert torch.equal(summed, results[0][1])
        assert torch.equal(normed.values, results[0][0].values)
    if torch.cuda.get_device_capability() == (9, 0):
        assert not scratch["linear_arrivals"].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_maps_that_share_counters_are_right_in_every_replay() -> None:
    """Partial sums of one map lie where those of another did, and all count in the same place."""
    x = randn("cuda", torch.bfloat16, 24, 2048)
    weights = [
        randn("cuda", torch.bfloat16, out_size, in_size, seed=seed) / in_size**0.5
        for seed, (in_size, out_size) in enumerate([(2048, 1024), (1024, 3072), (3072, 2048)])
    ]
    scratch: dict[str, torch.Tensor] = {}

    def chain() -> torch.Tensor:
        y = x
        for weight in weights:
            y = kernels.linear(y, weight, scratch=scratch)
        return y

    expected = chain().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(100):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)


@pytest.mark.parametrize("max_num_seqs", [1, 7, 12, 20, 40, 256])
def test_padding_a_step_of_decodes_changes_no_config(max_num_seqs: int) -> None:
    """A recorded step has a few rows more than the same step launched kernel by kernel."""
    sizes = decode_sizes(max_num_seqs)
    for rows in range(1, max_num_seqs + 1):
        padded = sizes[bisect_left(sizes, rows)]
        for in_size, out_size, parts in (
            (1024, 4096, 1),
            (1024, 3072, 2),
            (3072, 1024, 1),
            (1024, 151_936, 1),
        ):
            shape = (in_size, out_size, parts)
            assert linear_config(90, rows, *shape) == linear_config(90, padded, *shape)
            assert split_config(90, 132, rows, *shape) == split_config(90, 132, padded, *shape)
        for kv_bytes, kv_heads in itertools.product((1, 2), (1, 2, 3, 4, 8, 16)):
            decodes = [decode_config(90, 128, kv_bytes, n, kv_heads) for n in (rows, padded)]
            assert decodes[0] == decodes[1]


def test_wrong_arguments_are_refused() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(ValueError, match="x must be"):
        kernels.linear(x[:, :7], weight)
    with pytest.raises(ValueError, match="x must be"):
        kernels.linear(Normed(x.half()), weight)
    with pytest.raises(ValueError, match="bias must be"):
        kernels.silu_linear(x, weight, torch.zeros(3))
    residual, norm = torch.zeros(2, 4), torch.zeros(4)
    for wrong in ((residual[:1], norm), (residual[:, :3], norm), (residual.half(), norm)):
        with pytest.raises(ValueError, match="residual must be"):
            kernels.linear_add_norm(x, weight, None, *wrong, 1e-6)
    with pytest.raises(ValueError, match="norm_weight must be"):
        kernels.linear_add_norm(x, weight, None, residual, norm[:3], 1e-6)
