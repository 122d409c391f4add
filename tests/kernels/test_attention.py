"""Paged attention: the reference against a dense float64 one, and the CPU's fast path against both."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import kernels
from nanochat.kernels import AttentionBatch, cpu_plan, reference
from tests.kernels.paged import Case, dense_attention, make_case

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and limits so small that short contexts take every path."""
    monkeypatch.setattr(cpu_plan, "QUERY_TILE", 4)
    monkeypatch.setattr(cpu_plan, "KEY_TILE", 8)
    monkeypatch.setattr(cpu_plan, "GROUP_TOKENS", 60)
    monkeypatch.setattr(cpu_plan, "VIEW_MIN_TOKENS", 16)
    monkeypatch.setattr(cpu_plan, "MAX_PADDING", 6)


def check(case: Case, *, scale: float = 0.25, window: int = 0, softcap: float = 0.0) -> None:
    """The reference equals the dense computation, and the public op equals it too, twice."""
    expected = dense_attention(case, scale=scale, window=window, softcap=softcap)
    tolerance = TOLERANCE[case.q.dtype]
    for function in (reference.attention, kernels.attention, kernels.attention):
        out = function(case.q, case.cache, case.batch, scale=scale, window=window, softcap=softcap)
        assert out.shape == case.q.shape
        assert out.dtype == case.q.dtype
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@st.composite
def batches(draw: st.DrawFn) -> dict:
    decodes = draw(st.lists(st.integers(0, 70), max_size=6))
    prefills = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), max_size=3))
    rows = [(1, length) for length in decodes] + [(n, n + prefix) for n, prefix in prefills]
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 8), (2, 1), (2, 4), (3, 3), (4, 2)]))
    return {
        "rows": rows or [(1, 1)],
        "num_decodes": len(decodes) if rows else 1,
        "kv_heads": kv_heads,
        "heads": kv_heads * group,
        "dim": draw(st.sampled_from([8, 16, 64, 80, 96])),
        "block_size": draw(st.sampled_from([1, 2, 3, 8, 16, 32])),
        "int8": draw(st.booleans()),
        "contiguous": draw(st.booleans()),
        "dtype": draw(st.sampled_from(sorted(TOLERANCE, key=str))),
        "seed": draw(st.integers(0, 99)),
    }


@given(batches(), st.sampled_from([0, 0, 1, 5, 40]), st.sampled_from([0.0, 0.0, 3.0]))
@settings(max_examples=60, deadline=None)
def test_random_batches(arguments: dict, window: int, softcap: float) -> None:
    check(make_case(**arguments), window=window, softcap=softcap)


@pytest.mark.usefixtures("small_tiles")
class TestSmallTiles:
    """The same with every tile limit crossed."""

    @pytest.mark.parametrize("seed", range(40))
    def test_random_batches(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def pick(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (1,), generator=generator))

        decodes = [(1, pick(0, 70)) for _ in range(pick(0, 7))]
        prefills = [(n, n + pick(0, 40)) for n in (pick(1, 30) for _ in range(pick(0, 3)))]
        case = make_case(
            decodes + prefills or [(1, 1)],
            num_decodes=len(decodes) if decodes + prefills else 1,
            heads=6,
            kv_heads=(1, 2, 3, 6)[seed % 4],
            block_size=pick(1, 9),
            int8=seed % 2 == 1,
            contiguous=pick(0, 1) == 1,
            dtype=(torch.float32, torch.bfloat16)[pick(0, 1)],
            seed=seed,
        )
        check(case, window=(0, 0, 1, 7, 33)[pick(0, 4)], softcap=(0.0, 0.0, 2.0)[pick(0, 2)])

    @pytest.mark.parametrize("int8", [False, True])
    @pytest.mark.parametrize("window", [0, 5, 9])
    def test_chunks_around_every_tile_edge(self, int8: bool, window: int) -> None:
        for prefix in (0, 1, 7, 8, 9, 16):
            for n in (2, 3, 4, 5, 8, 9):
                check(make_case([(n, n + prefix)], int8=int8, num_decodes=0), window=window)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_head_sizes_and_groups(dim: int, group: int) -> None:
    rows = [(1, 9), (1, 33), (7, 7), (5, 21)]
    check(make_case(rows, dim=dim, heads=2 * group, kv_heads=2), scale=dim**-0.5)


@pytest.mark.parametrize("block_size", [1, 2, 16, 32])
def test_lengths_around_block_boundaries(block_size: int) -> None:
    lengths = sorted({max(1, block_size * m + d) for m in (1, 2, 3) for d in (-1, 0, 1)})
    rows = [(1, length) for length in lengths] + [(max(2, length), max(2, length)) for length in lengths]
    check(make_case(rows, block_size=block_size))


def test_a_chunk_of_one_token_after_decodes() -> None:
    check(make_case([(1, 5), (1, 9), (1, 1)], num_decodes=1))


def test_rows_without_context_give_zeros() -> None:
    case = make_case([(1, 0), (1, 6), (1, 0), (3, 7)])
    out = kernels.attention(case.q, case.cache, case.batch, scale=0.25)
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    check(case)
    check(make_case([(1, 0), (1, 0)]))


def test_tokens_of_no_row_give_zeros() -> None:
    case = make_case([(1, 6), (3, 7)])
    case.q = torch.cat((case.q, torch.full_like(case.q[:2], float("nan"))))
    out = kernels.attention(case.q, case.cache, case.batch, scale=0.25)
    assert torch.equal(out[-2:], torch.zeros_like(out[-2:]))
    torch.testing.assert_close(out, reference.attention(case.q, case.cache, case.batch, scale=0.25))


@pytest.mark.parametrize("backend", [kernels, reference])
def test_decodes_and_prefills_alone_are_the_parts_of_the_whole(backend: ModuleType) -> None:
    case = make_case([(1, 6), (1, 30), (3, 7), (5, 5)])
    options = {"scale": 0.25, "window": 5, "softcap": 2.0}
    whole = backend.attention(case.q, case.cache, case.batch, **options)
    decodes = backend.decode_attention(case.q, case.cache, case.batch, **options)
    prefills = backend.prefill_attention(case.q, case.cache, case.batch, **options)
    torch.testing.assert_close(torch.cat((decodes, prefills)), whole)


def test_queries_may_be_a_view_of_a_wider_tensor() -> None:
    case = make_case([(1, 6), (1, 600), (3, 7), (5, 5)], int8=True)
    wide = torch.cat((case.q, torch.full_like(case.q, float("nan"))), dim=1)
    case.q = wide[:, : case.q.shape[1]]
    check(case)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
def test_long_contexts(int8: bool, contiguous: bool) -> None:
    """Past every default limit: views, groups, several query tiles and key tiles."""
    rows = [(1, 1500), (1, 1490), (1, 700), (1, 40), (300, 1400), (530, 530)]
    case = make_case(rows, block_size=16, int8=int8, contiguous=contiguous, heads=2, kv_heads=1)
    expected = reference.attention(case.q, case.cache, case.batch, scale=0.25)
    out = kernels.attention(case.q, case.cache, case.batch, scale=0.25)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_the_copies_for_int8_stay_within_a_tile() -> None:
    case = make_case([(1, 5000), (100, 5000)], block_size=16, int8=True)
    kernels.attention(case.q, case.cache, case.batch, scale=0.25)
    tile = cpu_plan.KEY_TILE * case.cache.k[0, 0].numel()
    sizes = [memory.numel() for memory in case.batch.scratch["buffers"].memory.values()]
    assert sizes
    assert max(sizes) <= tile


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
def test_prefills_in_16_bits_have_few_sizes(
    int8: bool, contiguous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch keeps the code of each that it has met."""
    monkeypatch.setattr(cpu_plan, "MAX_COPIED_KEYS", 90)
    shapes: list[tuple[int, int]] = []
    plan_row = cpu_plan.Planner._prefill_row

    def watched(planner: cpu_plan.Planner, *arguments: int) -> list[cpu_plan.PrefillCall]:
        calls = plan_row(planner, *arguments)
        shapes.extend((call.queries, call.keys) for call in calls)
        return calls

    monkeypatch.setattr(cpu_plan.Planner, "_prefill_row", watched)
    for new, before in [(1, 0), (17, 0), (33, 20), (1, 20), (16, 16), (31, 60), (2, 95), (99, 0)]:
        case = make_case(
            [(new, new + before)],
            num_decodes=0,
            kv_heads=2,
            heads=4,
            dim=16,
            block_size=16,
            int8=int8,
            contiguous=contiguous,
            dtype=torch.bfloat16,
        )
        check(case)
    assert len(shapes) == 8
    for queries, keys in shapes:
        assert queries % 16 == 0
        assert keys % 16 == 0 or keys > 90


def test_layers_with_other_windows_share_a_batch() -> None:
    case = make_case([(1, 50), (1, 20), (9, 40)])
    for window in (0, 8, 0, 16, 8):
        check(case, window=window)


BAD = {
    "q of another width": lambda case: {"q": case.q[..., :3]},
    "q with heads that don't divide": lambda case: {"q": case.q[:, :3]},
    "q of another type": lambda case: {"q": case.q.half()},
    "window": lambda case: {"window": -1},
    "softcap": lambda case: {"softcap": -1.0},
}


@pytest.mark.parametrize("fault", BAD)
def test_a_wrong_argument_is_named(fault: str) -> None:
    case = make_case([(1, 5), (3, 7)])
    arguments = {"q": case.q, "cache": case.cache, "batch": case.batch, "scale": 1.0, **BAD[fault](case)}
    with pytest.raises(ValueError, match=fault.split()[0]):
        kernels.attention(**arguments)


@pytest.mark.parametrize("name", ["block_tables", "context_lens", "query_starts"])
def test_a_wrong_batch_tensor_is_named(name: str) -> None:
    case = make_case([(1, 5), (3, 7)])
    setattr(case.batch, name, getattr(case.batch, name).long())
    with pytest.raises(ValueError, match=f"{name} must be .* int32"):
        kernels.attention(case.q, case.cache, case.batch, scale=1.0)


def test_more_decodes_than_rows_is_refused() -> None:
    case = make_case([(1, 5)])
    batch = case.batch
    wrong = AttentionBatch(2, batch.block_tables, batch.context_lens, batch.query_starts, 1, 5)
    with pytest.raises(ValueError, match="num_decodes"):
        kernels.attention(case.q, case.cache, wrong, scale=1.0)
