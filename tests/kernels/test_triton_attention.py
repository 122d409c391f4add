"""The Triton attention kernels against the dense float64 definition: see `conftest` for where this runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.kernels import attention_decode, gpu, reference
from nanochat.kernels.attention_prefill import launch_prefill
from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.triton_utils import INTERPRETED
from nanochat.kernels.tuning import DecodeConfig, PrefillConfig
from tests.kernels.paged import Case, dense_attention, make_case

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# The interpreter cuts BF16 off instead of rounding it, and is slow: there most cases are float32.
DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
INT8_TOLERANCE = 6e-3
"""Weights meet INT8 values in 16 bits whatever the query's type."""


def on_device(case: Case) -> Case:
    """The case with its tensors where the kernels run."""

    def move(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.to(DEVICE)
        if isinstance(value, LayerCache | AttentionBatch):
            return dataclasses.replace(
                value, **{f.name: move(getattr(value, f.name)) for f in dataclasses.fields(value)}
            )
        return value

    return Case(move(case.q), move(case.cache), move(case.batch), case.contexts)  # type: ignore[arg-type]


def check(case: Case, *, scale: float = 0.25, window: int = 0, softcap: float = 0.0) -> None:
    """`gpu.attention` equals the dense computation, also when it finds its workspace used."""
    expected = dense_attention(case, scale=scale, window=window, softcap=softcap)
    tolerance = TOLERANCE[case.q.dtype]
    if case.cache.k_scale is not None:
        tolerance = max(tolerance, INT8_TOLERANCE)
    moved = on_device(case)
    for _ in range(1 if INTERPRETED else 3):
        out = gpu.attention(moved.q, moved.cache, moved.batch, scale=scale, window=window, softcap=softcap)
        assert out.dtype == case.q.dtype
        torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)


@st.composite
def batches(draw: st.DrawFn) -> dict:
    decodes = draw(st.lists(st.integers(0, 70), max_size=4))
    prefills = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), max_size=2))
    rows = [(1, length) for length in decodes] + [(n, n + prefix) for n, prefix in prefills]
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 8), (2, 1), (1, 4), (1, 3), (2, 2)]))
    return {
        "rows": rows or [(1, 1)],
        "num_decodes": len(decodes) if rows else 1,
        "kv_heads": kv_heads,
        "heads": kv_heads * group,
        "dim": draw(st.sampled_from([16, 64, 80])),
        "block_size": draw(st.sampled_from([1, 3, 16, 32, 256])),
        "int8": draw(st.booleans()),
        "dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 99)),
    }


@given(batches(), st.sampled_from([0, 0, 1, 5, 40]), st.sampled_from([0.0, 0.0, 3.0]))
@settings(max_examples=12 if INTERPRETED else 24, deadline=None, derandomize=True)
def test_random_batches(arguments: dict, window: int, softcap: float) -> None:
    check(make_case(**arguments), window=window, softcap=softcap)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("dim", "group", "block_size"), [(64, 8, 16), (80, 1, 32), (96, 2, 16), (128, 4, 32), (256, 2, 16)]
)
def test_head_dims_groups_and_block_sizes(dim: int, group: int, block_size: int, int8: bool) -> None:
    rows = [(1, 33), (1, 0), (3, 3), (9, 40)]
    check(make_case(rows, num_decodes=2, heads=group, kv_heads=1, dim=dim, block_size=block_size, int8=int8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
def test_decode_lengths_around_every_boundary(dtype: torch.dtype, int8: bool) -> None:
    rows = [(1, length) for length in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200)]
    check(make_case(rows, dim=16, block_size=16, int8=int8, dtype=dtype))


@pytest.mark.parametrize("int8", [False, True])
def test_prefill_lengths_around_every_boundary(int8: bool) -> None:
    rows = [(n, n) for n in (2, 15, 16, 17, 31, 32, 33)] + [(1, 65), (2, 64), (31, 63), (33, 66)]
    check(make_case(rows, num_decodes=0, dim=16, block_size=16, int8=int8))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("num_programs", [1, 3, 32])
def test_decode_however_it_is_split(int8: bool, num_programs: int) -> None:
    case = make_case([(1, 400), (1, 0), (1, 7), (1, 64)], heads=6, dim=16, block_size=16, int8=int8)
    expected = dense_attention(case, scale=0.25)
    moved = on_device(case)
    workspace = attention_decode.allocate_workspace(num_programs, 3, 16, DEVICE)
    config = DecodeConfig(block_n=32, num_warps=1, num_stages=2, programs_per_sm=1, min_tiles=1, merge=4)
    for _ in range(2):
        out = torch.full_like(moved.q, float("nan"))
        attention_decode.launch_decode(
            moved.q, moved.cache, moved.batch, out, workspace, config, scale=0.25, window=0, softcap=0.0
        )
        torch.testing.assert_close(out.cpu().double(), expected, atol=INT8_TOLERANCE, rtol=INT8_TOLERANCE)
        assert not workspace.arrivals.any()


@pytest.mark.skipif(INTERPRETED, reason="Gluon has no interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 3, 1), (128, 4, 2)])
@pytest.mark.parametrize("longest", [200, 640])
def test_long_int8_prefill(longest: int, dtype: torch.dtype, dim: int, heads: int, kv_heads: int) -> None:
    rows = [(1, 300), (257, 257), (5, 0), (128, 513), (3, 640), (130, 131)]
    rows = [row for row in rows if row[1] <= longest] + [(5, longest), (65, 128), (66, 191)]
    arguments = {
        "num_decodes": int(longest > 300),
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "block_size": 16,
    }
    check(make_case(rows, int8=True, dtype=dtype, **arguments), scale=dim**-0.5)


@pytest.mark.parametrize("block_m", [16, 64])
def test_prefill_at_other_tile_sizes(block_m: int) -> None:
    case = make_case([(40, 70), (1, 1), (20, 20)], num_decodes=0, heads=3, kv_heads=1, dim=16, block_size=16)
    moved = on_device(case)
    out = torch.full_like(moved.q, float("nan"))
    config = PrefillConfig(block_m=block_m, block_n=16, num_warps=4, num_stages=1)
    launch_prefill(moved.q, moved.cache, moved.batch, out, config, scale=0.25, window=0, softcap=0.0)
    torch.testing.assert_close(out.cpu().double(), dense_attention(case, scale=0.25), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("window", "int8"), [(15, False), (16, False), (17, True), (33, False), (40, True), (64, False)]
)
def test_a_window_wider_than_tiles(window: int, int8: bool) -> None:
    """Tiles on its edge, whole ones within it, and those on the diagonal: of windows around tiles' bounds."""
    rows = [(1, 40), (20, 101), (9, 9), (16, 80), (5, 0)]
    case = make_case(rows, num_decodes=1, heads=1, kv_heads=1, dim=16, block_size=16, int8=int8)
    moved = on_device(case)
    config = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)
    out = torch.full_like(moved.q[1:], float("nan"))
    launch_prefill(moved.q[1:], moved.cache, moved.batch, out, config, scale=0.25, window=window, softcap=0.0)
    expected = dense_attention(case, scale=0.25, window=window)[1:]
    tolerance = INT8_TOLERANCE if int8 else 2e-5
    torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)


def test_tokens_of_no_row_and_empty_rows_give_zeros() -> None:
    case = make_case([(1, 0), (1, 5), (4, 0), (3, 9)], num_decodes=2, dim=16, block_size=16)
    moved = on_device(case)
    q = torch.cat((moved.q, torch.randn(7, *moved.q.shape[1:], device=DEVICE)))
    out = gpu.attention(q, moved.cache, moved.batch, scale=0.25)
    assert not out[0].any()
    assert not out[2:6].any()
    assert not out[-7:].any()
    assert out[6:9].abs().amin() > 0


def test_queries_may_be_a_view_of_a_packed_projection() -> None:
    case = on_device(make_case([(1, 20), (5, 30)], num_decodes=1, dim=16, block_size=16))
    packed = torch.randn(case.q.shape[0], 2 * case.q.shape[1] * 16, device=DEVICE)
    view = packed[:, : case.q.shape[1] * 16].unflatten(1, (-1, 16))
    out = gpu.attention(view, case.cache, case.batch, scale=0.25)
    torch.testing.assert_close(out, gpu.attention(view.clone(), case.cache, case.batch, scale=0.25))


@pytest.mark.parametrize("factor", [1e-5, 1e4])
def test_scales_of_any_size_neither_overflow_nor_vanish(factor: float) -> None:
    """INT8 values meet 16-bit weights that carry V's scales: those may be anything float16 holds."""
    case = make_case([(1, 40), (20, 40)], num_decodes=1, dim=16, block_size=16, int8=True)
    assert case.cache.v_scale is not None
    case.cache.v_scale.copy_(case.cache.v_scale.float() * factor)
    batch = case.batch
    rows = zip(batch.block_tables, batch.context_lens.tolist(), strict=True)
    case.contexts = [reference.read_kv(case.cache, table, length) for table, length in rows]
    moved = on_device(case)
    out = gpu.attention(moved.q, moved.cache, moved.batch, scale=0.25).cpu().double() / factor
    expected = dense_attention(case, scale=0.25) / factor
    torch.testing.assert_close(out, expected, atol=INT8_TOLERANCE, rtol=INT8_TOLERANCE)


def test_layouts_that_cannot_be_read_are_refused() -> None:
    case = on_device(make_case([(1, 20)], dim=16, block_size=16))
    wide = torch.zeros(1, 4, 20, device=DEVICE)
    with pytest.raises(ValueError, match="multiple of 8"):
        gpu.attention(wide, case.cache, case.batch, scale=1.0)
    with pytest.raises(ValueError, match="q must be dense"):
        gpu.attention(torch.zeros(1, 16, 4, device=DEVICE).transpose(1, 2), case.cache, case.batch, scale=1.0)
    spread = torch.zeros(1, 8, dtype=torch.int32, device=DEVICE)[:, ::2]
    with pytest.raises(ValueError, match="block_tables must be dense"):
        gpu.attention(case.q, case.cache, dataclasses.replace(case.batch, block_tables=spread), scale=1.0)
    starts = torch.zeros(4, dtype=torch.int32, device=DEVICE)[::2]
    with pytest.raises(ValueError, match="query_starts must be dense"):
        gpu.attention(case.q, case.cache, dataclasses.replace(case.batch, query_starts=starts), scale=1.0)
    uneven = LayerCache(case.cache.k[:, :8], case.cache.v[:, :8])
    with pytest.raises(ValueError, match=r"cache\.k must be dense"):
        gpu.attention(case.q, uneven, case.batch, scale=1.0)
    half = LayerCache(*[t.to(torch.int8) for t in (case.cache.k, case.cache.v)], case.cache.k[..., 0].half())
    with pytest.raises(ValueError, match=r"cache\.k_scale"):
        gpu.attention(case.q, half, case.batch, scale=1.0)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_one_graph_serves_every_length() -> None:
    lengths = [[1, 1, 1, 1], [300, 2, 0, 77], [5000, 0, 0, 1]]
    cases = [
        on_device(make_case([(1, n) for n in row], dim=64, heads=4, block_size=16, dtype=torch.bfloat16))
        for row in lengths
    ]
    largest = cases[-1]
    batch = dataclasses.replace(largest.batch, scratch={})
    q, cache = torch.zeros_like(largest.q), largest.cache
    gpu.attention(q, cache, batch, scale=0.25)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gpu.attention(q, cache, batch, scale=0.25)
    for case in cases:
        blocks = case.cache.k.shape[0]
        for target, source in ((cache.k, case.cache.k), (cache.v, case.cache.v)):
            target[:blocks].copy_(source)
        batch.block_tables.zero_()[:, : case.batch.block_tables.shape[1]].copy_(case.batch.block_tables)
        batch.context_lens.copy_(case.batch.context_lens)
        q.copy_(case.q)
        graph.replay()
        expected = gpu.attention(case.q, case.cache, case.batch, scale=0.25)
        assert torch.equal(out, expected)
