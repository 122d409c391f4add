"""Saves the chats while they go on, and brings them back: between the app and its history.

The history is opened on a thread of its own, so that the first paint waits for no disk. Chats that begin
before it is open are saved once it is; where it can't be opened, a history in memory takes its place, and
all else works as before. Changes are queued by the history, reading runs on a thread: nothing here makes
the UI thread wait. Knows nothing of widgets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from textual.message import Message as TextualMessage

from nanochat.engine.outputs import RequestMetrics, RequestOutput
from nanochat.errors import HistoryError
from nanochat.history import History
from nanochat.ui import history_reading
from nanochat.ui.chat import Chat, Message
from nanochat.ui.early import EarlyChats
from nanochat.ui.history_opening import HistoryOpened, Opening
from nanochat.ui.restoring import metrics_of, settings_of

T = TypeVar("T")


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
    output: RequestOutput | None = None
    """Its end, once that has come from the backend; the app may not have taken it yet."""


class Archive:
    """One for the app. Its methods are for the UI thread."""

    def __init__(self, file: Path | None, post: Callable[[TextualMessage], object]) -> None:
        """``file`` None: in memory only. ``post`` must be thread-safe."""
        self._post = post
        self._history: History | None = None
        self._live: dict[int, _Live] = {}
        self._early = EarlyChats()
        self._unheard: list[str] = []
        """Problems that the app has been sent and not taken yet."""
        self._is_stand_in = False
        """Whether the history is one in memory because the file can't be used."""
        self._saved: dict[int, tuple[object, ...]] = {}
        """Settings by the chat's id as they were last saved."""
        self._drafts: dict[int, str] = {}
        """What stands in prompts, by the chat's id, as it was last saved; empty ones are left out."""
        self.model = ""
        """What answers are given by, once that is known."""
        self._lock = threading.Lock()
        """Held while the history comes and while it goes."""
        self._is_closed = False
        self._opening = Opening(file, self._report, post)

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
        self._opening.begin()

    def adopt(self, event: HistoryOpened) -> None:
        """From now on, changes are saved there; first, what has been said and written meanwhile."""
        with self._lock:
            if self._is_closed:
                return
            self._take_over(event)
            self._save_early()

    def _take_over(self, event: HistoryOpened) -> None:
        self._history, self._is_stand_in = event.history, event.problem is not None
        for chat in event.tabs:
            self.loaded(chat)

    def _save_early(self) -> list[Chat]:
        """Returns the chats that have a tab."""
        early = self._early.take()
        for one in early:
            self.keep(one.chat)
            if one.is_open:
                self.keep_draft(one.chat, one.draft)
        return [one.chat for one in early if one.is_open]

    def heard(self, event: HistoryTroubled) -> None:
        """The app has taken it, and tells the user."""
        with suppress(ValueError):  # it has ended meanwhile
            self._unheard.remove(event.problem or "")

    def loaded(self, chat: Chat) -> None:
        """The chat was read from the history, and is open now."""
        self._saved[chat.id] = _settings(chat)
        if chat.draft:
            self._drafts[chat.id] = chat.draft

    def close(self, timeout_s: float) -> str | None:
        """Save what isn't; answers under way count as interrupted. May be called on any thread.

        Returns:
            None; or a sentence if something could not be saved in time, or a problem has come that the app never
            took.
        """
        end_s = time.monotonic() + timeout_s
        with self._lock:
            if self._is_closed:
                return None
            self._is_closed = True
            problem = None if self._history is not None else self._adopt_late(timeout_s)
            for live in self._live.values():
                if live.output is not None:
                    self._end(live, live.output)
            history, self._history = self._history, None
        try:
            if history is not None:
                history.close(max(0.0, end_s - time.monotonic()))
        except HistoryError as error:
            problem = problem or str(error)
        said = [problem] if problem is not None else []
        said += [told for told in dict.fromkeys(self._unheard) if problem is None or told not in problem]
        return " ".join(said) or None

    def _adopt_late(self, timeout_s: float) -> str | None:
        """The app ends before it could take the history: save what there is; a sentence if that is lost."""
        have_text = self._early.have_text
        opened = self._opening.take(timeout_s)
        if opened is not None and opened.problem is None:
            for live in self._live.values():  # not begun in the history yet, so it is saved as a whole
                live.message.output = live.output
            self._take_over(opened)
            if chats := self._save_early():
                self.save_tabs([*opened.tabs, *chats], opened.in_view or chats[0])
            return None
        why = "The chat history was not open yet." if opened is None else opened.problem
        return f"Your chats could not be saved. {why}" if have_text else None

    # Changes

    def keep(self, chat: Chat) -> None:
        """Save a chat as it is now. A chat is created when it has its first message or draft."""
        if (message := chat.live) is not None and message.output is None:
            if chat.id not in self._live:
                self._live[chat.id] = live = _Live(message)
                if message.partial is not None:
                    live.texts.append(message.partial.text)
                    live.token_ids += message.partial.token_ids
            if message.store_id is not None:
                self._do(lambda history: history.resume_answer(_id(message), message.model))
        if self._history is None:
            self._early.said(chat)
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
                left_out_id=chat.left_out.store_id if chat.left_out is not None else None,
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

    def came_to_end(self, chat_id: int, output: RequestOutput) -> None:
        """The chat's live answer is complete; the app will take its end, unless it ends before that."""
        if (live := self._live.get(chat_id)) is not None:
            live.output = output

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
        if live is not None:
            metrics = RequestMetrics(completion_tokens=len(live.token_ids))
            so_far = RequestOutput("".join(live.texts), live.token_ids, "cancelled", None, None, metrics)
            self._end(live, live.output or so_far)
        self._early.left(chat)

    def _end(self, live: _Live, output: RequestOutput) -> None:
        """An answer ends that no tab shows any more."""
        if live.message.store_id is not None:
            self._do(lambda history: _finish(history, live.message, output))
        else:
            live.message.output = output

    def withdrew(self, chat: Chat, gone: Message | None) -> None:
        """An answer could not start; ``gone`` is what was taken back with it."""
        self._live.pop(chat.id, None)
        if gone is not None and gone.store_id is not None:
            self._do(lambda history: history.delete_message(_id(gone)))
            if path := chat.path:
                self.chose(path[-1])
        elif chat.live is None and (answer := chat.last_answer) is not None and answer.output is not None:
            output = answer.output
            if answer.store_id is not None:
                self._do(lambda history: _finish(history, answer, output))
        self.configure(chat)  # without its first message, it has no title

    def keep_draft(self, chat: Chat, text: str) -> bool:
        """Save what stands in a chat's prompt; whether the chat was created for it, and its tab isn't saved yet.

        Costs next to nothing if it is what was saved last.
        """
        if self._history is None:
            self._early.wrote(chat, text)
            return False
        if self._drafts.get(chat.id, "") == text:
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
            self._saved[other.id] = (other.title, *_settings(chat)[1:-1], _settings(other)[-1])

        self._do(fork)
        self.configure(other)  # it may have been given others

    def cleared(self, chat: Chat) -> None:
        """All its messages were removed."""
        if chat.store_id is not None:
            self._do(lambda history: history.clear_chat(_id(chat)))
            self.configure(chat)

    def delete(self, chat: Chat) -> None:
        """Delete a chat whose tab is closed; if it can't be deleted, :class:`HistoryTroubled` says why."""
        self._early.delete(chat)
        if (chat_id := chat.store_id) is not None:
            self._do(lambda history: history.delete_chat(chat_id, wait=False))

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
        history_reading.read(self._history, ask, done)

    # Parts

    def _do(self, change: Callable[[History], object]) -> None:
        history = self._history  # once: when a signal ends the app, another thread takes it away
        if history is None:
            return
        try:
            change(history)
        except HistoryError as error:
            self._report(error)

    def _keep(self, history: History, chat: Chat) -> None:
        if chat.store_id is None:
            if not chat.root.children:
                return
            self._create(history, chat)
        elif chat.root.children and chat.root.children[0].store_id is None:
            self._saved.pop(chat.id, None)  # it was created for a draft, perhaps before the model was known
        added = [message for message in chat.messages() if message.store_id is None]
        for message in added:
            self._add(history, chat, message)
        # Of more than a turn, the newest need not be the chosen one; beside others, the path may have turned
        # off further up.
        if len(added) > 2 or (added and added[0].branch[1] > 1):
            self.chose(chat.path[-1])
        self.configure(chat)  # last: it may name a message

    def _create(self, history: History, chat: Chat) -> None:
        chat.store_id = history.create_chat(
            chat.title, system=chat.system, model=self.model, sampling=settings_of(chat)
        )
        self._saved[chat.id] = (*_settings(chat)[:-1], None)

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

    def _report(self, problem: HistoryError | None) -> None:
        if problem is None:
            self._unheard.clear()
        else:
            self._unheard.append(str(problem))
        self._post(HistoryTroubled(None if problem is None else str(problem)))


def _settings(chat: Chat) -> tuple[object, ...]:
    return chat.title, chat.system, settings_of(chat), chat.left_out.store_id if chat.left_out else None


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
