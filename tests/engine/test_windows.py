"""Sliding windows: which tokens each scores, and which are decoded as well."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.engine.windows import Window, decode_spans, sliding_windows
from nanochat.errors import InvalidOption


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Length of a text, of its windows, and their stride."""
    ctx = draw(st.integers(2, 40))
    return draw(st.integers(ctx, 300)), ctx, draw(st.integers(1, ctx))


class TestSlidingWindows:
    def test_half_a_window_at_a_time(self) -> None:
        assert sliding_windows(10, ctx=4, stride=2) == [
            Window(0, 4, 1),
            Window(2, 6, 4),
            Window(4, 8, 6),
            Window(6, 10, 8),
        ]

    def test_the_last_window_may_be_shorter(self) -> None:
        assert sliding_windows(7, ctx=4, stride=2)[-1] == Window(4, 7, 6)

    def test_windows_side_by_side_leave_out_their_first_tokens(self) -> None:
        assert sliding_windows(9, ctx=4, stride=4) == [Window(0, 4, 1), Window(4, 8, 5)]

    def test_one_window(self) -> None:
        assert sliding_windows(4, ctx=4, stride=1) == [Window(0, 4, 1)]

    @given(shapes())
    def test_every_token_counts_once_with_enough_before_it(self, shape: tuple[int, int, int]) -> None:
        num_tokens, ctx, stride = shape
        windows = sliding_windows(num_tokens, ctx, stride)
        scored = [token for window in windows for token in range(window.first_scored, window.end)]
        assert len(set(scored)) == len(scored)
        firsts = {0} if stride < ctx else set(range(0, num_tokens, ctx))
        assert set(scored) == set(range(num_tokens)) - firsts
        for window in windows:
            assert window.begin < window.first_scored < window.end <= num_tokens
            assert window.end - window.begin <= ctx
            assert window.first_scored - window.begin >= (max(ctx - stride, 1) if window.begin else 1)
        assert all(window.end - window.begin == ctx for window in windows[:-1])

    @given(shapes())
    def test_is_the_convention_of_transformers(self, shape: tuple[int, int, int]) -> None:
        num_tokens, ctx, stride = shape
        expected = []
        previous_end = 0
        for begin in range(0, num_tokens, stride):  # as its documentation has it
            end = min(begin + ctx, num_tokens)
            target_length = end - previous_end
            # It sets the labels before the last target_length to "ignore", then drops the first of all.
            labels = range(max(end - target_length, begin + 1), end)
            if labels:
                expected.append((begin, end, labels[0]))
            previous_end = end
            if end == num_tokens:
                break
        assert sliding_windows(num_tokens, ctx, stride) == expected

    @pytest.mark.parametrize(
        ("num_tokens", "ctx", "stride", "sentence"),
        [
            (100, 1, 1, "two tokens at least"),
            (100, 8, 0, "--stride must be between 1 and"),
            (100, 8, 9, "--stride must be between 1 and"),
            (7, 8, 4, "fewer than one window of 8"),
            (0, 8, 4, "fewer than one window of 8"),
        ],
    )
    def test_what_can_not_work_is_refused(
        self, num_tokens: int, ctx: int, stride: int, sentence: str
    ) -> None:
        with pytest.raises(InvalidOption, match=sentence):
            sliding_windows(num_tokens, ctx, stride)


class TestDecodeSpans:
    @given(shapes(), st.data())
    def test_spans_are_scored_by_their_windows(
        self, shape: tuple[int, int, int], data: st.DataObject
    ) -> None:
        windows = sliding_windows(*shape)
        available = decode_spans(windows).num_tokens
        wanted = data.draw(st.integers(1, available))
        spans = decode_spans(windows, wanted)
        assert len(set(spans.windows)) == len(spans.windows)
        assert set(spans.windows) <= set(windows)
        assert wanted <= spans.num_tokens < wanted + len(spans.windows)
        for window in spans.windows:
            assert window.end - window.begin == shape[1]
            assert window.end - spans.length >= window.first_scored

    def test_many_windows_rather_than_long_spans(self) -> None:
        windows = sliding_windows(100_000, ctx=512, stride=256)
        spans = decode_spans(windows)
        assert (len(spans.windows), spans.length) == (16, 64)
        begins = [window.begin for window in spans.windows]
        gaps = [later - earlier for earlier, later in pairwise(begins)]
        assert max(gaps) - min(gaps) <= 256

    def test_a_short_text_gives_what_it_has(self) -> None:
        assert decode_spans(sliding_windows(12, ctx=8, stride=4)).num_tokens == 8

    @pytest.mark.parametrize("wanted", [9, 1000])
    def test_more_than_there_is_is_refused(self, wanted: int) -> None:
        with pytest.raises(InvalidOption, match="between 1 and 8 "):
            decode_spans(sliding_windows(12, ctx=8, stride=4), wanted)
