"""Saves the chats while they go on, and brings them back: between the app and its history.

The history is opened on a thread of its own, so that the first paint waits for no disk. Chats that begin
before it is open are saved once it is; where it can't be opened, a history in memory takes its place, and
all else works as before. Changes are queued by the history, reading runs on a thread: nothing here makes
the UI thread wait. Knows nothing of widgets.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from textual.message import Message as TextualMessage

from nanochat.engine.outputs import RequestMetrics, RequestOutput
from nanochat.errors import HistoryError
from nanochat.history import History
from nanochat.ui.chat import Chat, Message
from nanochat.ui.restoring import metrics_of, restored_chat, settings_of

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class HistoryOpened(TextualMessage):
    """The history can be used. ``problem``, a sentence: it is in memory only, or there is none, and why."""

    history: History | None
    tabs: list[Chat]
    """The last session's."""
    in_view: Chat | None
    problem: str | None


@dataclass
class HistoryTroubled(TextualMessage):
    """Saving fails, for the reason that ``problem`` says; or works again, if it is None."""

    problem: str | None


@dataclass(slots=True)
class _Live:
    """What has come of an answer, as the model wrote it."""

    message: Message
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class Archive:
    """One for the app. Its methods are for the UI thread."""

    def __init__(self, file: Path | None, post: Callable[[TextualMessage], object]) -> None:
        """``file`` None: in memory only. ``post`` must be thread-safe."""
        self._file = file
        self._post = post
        self._history: History | None = None
        self._live: dict[int, _Live] = {}
        self._is_stand_in = False
        """Whether the history is one in memory because the file can't be used."""
        self._saved: dict[int, tuple[object, ...]] = {}
        """Settings by the chat's id as they were last saved."""
        self._drafts: dict[int, str] = {}
        """What stands in prompts, by the chat's id, as it was last saved; empty ones are left out."""
        self.model = ""
        """What answers are given by, once that is known."""
        self._is_closing = threading.Event()
        self._opening = threading.Thread(target=self._open, name="nanochat-history-open", daemon=True)

    @property
    def history(self) -> History | None:
        """For reading on a thread; None until it is open."""
        return self._history

    @property
    def is_saving(self) -> bool:
        """Whether chats get to where they should be kept, as far as is known."""
        return not self._is_stand_in and (self._history is None or not self._history.is_failing)

    def open(self) -> None:
        """Begin to open the history; :class:`HistoryOpened` follows."""
        self._opening.start()

    def adopt(self, event: HistoryOpened) -> None:
        """From now on, changes are saved there."""
        self._history, self._is_stand_in = event.history, event.problem is not None
        for chat in event.tabs:
            self.loaded(chat)

    def loaded(self, chat: Chat) -> None:
        """The chat was read from the history, and is open now."""
        self._saved[chat.id] = _settings(chat)
        if chat.draft:
            self._drafts[chat.id] = chat.draft

    def close(self, timeout_s: float) -> str | None:
        """Save what isn't; answers under way count as interrupted. May be called on any thread.

        Returns:
            None; or a sentence if something could not be saved in time.
        """
        self._is_closing.set()
        history, self._history = self._history, None
        if history is None:
            return None
        try:
            history.close(timeout_s)
        except HistoryError as error:
            return str(error)
        return None

    # Changes

    def keep(self, chat: Chat) -> None:
        """Save a chat as it is now. A chat is created when it has its first message or draft."""
        if (message := chat.live) is not None:
            if chat.id not in self._live:
                self._live[chat.id] = live = _Live(message)
                if message.partial is not None:
                    live.texts.append(message.partial.text)
                    live.token_ids += message.partial.token_ids
            if message.store_id is not None:
                self._do(lambda history: history.resume_answer(_id(message), message.model))
        self._do(lambda history: self._keep(history, chat))

    def configure(self, chat: Chat) -> None:
        """Save a chat's title and settings, if they have changed."""
        if chat.store_id is None or self._saved.get(chat.id) == (settings := _settings(chat)):
            return
        self._saved[chat.id] = settings
        self._do(lambda history: history.rename_chat(_id(chat), chat.title))
        self._do(
            lambda history: history.configure_chat(
                _id(chat),
                system=chat.system,
                model=self.model,
                sampling=settings_of(chat),
                dropped_turns=chat.dropped_turns,
            )
        )

    def grew(self, chat_id: int, text: str, token_ids: Sequence[int]) -> None:
        """The chat's live answer has more text, as the model wrote it."""
        if (live := self._live.get(chat_id)) is None:
            return
        live.texts.append(text)
        live.token_ids += token_ids
        if live.message.store_id is not None:
            self._do(lambda history: history.grow_answer(_id(live.message), text, token_ids))

    def ended(self, chat: Chat, message: Message) -> None:
        """An answer has its output."""
        self._live.pop(chat.id, None)
        if message.store_id is not None and message.output is not None:
            output = message.output
            self._do(lambda history: _finish(history, message, output))

    def left(self, chat: Chat) -> None:
        """A tab was closed; an answer under way ends as it stands, and what stands in its prompt is forgotten."""
        self._forget_draft(chat)
        live = self._live.pop(chat.id, None)
        self._saved.pop(chat.id, None)
        if live is not None and live.message.store_id is not None:
            metrics = RequestMetrics(completion_tokens=len(live.token_ids))
            text = "".join(live.texts)
            output = RequestOutput(text, live.token_ids, "cancelled", None, None, metrics)
            self._do(lambda history: _finish(history, live.message, output))

    def withdrew(self, chat: Chat, gone: Message | None) -> None:
        """An answer could not start; ``gone`` is what was taken back with it."""
        self._live.pop(chat.id, None)
        if gone is not None and gone.store_id is not None:
            self._do(lambda history: history.delete_message(_id(gone)))
        elif chat.live is None and (answer := chat.last_answer) is not None and answer.output is not None:
            output = answer.output
            if answer.store_id is not None:
                self._do(lambda history: _finish(history, answer, output))
        self.configure(chat)  # without its first message, it has no title

    def keep_draft(self, chat: Chat, text: str) -> bool:
        """Save what stands in a chat's prompt; whether the chat was created for it, and its tab isn't saved yet.

        Costs next to nothing if it is what was saved last.
        """
        history = self._history
        if history is None or self._drafts.get(chat.id, "") == text:
            return False
        if not text.strip():
            self._forget_draft(chat)
            return False
        self._drafts[chat.id] = text
        is_new = chat.store_id is None
        if is_new:
            self._do(lambda history: self._create(history, chat))
        self._do(lambda history: history.drafts.keep(_id(chat), text))
        return is_new

    def _forget_draft(self, chat: Chat) -> None:
        """A chat without messages is no longer saved then."""
        if self._drafts.pop(chat.id, None) is None or chat.store_id is None:
            return
        self._do(lambda history: history.drafts.forget(_id(chat)))
        if not chat.root.children:
            chat.store_id = None

    def chose(self, message: Message) -> None:
        """The path goes through this message now."""
        if message.store_id is not None:
            self._do(lambda history: history.activate(_id(message)))

    def forked(self, chat: Chat, other: Chat) -> None:
        """``other`` is a fork of ``chat``, and has no answer of its own yet."""
        path = other.path
        originals = chat.path[: len(path)]
        ids = [message.store_id for message in originals if message.store_id is not None]
        if chat.store_id is None or not ids or len(ids) != len(path):
            self.keep(other)
            return

        def fork(history: History) -> None:
            other.store_id, copies = history.fork_chat(_id(chat), ids, other.title)
            for message, store_id in zip(path, copies, strict=True):
                message.store_id = store_id
            if originals[-1] is chat.live and path[-1].output is not None:
                # It was continued; the copy has what has come since, and isn't to have it.
                _finish(history, path[-1], path[-1].output)
            self._saved[other.id] = (other.title, *_settings(chat)[1:])

        self._do(fork)
        self.configure(other)  # it may have been given others

    def cleared(self, chat: Chat) -> None:
        """All its messages were removed."""
        if chat.store_id is not None:
            self._do(lambda history: history.clear_chat(_id(chat)))
            self.configure(chat)

    def delete(self, chat: Chat) -> None:
        """Delete a chat whose tab is closed; if it can't be deleted, :class:`HistoryTroubled` says why."""
        if (chat_id := chat.store_id) is not None:

            def done(result: HistoryError | None) -> None:
                if result is not None:
                    self._post(HistoryTroubled(str(result)))

            self.read(lambda history: history.delete_chat(chat_id), done)

    def save_tabs(self, chats: Sequence[Chat], in_view: Chat) -> None:
        """These are the open tabs, in this order."""
        ids = [chat.store_id for chat in chats if chat.store_id is not None]
        self._do(lambda history: history.save_tabs(ids, in_view.store_id))

    # Reading

    def read(
        self, ask: Callable[[History], T], done: Callable[[T | HistoryError], object] | None = None
    ) -> None:
        """Call ``ask`` on a thread of its own, and then, there too, ``done`` with its result or the error.

        Until the history is open, and once it is closed, ``done`` gets an error at once.
        """
        history = self._history

        def run() -> None:
            result: T | HistoryError
            try:
                if history is None:
                    raise HistoryError("The chat history isn't open yet; try again in a moment.")
                result = ask(history)
            except Exception as error:  # whatever it is, who waits for the result must hear of it
                result = HistoryError(_sentence(error))
            if done is not None:
                done(result)

        threading.Thread(target=run, name="nanochat-history-read", daemon=True).start()

    # Parts

    def _do(self, change: Callable[[History], object]) -> None:
        history = self._history  # once: when a signal ends the app, another thread takes it away
        if history is None:
            return
        try:
            change(history)
        except HistoryError as error:
            self._post(HistoryTroubled(str(error)))

    def _keep(self, history: History, chat: Chat) -> None:
        if chat.store_id is None:
            if not chat.root.children:
                return
            self._create(history, chat)
        elif chat.root.children and chat.root.children[0].store_id is None:
            self._saved.pop(chat.id, None)  # it was created for a draft, perhaps before the model was known
        self.configure(chat)
        added = [message for message in chat.messages() if message.store_id is None]
        for message in added:
            self._add(history, chat, message)
        # Of more than a turn, the newest need not be the chosen one; beside others, the path may have turned
        # off further up.
        if len(added) > 2 or (added and added[0].branch[1] > 1):
            self.chose(chat.path[-1])

    def _create(self, history: History, chat: Chat) -> None:
        chat.store_id = history.create_chat(
            chat.title, system=chat.system, model=self.model, sampling=settings_of(chat)
        )
        self._saved[chat.id] = (*_settings(chat)[:-1], 0)

    def _add(self, history: History, chat: Chat, message: Message) -> None:
        chat_id = _id(chat)
        parent_id = message.parent.store_id if message.parent is not None else None
        if message.role == "user":
            message.store_id = history.add_message(chat_id, parent_id, message.text)
            return
        message.store_id = history.begin_answer(chat_id, parent_id, message.model)
        if message.output is not None:
            _finish(history, message, message.output)
        elif (live := self._live.get(chat.id)) is not None and live.texts:
            history.grow_answer(message.store_id, "".join(live.texts), live.token_ids)

    def _open(self) -> None:
        try:
            opened = self._restored(History(self._file, report=self._report))
        except Exception as error:
            opened = HistoryOpened(_in_memory(), [], None, _sentence(error))
        self._post(opened)
        if self._is_closing.is_set() and opened.history is not None:  # nobody will take it
            opened.history.close()

    def _restored(self, history: History) -> HistoryOpened:
        opened = HistoryOpened(history, [], None, None)
        try:
            for record in history.restore_tabs():
                chat = restored_chat(record, history.tree(record.id))
                opened.tabs.append(chat)
                if record.is_in_view:
                    opened.in_view = chat
        except BaseException:
            with suppress(HistoryError):
                history.close(0)
            raise
        return opened

    def _report(self, problem: HistoryError | None) -> None:
        self._post(HistoryTroubled(None if problem is None else str(problem)))


def _in_memory() -> History | None:
    try:
        return History(None)
    except HistoryError:  # this SQLite lacks what any history needs
        return None


def _sentence(error: Exception) -> str:
    if not isinstance(error, HistoryError):
        logger.error("using the history failed", exc_info=error)
        return f"The chat history can't be used because of an internal error ({type(error).__name__})."
    return str(error)


def _settings(chat: Chat) -> tuple[object, ...]:
    return chat.title, chat.system, settings_of(chat), chat.dropped_turns


def _finish(history: History, message: Message, output: RequestOutput) -> None:
    history.finish_answer(
        _id(message),
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason,
        error=output.error,
        metrics=metrics_of(message, output),
    )


def _id(saved: Chat | Message | None) -> int:
    if saved is None or saved.store_id is None:
        raise HistoryError("This chat isn't saved.")
    return saved.store_id
