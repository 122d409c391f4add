"""Which part each rank has: together they have everything, each the KV heads that its query heads read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.engine.models.families import ModelConfig, load_model_config
from nanochat.engine.models.shard import Shard
from nanochat.errors import InvalidOption


@pytest.fixture
def model(tiny_llama: Path) -> ModelConfig:
    return load_model_config(tiny_llama)


@given(total=st.integers(1, 5000), size=st.integers(1, 16))
def test_own_parts_are_the_whole_and_fit(total: int, size: int) -> None:
    ranges = [Shard(rank, size).own(total) for rank in range(size)]
    assert [place for begin, end in ranges for place in range(begin, end)] == list(range(total))
    assert all(end - begin <= Shard(0, size).part(total) for begin, end in ranges)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "expected"),
    [
        (16, 8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (16, 8, 8, [[n] for n in range(8)]),
        (16, 8, 16, [[n // 2] for n in range(16)]),
        (14, 2, 7, [[0, 0], [0, 0], [0, 0], [0, 1], [1, 1], [1, 1], [1, 1]]),
        (6, 3, 2, [[0, 0, 1], [1, 2, 2]]),
    ],
)
def test_kv_heads(
    model: ModelConfig, heads: int, kv_heads: int, size: int, expected: list[list[int]]
) -> None:
    model = replace(model, num_heads=heads, num_kv_heads=kv_heads)
    assert [Shard(rank, size).kv_heads(model) for rank in range(size)] == expected


@given(kv_heads=st.integers(1, 12), shared=st.integers(1, 12), data=st.data())
def test_every_query_head_finds_its_own_kv_head(kv_heads: int, shared: int, data: st.DataObject) -> None:
    heads = kv_heads * shared
    size = data.draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    model = _sizes(heads, kv_heads)
    for rank in range(size):
        local = Shard(rank, size).kv_heads(model)
        own = heads // size
        assert own % len(local) == 0
        for head in range(own):
            assert local[head // (own // len(local))] == (rank * own + head) // shared


def _sizes(heads: int, kv_heads: int) -> ModelConfig:
    values = dict.fromkeys(ModelConfig.__dataclass_fields__, 0) | {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
    }
    return ModelConfig(**values)  # type: ignore[arg-type]


def test_neighbouring_heads_are_one_range() -> None:
    assert Shard().head_ranges([0, 1, 3, 3], 10) == [(0, 20), (30, 40), (30, 40)]


def test_a_number_that_does_not_divide_the_heads_says_which_would(model: ModelConfig) -> None:
    with pytest.raises(InvalidOption, match=r"--tp 3 .* 4 query heads; 1, 2 or 4 would\.$"):
        Shard(0, 3).config(model)
    with pytest.raises(InvalidOption, match=r"1 query heads; 1 would\.$"):
        Shard(0, 3).config(replace(model, num_heads=1, num_kv_heads=1))
