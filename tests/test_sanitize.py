"""Text from outside can't command the terminal, and nothing visible is lost."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.sanitize import MAX_MARKS, Sanitizer, sanitize, sanitize_line

DANGEROUS = [
    "\x1b[31mred\x1b[0m",
    "\x1b]52;c;aGVsbG8=\x07",
    "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "\x9b2J\x9d0;title\x9c",
    "bell\a back\b nul\0 del\x7f",
    "abc\u202edcba\u202c",
    "\u2066isolated\u2069",
    "hidden\U000e0068\U000e0069",
    "zero\u200b\u2060\ufeffwidth",
    "\ud800",
]


@pytest.mark.parametrize("text", DANGEROUS)
def test_no_control_or_format_character_is_left(text: str) -> None:
    cleaned = sanitize(text)
    assert not [char for char in cleaned if unicodedata.category(char) in ("Cc", "Cs", "Cf")]


def test_control_characters_keep_a_visible_stand_in() -> None:
    assert sanitize("\x1b[31m\a\x7f") == "␛[31m␇␡"


@pytest.mark.parametrize(
    "text",
    ["plain", "tab\tand\nline", "中文 שלום ‏".rstrip("‏"), "👨‍👩‍👧 ❤️ 🇫🇷", "é e\u0301", "[bold]no markup[/]"],
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert sanitize(text) == text


@pytest.mark.parametrize("line_break", ["\n", "\r", "\r\n", "\v", "\f", "\x85", "\u2028", "\u2029", "\x1c"])
def test_every_line_break_becomes_one_newline(line_break: str) -> None:
    assert sanitize(f"a{line_break}b") == "a\nb"


def test_a_flood_of_combining_marks_is_cut() -> None:
    assert sanitize("a" + "\u0301" * 5000 + "b") == "a" + "\u0301" * MAX_MARKS + "b"


@given(st.lists(st.text(st.sampled_from("a\r\n\x1b\u0301\u2028\u202e\u200d😀[")), max_size=8))
def test_pieces_cleaned_are_the_whole_cleaned(pieces: list[str]) -> None:
    sanitizer = Sanitizer()
    assert "".join(map(sanitizer.feed, pieces)) == sanitize("".join(pieces))


@given(st.text())
def test_cleaning_is_idempotent_and_splits_lines_as_markdown_does(text: str) -> None:
    cleaned = sanitize(text)
    assert sanitize(cleaned) == cleaned
    assert len(cleaned.splitlines()) == len(cleaned.removesuffix("\n").split("\n")) or not cleaned


def test_a_line_is_one_line_of_limited_length() -> None:
    assert sanitize_line("  two\n\twords \x1b ") == "two words ␛"
    assert sanitize_line("x" * 1000, 10) == "x" * 9 + "…"
