"""Reasoning is told from the answer, however the text is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.server.reasoning import ReasoningSplitter

TAGS = ("<think>", "</think>")
TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "think>", " ", "\n", "a", "<", "word"]),
    max_size=12,
).map("".join)


def split(text: str, cuts: list[int], *, is_opened: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(TAGS, is_opened=is_opened)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [splitter.push(text[start:end]) for start, end in pairwise(edges)]
    pieces.append(splitter.flush())
    return "".join(piece[0] for piece in pieces), "".join(piece[1] for piece in pieces)


def reference(text: str, *, is_opened: bool) -> tuple[str, str]:
    """The whole text at once."""
    opening, closing = TAGS
    if not is_opened:
        if not text.lstrip().startswith(opening):
            return "", text
        text = text.lstrip()[len(opening) :]
    reasoning, _, answer = text.partition(closing)
    return reasoning.strip(), answer.lstrip()


@given(TEXTS, st.lists(st.integers(0, 60), max_size=20), st.booleans())
def test_pieces_make_what_the_whole_makes(text: str, cuts: list[int], is_opened: bool) -> None:
    assert split(text, cuts, is_opened=is_opened) == reference(text, is_opened=is_opened)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nwell\n</think>\n\nYes.", ("well", "Yes.")),
        ("Yes: <think> is a tag.", ("", "Yes: <think> is a tag.")),
        ("<think>cut off </th", ("cut off </th", "")),
        ("<thinking>", ("", "<thinking>")),
        ("  <think></think> Yes.", ("", "Yes.")),
    ],
)
def test_examples(text: str, expected: tuple[str, str]) -> None:
    assert split(text, []) == split(text, list(range(len(text)))) == expected


def test_what_is_certain_is_given_out_at_once() -> None:
    splitter = ReasoningSplitter(TAGS, is_opened=False)
    assert [
        splitter.push(piece) for piece in ("<think>", "a ", "b<", "i</th", "ink>", "\n", "c", "</think>")
    ] == [
        ("", ""),
        ("a", ""),
        (" b", ""),
        ("<i", ""),
        ("", ""),
        ("", ""),
        ("", "c"),
        ("", "</think>"),
    ]


def test_a_model_without_reasoning() -> None:
    splitter = ReasoningSplitter(None, is_opened=False)
    assert (splitter.push("<think> "), splitter.flush()) == (("", "<think> "), ("", ""))
