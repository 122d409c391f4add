"""Search: what is found, what a query can't do, and what a hit shows."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanochat.history import History, SearchHit
from nanochat.history.search import query_words, segmented, snippet


@pytest.fixture
def filled(history: History) -> History:
    chat_id = history.create_chat("Travel plans 100%")
    for text in (
        "The volcanoes of Hawaii are open to visitors.",
        "Ein Café in Zürich, naïve façade.",
        "我想去夏威夷看火山。hello世界",
        "東京タワーへ行きたい",
        "Use `a -> b` and don't panic 🎉",
        "snake_case and C++ and 3.14",
    ):
        history.add_message(chat_id, None, text)
    return history


def marked(hit: SearchHit) -> list[str]:
    return [hit.snippet[start:end] for start, end in hit.spans]


@pytest.mark.parametrize(
    ("query", "found", "words"),
    [
        ("hawaii", "The volcanoes", ["Hawaii"]),
        ("visit volc", "The volcanoes", ["volc", "visit"]),
        ("cafe zurich", "Ein Café", ["Café", "Zürich"]),
        ("FAÇADE", "Ein Café", ["façade"]),
        ("夏威夷", "我想去", ["夏威夷"]),
        ("火", "我想去", ["火"]),
        ("hello世", "我想去", ["hello世"]),
        ("タワー", "東京", ["タワー"]),
        ("->", "Use `a", ["->"]),
        ("🎉", "Use `a", ["🎉"]),
        ("don't", "Use `a", ["don't"]),
        ("snake_case", "snake_case", ["snake_case"]),
        ("3.14", "snake_case", ["3.14"]),
    ],
)
def test_finds(filled: History, query: str, found: str, words: list[str]) -> None:
    (hit,) = filled.search(query)
    assert hit.snippet.startswith(found)
    assert marked(hit) == words


@pytest.mark.parametrize("query", ["", "   ", "\0", "olcano", "威夏", "hawaii AND NOT", "NEAR(a b)", "zzz"])
def test_finds_nothing(filled: History, query: str) -> None:
    assert filled.search(query) == []


def test_titles_come_first_and_wildcards_are_text(filled: History) -> None:
    (hit,) = filled.search("plans 100%")
    assert (hit.message_id, hit.role) == (None, None)
    assert marked(hit) == ["plans", "100%"]
    assert filled.search("tr_vel") == filled.search("plans%100") == []


def test_newest_first_and_no_more_than_asked(history: History) -> None:
    chat_id = history.create_chat("same")
    ids = [history.add_message(chat_id, None, f"same {number}") for number in range(10)]
    hits = history.search("same", limit=4)
    assert [hit.message_id for hit in hits] == [None, ids[9], ids[8], ids[7]]


def test_edited_and_deleted_text_is_found_no_more(history: History) -> None:
    chat_id = history.create_chat("Chat")
    message_id = history.begin_answer(chat_id, None)
    for text in ("first", "second"):
        history.finish_answer(message_id, text=f"{text} 火山", token_ids=[], finish_reason="stop")
    assert history.search("first") == []
    assert len(history.search("second 火山")) == 1
    history.resume_answer(message_id, "m")
    assert history.search("second") == []
    history.delete_message(message_id)
    assert history.search("火山") == []


@settings(max_examples=150, deadline=None, derandomize=True)
@given(query=st.text(st.one_of(st.sampled_from('"*^:(){}+-_% \0aé火'), st.characters()), max_size=30))
@example(query='"')
@example(query="\ud800")
@example(query="-> \ud800 %")
@example(query='a" OR text:b*')
@example(query="a " * 3000)
def test_a_query_is_only_text(query: str) -> None:
    with History(None) as history:
        history.add_message(history.create_chat("a"), None, "a b é 火")
        for hit in history.search(query):
            assert all(0 <= start < end <= len(hit.snippet) for start, end in hit.spans)


def test_a_message_is_found_by_its_own_words(history: History) -> None:
    texts = ["cafe\u0301 noir", "ﬁnal", "ΑΒΓ σίγμας", "straße", "पढ़ना लिखना", "สวัสดีครับ", "안녕하세요 여러분"]
    chat_id = history.create_chat("Chat")
    for text in texts:
        history.add_message(chat_id, None, text)
    for text in texts:
        assert len(history.search(text)) == 1, text


def test_a_snippet_of_a_long_text() -> None:
    text = "x " * 500 + "needle\nnext line " + "y " * 500
    line, spans = snippet(text, ["needle"])
    assert len(line) < 200
    assert line.startswith("…")
    assert line.endswith("…")
    assert "needle next line" in line
    assert [line[start:end] for start, end in spans] == ["needle"]


def test_words_are_bounded() -> None:
    assert len(query_words("word " * 1000)) == 32
    assert segmented("plain") == "plain"
