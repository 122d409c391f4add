"""Which tabs were open, and what stood in their prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanochat.errors import HistoryError
from nanochat.history import History
from nanochat.history.transfer import MAX_TEXT_LENGTH


def answer(history: History, chat_id: int, parent_id: int | None, text: str) -> int:
    """A finished answer."""
    message_id = history.begin_answer(chat_id, parent_id, "tiny")
    history.finish_answer(message_id, text=text, token_ids=[1, 2], finish_reason="stop")
    return message_id


class TestTabs:
    def test_the_last_sessions_tabs_are_back_in_their_order(self, file: Path) -> None:
        with History(file) as history:
            ids = [history.create_chat(str(number)) for number in range(4)]
            history.save_tabs([ids[0], ids[1], ids[2]])
            history.save_tabs([ids[2], ids[0]], in_view=ids[0])
        with History(file) as history:
            restored = history.restore_tabs()
            assert [(chat.id, chat.is_in_view) for chat in restored] == [(ids[2], False), (ids[0], True)]
            assert [chat.tab_position for chat in history.restore_tabs()] == [0, 1]
            assert history.chat(ids[1]).tab_position is None

    def test_two_sessions_keep_their_own_tabs(self, file: Path) -> None:
        first = History(file)
        mine = first.create_chat("first's")
        first.save_tabs([mine])
        first.flush()
        with History(file) as second:
            assert second.restore_tabs() == []
            other = second.create_chat("second's")
            second.save_tabs([other])
            with pytest.raises(HistoryError, match="open in another nanochat"):
                second.delete_chat(mine)
        first.close()
        with History(file) as third:
            assert [chat.id for chat in third.restore_tabs()] == [mine, other]

    def test_an_answer_of_a_live_session_is_not_interrupted(self, file: Path) -> None:
        first = History(file)
        chat_id = first.create_chat("Chat")
        message_id = first.begin_answer(chat_id, None)
        first.flush()
        with History(file) as second:
            assert second.restore_tabs() == []
            assert second.path(chat_id)[0].state == "streaming"
            first.finish_answer(message_id, text="done", token_ids=[], finish_reason="stop")
            first.close()
            assert second.path(chat_id)[0].state == "complete"


class TestDrafts:
    def test_a_draft_is_back_with_its_tab_and_goes_with_its_empty_chat(self, file: Path) -> None:
        with History(file) as history:
            chat_id = history.create_chat("New chat", system="Be brief.")
            history.drafts.keep(chat_id, "first")
            history.drafts.keep(chat_id, "then \ud800")
            history.save_tabs([chat_id])
        with History(file) as history:
            (chat,) = history.restore_tabs()
            assert (chat.draft, chat.system) == ("then \ufffd", "Be brief.")
            assert history.restore_tabs() == [chat]
            assert history.list_chats() == history.search("New") == history.search("then") == []
            history.drafts.forget(chat_id)
            with pytest.raises(HistoryError, match="no longer in the history"):
                history.chat(chat_id)

    def test_a_chat_with_messages_stays(self, history: History) -> None:
        chat_id = history.create_chat("Chat")
        history.drafts.keep(chat_id, "draft")
        history.add_message(chat_id, None, "Hello")
        assert [chat.id for chat in history.list_chats()] == [chat_id]
        history.drafts.forget(chat_id)
        assert [message.text for message in history.path(chat_id)] == ["Hello"]

    def test_a_deleted_chat_takes_its_draft_along_and_gets_no_other(self, file: Path) -> None:
        problems: list[HistoryError | None] = []
        with History(file, report=problems.append) as history:
            chat_id = history.create_chat("Chat")
            history.drafts.keep(chat_id, "draft")
            history.delete_chat(chat_id)
            history.drafts.keep(chat_id, "draft")
            history.drafts.forget(chat_id)
        with History(file) as history:
            assert history.restore_tabs() == []
        assert problems == []

    def test_sessions_keep_their_own_and_what_dead_ones_left_is_found_without_a_tab(self, file: Path) -> None:
        first = History(file)
        chat_id = first.create_chat("Chat")
        first.add_message(chat_id, None, "Hello")
        first.save_tabs([chat_id])
        first.drafts.keep(chat_id, "first's")
        first.flush()
        with History(file) as second:
            assert second.restore_tabs() == []
            second.save_tabs([chat_id])
            second.drafts.keep(chat_id, "second's")
            second.drafts.forget(chat_id)
            second.save_tabs([])
        with History(file) as third:
            assert third.restore_tabs() == []  # the first still runs
            first.close()
            (chat,) = third.restore_tabs()
            assert chat.draft == "first's"

    def test_as_much_is_kept_as_a_message_may_have(self, history: History) -> None:
        chat_id = history.create_chat("Chat")
        history.drafts.keep(chat_id, "x" * (MAX_TEXT_LENGTH + 1))
        history.save_tabs([chat_id])
        (chat,) = history.restore_tabs()
        assert chat.draft == "x" * MAX_TEXT_LENGTH
