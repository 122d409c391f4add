"""Tokens a second, counted from the first one."""

from __future__ import annotations

import pytest

from nanochat.engine.outputs import decode_rate


@pytest.mark.parametrize(
    ("num_tokens", "first_s", "last_s", "rate"),
    [
        (5, 10.0, 12.0, 2.0),
        (2, 0.0, 0.5, 2.0),
        (1, 10.0, 12.0, None),
        (0, None, None, None),
        (5, None, 12.0, None),
        (5, 10.0, None, None),
        (5, 12.0, 12.0, None),
        (5, 12.0, 10.0, None),
    ],
)
def test_the_first_token_is_where_the_time_begins(
    num_tokens: int, first_s: float | None, last_s: float | None, rate: float | None
) -> None:
    assert decode_rate(num_tokens, first_s, last_s) == rate
