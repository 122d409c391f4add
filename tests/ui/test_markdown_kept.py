"""What Markdown's syntax would let vanish stands on the screen: deep nesting, surplus cells, labels, titles."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markdown_it.tree import SyntaxTreeNode
from rich.cells import cell_len

from nanochat.ui import markdown_document
from nanochat.ui.markdown_document import MAX_BLOCK_LINES, MAX_CELLS, PIECE
from nanochat.ui.markdown_layout import MarkdownLayout
from nanochat.ui.markdown_parser import MAX_COLUMNS
from tests.ui.test_markdown import fresh, lines, streamed

DEEP_LIST = "".join("  " * depth + f"- level {depth}\n" for depth in range(14))
DEEP_QUOTE = ">" * 25 + " deep\n"
AROUND = "# Head\n\nsome **bold** text\n\n```py\nx = 1\n```\n\n{}\nafter **it**\n"


def in_steps(text: str, step: int) -> list[str]:
    return [text[start : start + step] for start in range(0, len(text), step)]


class TestDeepNesting:
    @pytest.mark.parametrize("deep", [DEEP_LIST, DEEP_QUOTE, DEEP_LIST.replace("-", "1.")])
    @pytest.mark.parametrize("step", [1, 5, PIECE])
    def test_what_is_around_it_stays_as_it_is(self, deep: str, step: int) -> None:
        text = AROUND.format(deep)
        shown = fresh(text)
        assert shown[:4] == ["Head", "", "some bold text", ""]
        assert shown[-1] == "after it"
        assert lines(streamed(in_steps(text, step))) == shown

    def test_the_levels_beyond_the_last_are_text_in_it(self) -> None:
        shown = [line.strip() for line in fresh(DEEP_LIST)]
        assert shown[9:] == ["• level 9", *(f"- level {number}" for number in range(10, 14))]

    def test_an_item_further_out_goes_on_with_its_list(self) -> None:
        assert fresh(DEEP_LIST + "- out\n  - in\n")[-2:] == ["• out", "  ◦ in"]

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.integers(0, 14),
                st.sampled_from(["- ", "1. ", "> ", ">" * 12, "", "```\n", "|a|b|\n|-|-|\n", "# "]),
                st.sampled_from(["word\n", "x **y**\n", "\n", "word\n\n"]),
            ),
            max_size=25,
        ),
        st.integers(1, 60),
    )
    def test_any_stream_of_it_ends_as_a_fresh_layout(
        self, parts: list[tuple[int, str, str]], step: int
    ) -> None:
        staircase = "".join("  " * depth + "- x\n" for depth in range(11))
        text = staircase + "".join("  " * depth + mark + rest for depth, mark, rest in parts)
        with pytest.MonkeyPatch.context() as patch:
            for name, limit in {"MAX_BLOCK": 200, "MAX_LINE": 100, "MAX_OPEN": 500, "PIECE": 61}.items():
                patch.setattr(markdown_document, name, limit)
            shown = fresh(text)
            assert lines(streamed(in_steps(text, step))) == shown
        assert "\n".join(shown).count("word") == text.count("word")


@given(st.text(st.sampled_from("ab日é\u0301\u0302\u0928\u093f"), max_size=60), st.integers(8, 30))
def test_code_is_folded_without_loss(code: str, width: int) -> None:
    shown = fresh(f"```\n{code}\n```", width)
    assert "".join(line[1:] for line in shown) == code
    assert all(cell_len(line) <= width for line in shown)


CELLS = st.text(st.sampled_from("abc `*\\|"), max_size=6)


class TestSurplusCells:
    @pytest.mark.parametrize(
        ("row", "shown"),
        [
            ("|x|y|LOST|also|", "x  y|LOST|also"),
            ("x|y|z", "x  y|z"),
            ("| or | `a || b` is or |", "or  a || b is or"),
            ("| x | y \\| z |", "x  y | z"),
            ("|x|y||", "x  y|"),
            ("|x|", "x"),
        ],
    )
    def test_they_stand_in_the_last_column(self, row: str, shown: str) -> None:
        assert fresh(f"|a|b|\n|-|-|\n{row}\n")[-1] == shown
        assert fresh(f"> |a|b|\n> |-|-|\n> {row}\n")[-1] == f"▌ {shown}"

    def test_they_stand_in_records_too(self) -> None:
        table = "|" + "|".join("abcdefgh") + "|\n" + "|-" * 8 + "|\n" + "|" + "|".join("123456789") + "|"
        assert fresh(table, 12)[-1] == "h: 8|9"

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(st.lists(CELLS, min_size=1, max_size=5), min_size=1, max_size=4), st.sampled_from([9, 60])
    )
    def test_no_letter_is_lost(self, rows: list[list[str]], width: int) -> None:
        source = "|a|b|\n|-|-|\n" + "".join("|" + "|".join(row) + "|\n" for row in rows)
        shown = fresh(source, width)
        is_repeated = width < 60 and any(": " in line for line in shown)
        letters = re.sub("[^abc]", "", source)
        assert is_repeated or sorted(re.sub("[^abc]", "", "".join(shown))) == sorted(letters)

    def test_more_columns_than_any_screen_has_are_text(self) -> None:
        row = "|" + "a|" * (MAX_COLUMNS + 1)
        source = row + "\n" + row.replace("a", "-") + "\n"
        assert "".join(fresh(source)) == source.replace("\n", "")


class TestLabels:
    def test_all_of_it_stands_above_the_code(self) -> None:
        shown = fresh("```Here is 日本 the answer, and it is long enough for two lines\nx\n```", 40)
        assert " ".join(line.strip() for line in shown) == (
            "Here is 日本 the answer, and it is long enough for two lines x"
        )
        assert {cell_len(line) for line in shown[:-1]} == {39}

    @pytest.mark.parametrize(
        "info", ["python", "python and more than fits on a line of that width", "(see below)", ""]
    )
    def test_no_line_of_divided_code_is_lost(self, info: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, limit in {"MAX_BLOCK": 400, "PIECE": 150}.items():
            monkeypatch.setattr(markdown_document, name, limit)
        code = [f"value_{number} = {number}" for number in range(90)]
        shown = fresh(f"```{info}\n" + "\n".join(code) + "\n```\n", 30)
        assert [line.strip() for line in shown][-90:] == code
        assert " ".join(line.strip() for line in shown[:-90]) == info


class TestCost:
    """What a delta may cost is told by how much is parsed for it."""

    @pytest.mark.parametrize(
        ("text", "most"),
        [
            ("|a|b|\n|-|-|\n" + "|x|y|\n" * 900, MAX_CELLS // 2),
            ("|" + "a|" * 90 + "\n|" + "-|" * 90 + "\n" + ("|" + "b|" * 90 + "\n") * 20, MAX_CELLS // 90 + 2),
            ("- x\n" * 900, MAX_BLOCK_LINES),
            ("- one\n" + "  - x\n" * 900, 2 * MAX_BLOCK_LINES),
            ("> a\n" + "b\n" * 900, 2 * MAX_BLOCK_LINES),
        ],
    )
    def test_a_block_of_many_short_lines_is_divided(
        self, text: str, most: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parsed, parse = [0], MarkdownLayout.parse

        def counting(layout: MarkdownLayout, source: str) -> list[SyntaxTreeNode]:
            parsed.append(source.count("\n"))
            return parse(layout, source)

        monkeypatch.setattr(MarkdownLayout, "parse", counting)
        document = streamed(in_steps(text, 100))
        assert max(parsed) <= most + 100 // len(text.split("\n")[-2]) + 2
        assert lines(document) == fresh(text)

    @pytest.mark.parametrize("text", ["*a_" * 600, "[" * 2_000, "[a](" * 400, "![a" * 600, "~~a " * 600])
    def test_thousands_of_marks_are_text(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        parsed = [0]
        parse = MarkdownIt.parseInline

        def counting(parser: MarkdownIt, source: str) -> list[Token]:
            parsed.append(len(source))
            return parse(parser, source)

        monkeypatch.setattr(MarkdownIt, "parseInline", counting)
        assert "".join(fresh(text)).replace(" ", "") == text.replace(" ", "")
        assert max(parsed) == 0

    def test_a_long_paragraph_of_prose_is_no_such_text(self) -> None:
        shown = fresh("some plain words with a **bold** one and `code`, then more.\n" * 120)
        assert set(shown) == {"some plain words with a bold one and code, then more."}


@pytest.mark.parametrize("length", range(25, 40))
def test_a_table_right_below_a_long_paragraph_divides_it_the_same_however_it_came(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in {"MAX_BLOCK": 60, "MAX_LINE": 40, "MAX_OPEN": 150, "PIECE": 25}.items():
        monkeypatch.setattr(markdown_document, name, limit)
    text = "a **bold word\n" + "x" * length + "\nends** here\n|a|b|\n|-|-|\n|c|d|\n"
    for step in range(1, 10):
        assert lines(streamed(in_steps(text, step))) == fresh(text)
