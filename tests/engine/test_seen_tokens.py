"""The distinct tokens of a growing list, against counting them all anew."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanochat.engine.seen_tokens import SeenTokens


@given(st.lists(st.lists(st.integers(0, 20), max_size=8), max_size=8))
def test_as_if_counted_anew(parts: list[list[int]]) -> None:
    seen, token_ids = SeenTokens(), list[int]()
    for part in parts:
        token_ids += part
        ids = np.array(seen.of(token_ids))
        assert ids.dtype == np.int64
        assert np.array_equal(np.sort(ids), np.unique(np.array(token_ids, dtype=np.int64)))
