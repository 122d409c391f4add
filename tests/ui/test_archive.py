"""What is said around the opening and the end of the history is saved, or the user is told."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from textual.message import Message as TextualMessage

from nanochat.engine.outputs import RequestMetrics, RequestOutput
from nanochat.history import History
from nanochat.history import Message as SavedMessage
from nanochat.ui.archive import Archive, HistoryTroubled
from nanochat.ui.chat import Chat
from nanochat.ui.history_opening import HistoryOpened, Opening
from nanochat.ui.pane_screen import PaneScreen
from tests.ui.driver import WAIT_S, started
from tests.ui.test_history import saved_paths

ANSWER = RequestOutput("answer", [1, 2], "stop", None, None, RequestMetrics(completion_tokens=2))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "history.db"


class Sent:
    """What an archive has sent; nobody takes it."""

    def __init__(self) -> None:
        self.messages: list[TextualMessage] = []
        self.is_opened = threading.Event()

    def __call__(self, message: TextualMessage) -> None:
        self.messages.append(message)
        if isinstance(message, HistoryOpened):
            self.is_opened.set()

    @property
    def opened(self) -> HistoryOpened:
        assert self.is_opened.wait(WAIT_S)
        return next(message for message in self.messages if isinstance(message, HistoryOpened))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, no history opens."""
    event, opens = threading.Event(), Opening._open
    monkeypatch.setattr(Opening, "_open", lambda opening: (event.wait(WAIT_S), opens(opening)))
    yield event
    event.set()


def opened(file: Path | None, sent: Sent) -> Archive:
    archive = Archive(file, sent)
    archive.open()
    archive.adopt(sent.opened)
    return archive


def path_of(file: Path, title: str) -> list[SavedMessage]:
    return saved_paths(file)[title]


class TestBeforeItIsOpen:
    @pytest.mark.parametrize("is_sent", [False, True], ids=["opened while closing", "opened, but not taken"])
    def test_all_is_saved(self, file: Path, gate: threading.Event, is_sent: bool) -> None:
        sent = Sent()
        archive = Archive(file, sent)
        archive.open()
        asked, written, gone, closed = Chat(), Chat(), Chat(), Chat()
        for chat, text in ((asked, "Question"), (gone, "Gone"), (closed, "Closed")):
            chat.ask(text)
            archive.keep(chat)
            archive.grew(chat.id, "begun", [1])
        archive.keep_draft(written, "half a thought")
        for chat in (gone, closed):
            archive.left(chat)
        archive.delete(gone)
        if is_sent:
            gate.set()
            assert sent.opened
        threading.Timer(0.1, gate.set).start()
        assert archive.close(WAIT_S) is None
        assert sorted(saved_paths(file)) == ["Closed", "Question"]
        answers = [path_of(file, title)[1] for title in ("Question", "Closed")]
        assert [(answer.text, answer.state) for answer in answers] == [
            ("begun", "interrupted"),
            ("begun", "complete"),
        ]
        with History(file) as history:
            assert [(chat.title, chat.draft) for chat in history.restore_tabs()] == [
                ("Question", ""),
                ("New chat", "half a thought"),
            ]

    def test_the_last_sessions_tabs_stay(self, file: Path, gate: threading.Event) -> None:
        with History(file) as history:
            old = history.create_chat("Old")
            history.add_message(old, None, "Old")
            history.save_tabs([old], old)
        archive = Archive(file, Sent())
        archive.open()
        archive.keep_draft(Chat(), "new")
        gate.set()
        assert archive.close(WAIT_S) is None
        with History(file) as history:
            assert [(chat.title, chat.draft) for chat in history.restore_tabs()] == [
                ("Old", ""),
                ("New chat", "new"),
            ]

    @pytest.mark.parametrize(("draft", "is_told"), [("half a thought", True), (" ", False)])
    def test_what_is_lost_is_told(self, file: Path, gate: threading.Event, draft: str, is_told: bool) -> None:
        archive = Archive(file, Sent())
        archive.open()
        archive.keep_draft(Chat(), draft)
        problem = archive.close(0.05)
        assert (problem is not None) is is_told
        assert problem is None or "could not be saved. The chat history was not open yet" in problem
        assert archive.close(0.05) is None

    def test_a_file_that_cannot_be_used_is_told_too(self, file: Path) -> None:
        file.mkdir(parents=True)
        archive = Archive(file, Sent())
        archive.open()
        archive.keep_draft(Chat(), "half a thought")
        assert "could not be saved. The chat history" in str(archive.close(WAIT_S))

    async def test_a_question_and_a_draft_of_an_app_that_is_left_at_once(
        self, tiny_llama: Path, file: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("nanochat.ui.app.CLOSE_WAIT_S", WAIT_S)
        async with started(tiny_llama, history=file, hold=True, wait_for_history=False) as driver:
            await driver.say("Important")
            await driver.write("and then")
            await driver.press("ctrl+q")
            await driver.until(lambda: not driver.app.is_running)
            gate.set()
        assert driver.app.unsaved is None
        assert path_of(file, "Important")[0].text == "Important"
        with History(file) as history:
            assert [chat.draft for chat in history.restore_tabs()] == ["and then"]

    async def test_an_app_that_is_left_while_its_tabs_come_back_keeps_them_all(
        self, tiny_llama: Path, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with History(file) as history:
            ids = [history.create_chat(str(number)) for number in range(4)]
            for chat_id in ids:
                history.add_message(chat_id, None, "Question")
            history.save_tabs(ids, ids[1])
        add = PaneScreen._add_panes

        async def add_and_leave(screen: PaneScreen, chats: Sequence[Chat]) -> None:
            await add(screen, chats)
            if len(chats) == len(ids):
                screen.save_tabs()  # as a question asked now does
                assert screen.archive.close(WAIT_S) is None

        monkeypatch.setattr(PaneScreen, "_add_panes", add_and_leave)
        async with started(tiny_llama, history=file, hold=True, wait_for_history=False) as driver:
            await driver.until(lambda: len(driver.app.main_screen.workspace.chats) == 4)
        with History(file) as history:
            assert sorted(chat.title for chat in history.restore_tabs()) == ["0", "1", "2", "3"]


class TestAtTheEnd:
    def test_an_answer_whose_end_the_app_never_took_is_complete(self, file: Path) -> None:
        archive, chat = opened(file, Sent()), Chat()
        chat.ask("Question")
        archive.keep(chat)
        archive.grew(chat.id, ANSWER.text, ANSWER.token_ids)
        archive.came_to_end(chat.id, ANSWER)
        assert archive.close(WAIT_S) is None
        answer = path_of(file, "Question")[1]
        assert (answer.state, answer.text, answer.finish_reason) == ("complete", "answer", "stop")

    def test_a_chat_that_cannot_be_deleted_any_more_is_told(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("nanochat.history.database.BUSY_TIMEOUT_S", 0.05)
        sent = Sent()
        archive, chat = opened(file, sent), Chat()
        chat.ask("Question")
        archive.keep(chat)
        assert archive.history is not None
        archive.history.flush()
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            archive.left(chat)
            archive.delete(chat)
            problem = archive.close(1.0)
        assert "could not be saved" in str(problem)
        assert "another program has locked" in str(problem)

    @pytest.mark.parametrize("is_heard", [False, True])
    def test_a_refusal_that_the_app_never_took_is_told(self, file: Path, is_heard: bool) -> None:
        with History(file) as other:
            chat_id = other.create_chat("Theirs")
            other.save_tabs([chat_id])
            other.flush()
            sent = Sent()
            archive = opened(file, sent)
            archive.delete(Chat(store_id=chat_id))
            assert archive.history is not None
            archive.history.flush()
            if is_heard:
                archive.heard(next(told for told in sent.messages if isinstance(told, HistoryTroubled)))
            problem = archive.close(WAIT_S)
        assert problem == (
            None if is_heard else "This chat is open in another nanochat; close it there, then delete it."
        )


def test_an_answer_that_is_withdrawn_leaves_the_path_where_it_was(file: Path) -> None:
    archive, chat = opened(file, Sent()), Chat()
    for number in range(2):
        chat.ask("Question") if number == 0 else chat.begin_answer(chat.path[0])
        archive.keep(chat)
        message = chat.live
        assert message is not None
        chat.end_answer(RequestOutput(f"answer {number}", [1], "stop", None, None, RequestMetrics()))
        archive.ended(chat, message)
    chat.choose_branch(chat.path[1], -1)
    archive.chose(chat.path[1])
    chat.begin_answer(chat.path[0])
    archive.keep(chat)
    archive.withdrew(chat, chat.withdraw()[1])
    assert archive.close(WAIT_S) is None
    assert [message.text for message in path_of(file, "Question")] == ["Question", "answer 0"]


def test_turns_left_out_are_left_out_after_the_next_start_and_in_a_fork(file: Path) -> None:
    archive, chat = opened(file, Sent()), Chat()
    for number in range(3):
        message = chat.ask(f"q{number}")
        archive.keep(chat)
        chat.end_answer(ANSWER)
        archive.ended(chat, message)
    chat.leave_out(1)
    archive.configure(chat)
    fork = chat.fork()
    archive.forked(chat, fork)
    fork.leave_out(1)
    archive.configure(fork)
    archive.save_tabs([chat, fork], chat)
    assert archive.close(WAIT_S) is None
    sent = Sent()
    archive = opened(file, sent)
    contexts = [[message.text for message in tab.context[::2]] for tab in sent.opened.tabs]
    assert contexts == [["q1", "q2"], ["q2"]]
    assert archive.close(WAIT_S) is None
