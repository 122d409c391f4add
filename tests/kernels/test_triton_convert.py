"""Prefill over a 16-bit copy of an INT8 cache: the copy, and attention to it. See `conftest` for where this runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.kernels import kv_convert, reference
from nanochat.kernels.attention_prefill import launch_prefill, prefill_attention, prefill_converted
from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.triton_utils import INTERPRETED, DeviceInfo
from nanochat.kernels.tuning import PrefillConfig, converted_tokens, converts_prefill
from tests.kernels.paged import Case, dense_attention, make_case
from tests.kernels.test_triton_attention import DEVICE, DTYPES, INT8_TOLERANCE, TOLERANCE, on_device

UNWRITTEN = 1 << 30
"""No block's number."""


def converted(
    case: Case, dtype: torch.dtype, window: int = 0, most: int | None = None
) -> tuple[Case, LayerCache, AttentionBatch]:
    """The case on the device, and a copy where all that wasn't written is NaN; ``most``: its bound."""
    moved = on_device(case)
    prefills = case.batch.context_lens[case.batch.num_decodes :]
    moved.batch = dataclasses.replace(moved.batch, max_prefill_context=most or int(prefills.sum()))
    copy, tables = kv_convert.allocate_copy(moved.cache, moved.batch, dtype)
    for tensor in (copy.k, copy.v):
        tensor.fill_(float("nan"))
    tables.fill_(UNWRITTEN)
    kv_convert.launch_convert(moved.cache, moved.batch, copy, tables, window=window)
    return moved, copy, dataclasses.replace(moved.batch, block_tables=tables)


def check(case: Case, *, window: int = 0, softcap: float = 0.0, config: PrefillConfig | None = None) -> None:
    """Attention to the copy equals the dense computation over what the INT8 cache holds."""
    first = int(case.batch.query_starts[case.batch.num_decodes])
    expected = dense_attention(case, scale=0.25, window=window, softcap=softcap)[first:]
    moved, copy, batch = converted(case, case.q.dtype, window)
    q, out = moved.q[first:], torch.full_like(moved.q[first:], float("nan"))
    config = config or PrefillConfig(block_m=32, block_n=32, num_warps=4, num_stages=1)
    launch_prefill(q, copy, batch, out, config, scale=0.25, window=window, softcap=softcap)
    tolerance = max(TOLERANCE[case.q.dtype], INT8_TOLERANCE)
    torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)
    if not window:
        again = torch.full_like(out, float("nan"))
        prefill_converted(q, moved.cache, moved.batch, again, scale=0.25, window=0, softcap=softcap)
        torch.testing.assert_close(again, out, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "kv_heads", "block_size"), [(64, 3, 16), (80, 1, 32), (96, 2, 16), (128, 8, 32), (256, 1, 1)]
)
def test_the_copy_holds_what_the_cache_does(
    dim: int, kv_heads: int, block_size: int, dtype: torch.dtype
) -> None:
    rows = [(1, 40), (1, 0), (3, 3), (64, 64), (9, 0), (20, 129), (7, 191)]
    case = make_case(
        rows, num_decodes=2, heads=kv_heads, kv_heads=kv_heads, dim=dim, block_size=block_size, int8=True
    )
    _, copy, batch = converted(case, dtype)
    taken = set()
    for row, (_, length) in enumerate(rows):
        table = batch.block_tables[row].tolist()
        width = 0 if row < 2 else -(-length // copy.block_size)
        assert all(block == UNWRITTEN for block in table[width:])
        assert taken.isdisjoint(table[:width])
        taken |= set(table[:width])
        if width:
            for got, expected in zip(
                reference.read_kv(copy, batch.block_tables[row], length), case.contexts[row], strict=True
            ):
                torch.testing.assert_close(got.cpu(), expected.to(dtype).float(), atol=0, rtol=1e-6)
    assert taken == set(range(len(taken)))


@st.composite
def batches(draw: st.DrawFn) -> dict:
    decodes = draw(st.lists(st.integers(0, 70), max_size=3))
    prefills = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=4))
    rows = [(1, length) for length in decodes] + [(n, n + prefix) for n, prefix in prefills]
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 8), (2, 1), (3, 2), (2, 4)]))
    return {
        "rows": rows,
        "num_decodes": len(decodes),
        "kv_heads": kv_heads,
        "heads": kv_heads * group,
        "dim": draw(st.sampled_from([16, 64, 80])),
        "block_size": draw(st.sampled_from([1, 3, 16, 32, 256])),
        "int8": True,
        "dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 99)),
    }


@given(batches(), st.sampled_from([0, 0, 1, 5, 40]), st.sampled_from([0.0, 0.0, 3.0]))
@settings(max_examples=8, deadline=None, derandomize=True)
def test_random_batches(arguments: dict, window: int, softcap: float) -> None:
    check(make_case(**arguments), window=window, softcap=softcap)


@pytest.mark.parametrize("block_n", [16, 128])
def test_a_window_leaves_out_what_no_query_sees(block_n: int) -> None:
    case = make_case([(6, 300), (2, 131), (40, 200)], num_decodes=0, dim=16, block_size=16, int8=True)
    check(case, window=20, config=PrefillConfig(block_m=16, block_n=block_n, num_warps=4, num_stages=1))
    _, copy, batch = converted(case, torch.float32, window=20)
    assert batch.block_tables[0, :4].tolist() == [UNWRITTEN] * 4
    assert copy.k[:4].isnan().all()


def test_more_room_than_rows_need_changes_nothing() -> None:
    case = make_case([(5, 0), (30, 70), (2, 9)], num_decodes=0, dim=16, block_size=16, int8=True)
    _, copy, batch = converted(case, torch.float32)
    _, wide_copy, wide_batch = converted(case, torch.float32, most=5000)
    assert torch.equal(batch.block_tables, wide_batch.block_tables)
    assert torch.equal(copy.k[:3].nan_to_num(), wide_copy.k[:3].nan_to_num())
    assert wide_copy.k[3:].isnan().all()


def test_no_value_overflows_float16() -> None:
    case = make_case([(4, 4)], num_decodes=0, dim=16, block_size=16)
    case.cache = LayerCache(
        *(torch.full(case.cache.k.shape, 127, dtype=torch.int8) for _ in range(2)),
        *(
            torch.full(case.cache.k.shape[:3], 516.0, dtype=torch.float16) for _ in range(2)
        ),  # 65504 / 127, rounded
    )
    _, copy, _ = converted(case, torch.float16)
    assert (copy.k[0, :4] == 65504).all()


class TestChoice:
    """Which batches are converted: by their bounds, which the host knows."""

    @pytest.mark.parametrize(
        ("queries", "context", "converts"),
        [
            (256, 32, False),
            (1024, 128, False),
            (64, 4064, False),
            (2048, 4096, True),
            (512, 4096, False),
            (8192, 8192, True),
            (512, 16_896, True),
            (32, 16_896, False),
        ],
    )
    def test_is_by_the_work_that_queries_share(self, queries: int, context: int, converts: bool) -> None:
        assert converts_prefill(90, queries, context) == converts
        assert not converts_prefill(80, queries, context)

    def test_is_against_copies_beyond_the_bound(self, monkeypatch: pytest.MonkeyPatch) -> None:
        most = converted_tokens(90, 2 * 8 * 128 * 2)
        assert most == 65_536
        case = on_device(make_case([(3, 9)], num_decodes=0, heads=8, kv_heads=8, dim=128, int8=True))
        q = torch.zeros(2048, 8, 128, dtype=torch.bfloat16, device=DEVICE)
        plain = LayerCache(case.cache.k, case.cache.v)
        for capability in (80, 90):
            info = DeviceInfo(capability, 4)
            monkeypatch.setattr(kv_convert, "device_info", lambda device, info=info: info)
            for tokens in (most, most + 1):
                batch = dataclasses.replace(case.batch, max_context_len=40_000, max_prefill_context=tokens)
                fits = capability == 90 and tokens == most
                assert kv_convert.is_worth_converting(q, case.cache, batch) == fits
                assert not kv_convert.is_worth_converting(q, plain, batch)
                assert not kv_convert.is_worth_converting(q.float(), case.cache, batch)
            bytes_of_all = kv_convert.most_converted_bytes(case.cache, q.dtype, rows=64)
            assert bytes_of_all == (capability == 90) * (most + 64 * 64) * 4096

    def test_without_a_bound_is_by_that_of_each_row(self) -> None:
        batch = make_case([(1, 50), (3, 9), (4, 20)]).batch
        assert batch.prefill_context == 2 * 50


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_one_graph_serves_every_length() -> None:
    shape = {"num_decodes": 1, "heads": 4, "kv_heads": 2, "dim": 128, "block_size": 16, "int8": True}
    lengths = [[(1, 9), (300, 300), (400, 401), (500, 0)], [(1, 1), (1000, 5000), (100, 100), (100, 7000)]]
    cases = [on_device(make_case(rows, dtype=torch.bfloat16, **shape)) for rows in lengths]
    largest = on_device(cases[-1])
    for part in (largest.batch, largest.cache):
        for field in dataclasses.fields(part):
            if isinstance(value := getattr(part, field.name), torch.Tensor):
                setattr(part, field.name, value.clone())
    bounds = {"max_query_len": 1200, "max_context_len": 8192, "max_prefill_context": 20_000}
    batch = dataclasses.replace(largest.batch, scratch={}, **bounds)
    q, cache = torch.zeros_like(largest.q), largest.cache

    def attend() -> torch.Tensor:
        assert kv_convert.is_worth_converting(q[1:], cache, batch)
        return prefill_attention(q, cache, batch, scale=0.1)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for case in cases:
        blocks = case.cache.k.shape[0]
        for name in ("k", "v", "k_scale", "v_scale"):
            getattr(cache, name)[:blocks].copy_(getattr(case.cache, name))
        batch.block_tables.zero_()[:, : case.batch.block_tables.shape[1]].copy_(case.batch.block_tables)
        batch.context_lens.copy_(case.batch.context_lens)
        batch.query_starts.copy_(case.batch.query_starts)
        q[: len(case.q)].copy_(case.q)
        graph.replay()
        expected = torch.zeros_like(out)
        exact = reference.prefill_attention(case.q, case.cache, case.batch, scale=0.1)
        expected[: len(exact)] = exact
        torch.testing.assert_close(out, expected, atol=3e-2, rtol=3e-2)
