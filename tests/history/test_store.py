"""Chats, the tree of their messages, and streaming."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.errors import HistoryError
from nanochat.history import Chat, History, Message, default_history_file


def texts(messages: list[Message]) -> list[str]:
    return [message.text for message in messages]


def answer(history: History, chat_id: int, parent_id: int | None, text: str) -> int:
    """A finished answer."""
    message_id = history.begin_answer(chat_id, parent_id, "tiny")
    history.finish_answer(message_id, text=text, token_ids=[1, 2], finish_reason="stop")
    return message_id


class TestChats:
    def test_a_chat_comes_back_as_it_was_made(self, file: Path) -> None:
        with History(file) as history:
            chat_id = history.create_chat(
                "Hawaii", system="Be brief.", model="tiny", sampling={"temperature": 0.2, "stop": ("a", "b")}
            )
            made = history.chat(chat_id)
        with History(file) as history:
            assert history.chat(chat_id) == made
        assert (made.title, made.system, made.model) == ("Hawaii", "Be brief.", "tiny")
        assert made.sampling == {"temperature": 0.2, "stop": ["a", "b"]}
        assert made.created_at == made.updated_at > 1.7e9

    def test_renaming_and_configuring(self, history: History) -> None:
        chat_id = history.create_chat("One", system="Old", sampling={"top_k": 3})
        history.rename_chat(chat_id, "Two")
        history.configure_chat(chat_id, system=None, model="m", sampling={"seed": 1}, left_out_id=2)
        chat = history.chat(chat_id)
        assert (chat.title, chat.system, chat.model, chat.left_out_id) == ("Two", None, "m", 2)
        assert chat.sampling == {"seed": 1}

    def test_last_used_first_page_by_page(self, history: History) -> None:
        ids = [history.create_chat(str(number)) for number in range(25)]
        history.add_message(ids[3], None, "Hello")
        listed: list[Chat] = []
        while page := history.list_chats(limit=10, after=listed[-1] if listed else None):
            listed += page
        assert [chat.id for chat in listed] == [ids[3], *reversed([i for i in ids if i != ids[3]])]

    def test_deleting_takes_its_messages_and_no_others(self, history: History) -> None:
        gone, kept = history.create_chat("gone"), history.create_chat("kept")
        for chat_id in (gone, kept):
            history.add_message(chat_id, None, "findme")
        history.delete_chat(gone)
        assert [chat.id for chat in history.list_chats()] == [kept]
        assert [hit.chat_id for hit in history.search("findme")] == [kept]
        with pytest.raises(HistoryError, match="no longer in the history"):
            history.path(gone)
        with pytest.raises(HistoryError, match="no longer in the history"):
            history.chat(gone)

    def test_clearing_keeps_the_chat(self, history: History) -> None:
        chat_id = history.create_chat("Chat")
        history.add_message(chat_id, None, "findme")
        history.clear_chat(chat_id)
        assert history.tree(chat_id) == []
        assert history.search("findme") == []
        assert history.chat(chat_id).title == "Chat"

    def test_a_chat_deeper_than_sqlite_nests_actions_can_be_deleted(self, history: History) -> None:
        chat_id, end = history.create_chat("long"), None
        for number in range(2_500):
            end = history.add_message(chat_id, end, str(number))
        path = history.path(chat_id)
        assert texts(path) == [str(number) for number in range(2_500)]
        history.delete_message(path[1].id)
        assert texts(history.path(chat_id)) == ["0"]
        history.delete_chat(chat_id)
        assert history.list_chats() == []


class TestTree:
    def test_another_answer_is_a_branch_and_nothing_is_lost(self, history: History) -> None:
        chat_id = history.create_chat("Chat")
        question = history.add_message(chat_id, None, "Q")
        first = answer(history, chat_id, question, "A1")
        follow_up = history.add_message(chat_id, first, "Q2")
        second = answer(history, chat_id, question, "A2")
        assert texts(history.path(chat_id)) == ["Q", "A2"]
        assert history.path(chat_id)[1].branch == (2, 2)
        history.activate(first)
        assert texts(history.path(chat_id)) == ["Q", "A1", "Q2"]
        assert history.path(chat_id)[1].branch == (1, 2)
        assert history.siblings(second) == [first, second]
        assert history.siblings(follow_up) == [follow_up]

    def test_an_edited_first_question_is_a_branch(self, history: History) -> None:
        chat_id = history.create_chat("Chat")
        first = history.add_message(chat_id, None, "Q")
        second = history.add_message(chat_id, None, "Q edited")
        assert texts(history.path(chat_id)) == ["Q edited"]
        assert history.siblings(first) == [first, second]
        history.activate(first)
        assert texts(history.path(chat_id)) == ["Q"]

    def test_walking_away_and_back_finds_the_branch_below(self, history: History) -> None:
        chat_id = history.create_chat("Chat")
        question = history.add_message(chat_id, None, "Q")
        first = answer(history, chat_id, question, "A1")
        inner = history.add_message(chat_id, first, "inner 1")
        history.add_message(chat_id, first, "inner 2")
        history.activate(inner)
        second = answer(history, chat_id, question, "A2")
        history.activate(second)
        history.activate(first)
        assert texts(history.path(chat_id)) == ["Q", "A1", "inner 1"]

    def test_activating_a_hidden_message_opens_the_way_to_it(self, history: History) -> None:
        chat_id = history.create_chat("Chat")
        root = history.add_message(chat_id, None, "Q")
        old = answer(history, chat_id, root, "A1")
        hidden = history.add_message(chat_id, old, "hidden")
        history.add_message(chat_id, None, "another start")
        history.activate(hidden)
        assert texts(history.path(chat_id)) == ["Q", "A1", "hidden"]

    def test_deleting_the_active_branch_falls_back_to_the_newest(self, history: History) -> None:
        chat_id = history.create_chat("Chat")
        question = history.add_message(chat_id, None, "Q")
        for text in ("A1", "A2", "A3"):
            last = answer(history, chat_id, question, text)
        history.delete_message(last)
        assert texts(history.path(chat_id)) == ["Q", "A2"]

    def test_a_parent_of_another_chat_is_refused(self, file: Path) -> None:
        problems: list[HistoryError | None] = []
        with History(file, report=problems.append) as history:
            one, two = history.create_chat("one"), history.create_chat("two")
            foreign = history.add_message(one, None, "Q")
            history.add_message(two, foreign, "mixed")
            history.add_message(two, None, "fine")
            assert texts(history.tree(two)) == ["fine"]
            assert texts(history.tree(one)) == ["Q"]
        assert len(problems) == 1
        assert "was deleted in another window" in str(problems[0])

    def test_forking_copies_the_path_and_leaves_the_original(self, history: History) -> None:
        chat_id = history.create_chat("Chat", system="S", sampling={"top_k": 1})
        question = history.add_message(chat_id, None, "Q")
        answer(history, chat_id, question, "A1")
        second = answer(history, chat_id, question, "A2")
        fork_id, copies = history.fork_chat(chat_id, [question, second], "Fork")
        history.add_message(fork_id, copies[-1], "only in the fork")
        assert texts(history.path(fork_id)) == ["Q", "A2", "only in the fork"]
        assert [message.id for message in history.path(fork_id)[:2]] == copies
        assert history.path(fork_id)[1].token_ids == (1, 2)
        assert len(history.tree(chat_id)) == 3
        fork = history.chat(fork_id)
        assert (fork.title, fork.system, fork.sampling) == ("Fork", "S", {"top_k": 1})

    def test_a_fork_of_a_streaming_answer_is_interrupted(self, history: History) -> None:
        chat_id = history.create_chat("Chat")
        message_id = history.begin_answer(chat_id, None)
        history.grow_answer(message_id, "so far")
        fork_id, _ = history.fork_chat(chat_id, [message_id], "Fork")
        (copy,) = history.path(fork_id)
        assert (copy.state, copy.text) == ("interrupted", "so far")
        assert [hit.chat_id for hit in history.search("so far")] == [fork_id]
        assert history.path(chat_id)[0].state == "streaming"

    def test_a_fork_is_made_whole_or_not_at_all(self, history: History) -> None:
        chat_id = history.create_chat("Chat")
        message_id = history.add_message(chat_id, None, "Q")
        history.fork_chat(chat_id, [message_id, 123], "Fork")
        assert [chat.title for chat in history.list_chats()] == ["Chat"]
        assert len(history.search("Q")) == 1

    def test_forking_an_empty_chat(self, history: History) -> None:
        fork_id, copies = history.fork_chat(history.create_chat("Chat"), [], "Fork")
        assert copies == []
        assert history.path(fork_id) == []


class TestStreaming:
    def test_an_answer_grows_and_ends(self, history: History) -> None:
        chat_id = history.create_chat("Chat")
        question = history.add_message(chat_id, None, "Q")
        message_id = history.begin_answer(chat_id, question, "tiny")
        for number in range(100):
            history.grow_answer(message_id, f"{number} ", [number])
        growing = history.path(chat_id)[1]
        assert growing.text == "".join(f"{number} " for number in range(100))
        assert (growing.state, growing.token_ids) == ("streaming", tuple(range(100)))
        assert history.search("99") == []
        metrics = {"ttft_s": 0.04, "decode_tok_s": math.inf, "prompt_tokens": 7}
        history.finish_answer(
            message_id, text="the end", token_ids=[2**32 - 1, 0], finish_reason="length", metrics=metrics
        )
        ended = history.path(chat_id)[1]
        assert (ended.state, ended.finish_reason, ended.model) == ("complete", "length", "tiny")
        assert (ended.text, ended.token_ids) == ("the end", (2**32 - 1, 0))
        assert ended.metrics == {"ttft_s": 0.04, "decode_tok_s": None, "prompt_tokens": 7}
        assert ended.finished_at is not None
        assert [hit.message_id for hit in history.search("the end")] == [message_id]

    def test_a_failed_answer_keeps_its_text_and_its_sentence(self, history: History) -> None:
        chat_id = history.create_chat("Chat")
        message_id = history.begin_answer(chat_id, None)
        history.finish_answer(
            message_id, text="half", token_ids=[1], finish_reason="error", error="Out of memory."
        )
        message = history.path(chat_id)[0]
        assert (message.state, message.error, message.text) == ("error", "Out of memory.", "half")

    def test_closing_marks_what_still_streams(self, file: Path) -> None:
        with History(file) as history:
            chat_id = history.create_chat("Chat")
            message_id = history.begin_answer(chat_id, None)
            history.grow_answer(message_id, "half a sent", [5, 6])
        with History(file) as history:
            message = history.path(chat_id)[0]
            assert (message.state, message.text, message.token_ids) == ("interrupted", "half a sent", (5, 6))
            assert [hit.message_id for hit in history.search("half")] == [message_id]
            history.resume_answer(message_id, "m")
            history.grow_answer(message_id, "ence", [7])
            message = history.path(chat_id)[0]
            assert (message.state, message.text, message.token_ids) == (
                "streaming",
                "half a sentence",
                (5, 6, 7),
            )

    def test_growth_before_an_end_never_follows_a_resumption(self, file: Path) -> None:
        with History(file, save_interval_s=60) as history:
            chat_id = history.create_chat("Chat")
            message_id = history.begin_answer(chat_id, None)
            history.grow_answer(message_id, "first ", [1])
            history.finish_answer(message_id, text="whole ", token_ids=[1, 2], finish_reason="cancelled")
            history.grow_answer(message_id, "too late ", [8])
            history.resume_answer(message_id, "m")
            history.grow_answer(message_id, "more", [3])
            assert history.path(chat_id)[0].text == "whole more"
            assert history.path(chat_id)[0].token_ids == (1, 2, 3)

    def test_many_threads_may_write(self, history: History) -> None:
        chat_id = history.create_chat("Chat")

        def stream(name: str) -> None:
            for number in range(20):
                message_id = history.begin_answer(chat_id, None)
                for _ in range(10):
                    history.grow_answer(message_id, name, [number])
                if number % 2:
                    history.finish_answer(message_id, text=name * 10, token_ids=(), finish_reason="stop")

        threads = [threading.Thread(target=stream, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        messages = history.tree(chat_id)
        assert sorted(texts(messages)) == sorted([name * 10 for name in "abcd"] * 20)


class TestValues:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(text=st.text(st.one_of(st.characters(), st.characters(categories=["Cs"])), max_size=60))
    def test_any_text_is_stored(self, text: str) -> None:
        safe = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        with History(None) as history:
            chat_id = history.create_chat(text, system=text, sampling={"stop": [text]})
            message_id = history.begin_answer(chat_id, history.add_message(chat_id, None, text))
            history.grow_answer(message_id, text)
            history.search(text)
            messages = history.path(chat_id)
            stored = [history.chat(chat_id).title, *texts(messages)]
        assert [len(one) for one in stored] == [len(text)] * 3
        if safe == text:
            assert stored == [text] * 3

    def test_nul_is_kept_and_lone_surrogates_are_replaced(self, history: History) -> None:
        chat_id = history.create_chat("a\0b\ud800")
        history.add_message(chat_id, None, "before\0after \udfff end")
        assert history.chat(chat_id).title == "a\0b\ufffd"
        assert texts(history.path(chat_id)) == ["before\0after \ufffd end"]
        assert len(history.search("after")) == len(history.search("end")) == 1

    def test_in_memory_nothing_touches_the_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with History(None) as history:
            chat_id = history.create_chat("Chat")
            history.add_message(chat_id, None, "Hello")
            history.save_tabs([chat_id])
            assert [chat.id for chat in history.restore_tabs()] == [chat_id]
            assert texts(history.path(chat_id)) == ["Hello"]
        assert list(tmp_path.iterdir()) == []

    def test_where_the_file_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NANOCHAT_DATA_DIR", str(tmp_path))
        assert default_history_file() == tmp_path / "history.db"
        monkeypatch.setenv("NANOCHAT_DATA_DIR", "~nobody-of-that-name/chats")
        assert default_history_file() == Path("~nobody-of-that-name/chats/history.db")
        monkeypatch.delenv("NANOCHAT_DATA_DIR")
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
        assert default_history_file().name == "history.db"
        assert default_history_file().parent.name == "nanochat"
        assert not (tmp_path / "share").exists()
