"""Streamed Markdown equals a fresh layout, loses no text, and stays within its width."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from nanochat.ui import markdown_document
from nanochat.ui.markdown_document import MAX_CHARACTERS, PIECE, MarkdownDocument
from nanochat.ui.markdown_layout import fit_columns

LONG_LIST = "".join(f"- item {number} with **bold** text and `code`\n" for number in range(200))
LONG_FENCE = (
    "```python\n"
    + "".join(f"def f{number}(x): return x + {number}  # note\n" for number in range(250))
    + "```\n"
)
WIDE_TABLE = (
    "|" + "|".join(f"head {column}" for column in range(10)) + "|\n" + "|---" * 10 + "|\n"
    + "".join("|" + "|".join(f"cell {row} {column}" for column in range(10)) + "|\n" for row in range(50))
)  # fmt: skip
SCRIPTS = "中文字符 and ❤️ 👨‍👩‍👧\n\nשלום עולם\n\n1. מספר\n2. 数字\n\ttab\n"
MIXED = (
    "# Title\n\npara *one*\nsecond line\n- a\n  - b\n    1. c\n\n> quote\n> - in it\n\n---\n"
    "| a | b |\n|:-:|--:|\n| 1 | 2 |\n\n    indented code\n\n~~~\nplain fence\n~~~\nend"
)


def lines(document: MarkdownDocument) -> list[str]:
    return [line.content.plain for line in document.lines]


def fresh(source: str, width: int = 60) -> list[str]:
    document = MarkdownDocument(source)
    document.layout(width)
    return lines(document)


def streamed(pieces: list[str], width: int = 60) -> MarkdownDocument:
    document = MarkdownDocument()
    for piece in pieces:
        document.append(piece)
        document.layout(width)
    document.finish()
    return document


@pytest.mark.parametrize("text", [LONG_LIST[:500], LONG_FENCE[:400], WIDE_TABLE[:500], SCRIPTS, MIXED])
@pytest.mark.parametrize("step", [1, 7])
def test_streamed_text_ends_as_a_fresh_layout(text: str, step: int) -> None:
    document = streamed([text[start : start + step] for start in range(0, len(text), step)])
    assert lines(document) == fresh(text)


@pytest.mark.parametrize("text", [LONG_LIST, LONG_FENCE, WIDE_TABLE])
def test_long_blocks_streamed_in_large_pieces_end_as_a_fresh_layout(text: str) -> None:
    document = streamed([text[start : start + 397] for start in range(0, len(text), 397)])
    assert lines(document) == fresh(text)


FRAGMENTS = ["a", "b c", "\n", "\n\n", "- ", "1. ", "# ", "```", "```py\n", "> ", "|", "|-|-|\n", "    ", "*", "**", "`", "---", "[x](y)", "~~", "===", "<b>", "[r]: z\n", "\t", "2) ", "\\", "&#27;"]  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=30), st.sampled_from([9, 24, 60]))
def test_any_stream_ends_as_a_fresh_layout_within_its_width(pieces: list[str], width: int) -> None:
    document = streamed(pieces, width)
    assert lines(document) == fresh("".join(pieces), width)
    assert all(cell_len(line) <= width for line in lines(document))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=20), st.lists(st.sampled_from(FRAGMENTS), max_size=5))
def test_layout_reports_the_first_line_that_changed(before: list[str], after: list[str]) -> None:
    document = streamed(before)
    old = lines(document)
    document.append("".join(after))
    first = document.layout(60)
    assert lines(document)[:first] == old[:first]


WORDS = st.text(st.sampled_from("abcdefgh"), min_size=3, max_size=6)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "- ", "> ", "## ", "1. ", "```\n", "<div> ", "[x]: ", "**", "| "]), WORDS
        ),
        max_size=12,
    )
)
def test_no_word_is_lost(parts: list[tuple[str, str]]) -> None:
    source = "\n".join(marker + word for marker, word in parts)
    shown = "\n".join(fresh(source, 80))
    assert re.findall(r"[a-h]{3,}", shown) == [word for _, word in parts] or "```\n" in source


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes a block or a line long is far less, so that tests of it are quick."""
    for name, limit in {"MAX_BLOCK": 400, "MAX_LINE": 400, "MAX_OPEN": 1_000, "PIECE": 150}.items():
        monkeypatch.setattr(markdown_document, name, limit)


TABLE = "| a | b |\n|---|---|\n" + "".join(f"| {row} | cell {row} |\n" for row in range(90))
LOOSE_LIST = "".join(f"- item {number}\n\n" for number in range(90))
CODE = [f"value_{number} = {number}" for number in range(90)]
LONG_BLOCKS = {
    "list": LONG_LIST,
    "loose list": LOOSE_LIST,
    "nested list": "- one\n" + "".join(f"  - line {number} of a list\n" for number in range(90)),
    "fence": "```python\n" + "\n".join(CODE) + "\n```\nafter it\n",
    "table": TABLE,
    "quote": "".join(f"> line {number} of a quote\n" for number in range(90)),
    "lines": "one line of a poem\n" * 90,
    "one line": "word **and** `x` " * 120,
    "empty lines": "first\n" + "  \n" * 900 + "last",
}


@pytest.mark.parametrize("name", LONG_BLOCKS)
@pytest.mark.parametrize("step", [5, 5_003])
@pytest.mark.usefixtures("small_limits")
def test_a_block_that_is_divided_looks_the_same_however_it_came(name: str, step: int) -> None:
    text = LONG_BLOCKS[name]
    whole = fresh(text)
    assert lines(streamed([text[start : start + step] for start in range(0, len(text), step)])) == whole
    assert set(re.findall(r"\w{3,}", text)) <= set(re.findall(r"\w+", "\n".join(whole)))


@pytest.mark.usefixtures("small_limits")
def test_what_is_divided_goes_on_without_a_seam() -> None:
    assert fresh(LONG_BLOCKS["fence"]) == ["python".rjust(59), *(f" {row}" for row in CODE), "", "after it"]
    assert fresh(LONG_LIST) == [f"• item {number} with bold text and code" for number in range(200)]
    assert fresh(LOOSE_LIST) == [line for number in range(90) for line in (f"• item {number}", "")][:-1]
    table = fresh(TABLE)
    assert table.count(table[0]) > 1  # its heading stands above each part
    assert [line for line in table if "cell" in line] == [f"{row:<2}  cell {row}" for row in range(90)]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([*FRAGMENTS, "word " * 30, "- item\n" * 20, "code\n" * 40]), max_size=40))
@pytest.mark.usefixtures("small_limits")
def test_any_long_stream_ends_as_a_fresh_layout(pieces: list[str]) -> None:
    assert lines(streamed(pieces)) == fresh("".join(pieces))


def test_a_long_text_is_laid_out_in_slices() -> None:
    text = "".join(f"Paragraph {number} of *many*.\n\n" for number in range(1_000))
    document, slices = MarkdownDocument(text), 0
    while not document.is_complete:
        before = lines(document)
        first = document.layout(60, lambda: False)
        assert lines(document)[:first] == before[:first]
        slices += 1
    assert slices == -(-len(text) // PIECE)
    assert lines(document) == fresh(text)


@pytest.mark.parametrize("text", ["x" * (MAX_CHARACTERS + 5_000), "- x\n" * 1_350])
def test_what_no_model_says_is_cut_and_says_so(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown_document, "MAX_LINES", 100)
    document = MarkdownDocument(text[:-5])
    document.layout(60)
    document.append(text[-5:])
    document.layout(60)
    assert lines(document)[-1] == "… 5,000 more characters; /export writes all of them"
    assert document.is_complete


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
        ("[1]: https://x.example", "[1]: https://x.example"),
        ("text\n===", "text\n==="),
        ("[name](https://x.example)", "name (https://x.example)"),
        ("<https://x.example>", "https://x.example"),
        ("![alt](pic.png)", "[alt] (pic.png)"),
        ("[bold]x[/bold]", "[bold]x[/bold]"),
        ("roses\nviolets", "roses\nviolets"),
        ("3. a\n4. b", "3. a\n4. b"),
        ("- a\n  - b", "• a\n  ◦ b"),
        ("- a\n\n- b", "• a\n\n• b"),
        ("> a\n> b", "▌ a\n▌ b"),
        ('[a](http://x "the title")', 'a (http://x "the title")'),
        ('[http://x](http://x "the title")', 'http://x (http://x "the title")'),
        ('![alt](u "cap")', '[alt] (u "cap")'),
        ('[a](http://x "&#27;[31m")', 'a (http://x "&#27;[31m")'),
        ("1) a\n2) b", "1) a\n2) b"),
    ],
)
def test_what_stands_on_the_screen(source: str, shown: str) -> None:
    assert "\n".join(fresh(source)) == shown


def test_entities_cannot_smuggle_control_characters() -> None:
    shown = "".join(fresh("a &#27;[31m &#x202e; &#7; `&#27;` | &#x9b;"))
    assert not [char for char in shown if unicodedata.category(char) in ("Cc", "Cf")]


def test_a_table_aligns_and_wraps_its_cells() -> None:
    table = "| name | amount |\n|---|--:|\n| a much longer cell than fits | 7 |"
    assert fresh(table, 24) == [
        "name              amount",
        "────────────────  ──────",
        "a much longer          7",
        "cell than fits",
    ]


def test_a_table_too_wide_for_columns_becomes_records() -> None:
    table = "|" + "|".join("abcdefgh") + "|\n" + "|-" * 8 + "|\n" + "|" + "|".join("12345678") + "|"
    assert fresh(table, 12) == [
        f"{name}: {value}" for name, value in zip("abcdefgh", "12345678", strict=True)
    ]


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(40, 200))
def test_columns_fit(natural: list[int], available: int) -> None:
    widths = fit_columns(natural, available)
    assert sum(widths) <= available
    assert all(1 <= width <= wanted for width, wanted in zip(widths, natural, strict=True))
    if sum(natural) <= available:
        assert widths == natural


@pytest.mark.parametrize(
    "text",
    ["[" * 5000, "*" * 5000, "`" * 5000, "a**" * 2000, ">" * 2000, "![" * 2000, "<" * 5000, "_a " * 2000, "[a](" * 1500, "x" * 10_000,
     "".join("  " * depth + "- x\n" for depth in range(60))],
)  # fmt: skip
def test_hostile_text_is_shown_and_keeps_its_width(text: str) -> None:
    shown = fresh(text)
    assert shown
    assert all(cell_len(line) <= 60 for line in shown)


def test_code_is_kept_whole_whatever_its_language() -> None:
    code = "\n\nx = 1\n\ty\n\n"
    for language in ("", "python", "nosuchlanguage", "rst", "html+jinja"):
        shown = fresh(f"```{language}\n{code}```")
        body = [line[1:] for line in (shown[1:] if language else shown)]
        assert "\n".join(body) == code.removesuffix("\n").expandtabs(4)


def test_resizing_lays_out_anew() -> None:
    document = MarkdownDocument("one two three four five six seven eight")
    document.layout(60)
    assert document.layout(14) == 0
    assert lines(document) == ["one two three", "four five six", "seven eight"]
