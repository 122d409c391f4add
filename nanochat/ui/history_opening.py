"""Opens the history on a thread of its own, and hands it over once: to the app, or to who ends the app before that.

Knows nothing of widgets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from textual.message import Message as TextualMessage

from nanochat.errors import HistoryError
from nanochat.history import History
from nanochat.ui.chat import Chat
from nanochat.ui.history_reading import sentence
from nanochat.ui.restoring import restored_chat


@dataclass
class HistoryOpened(TextualMessage):
    """The history can be used. ``problem``, a sentence: it is in memory only, or there is none, and why."""

    history: History | None
    tabs: list[Chat]
    """The last session's."""
    in_view: Chat | None
    problem: str | None


class Opening:
    """The one time that the history is opened."""

    def __init__(
        self,
        file: Path | None,
        report: Callable[[HistoryError | None], None],
        post: Callable[[TextualMessage], object],
    ) -> None:
        """``report`` is given to the :class:`History`; ``post``, which must be thread-safe, :class:`HistoryOpened`."""
        self._file = file
        self._report = report
        self._post = post
        self._lock = threading.Lock()
        self._opened: HistoryOpened | None = None
        self._is_given_up = False
        self._thread = threading.Thread(target=self._open, name="nanochat-history-open", daemon=True)

    def begin(self) -> None:
        """Open it; :class:`HistoryOpened` follows."""
        self._thread.start()

    def take(self, timeout_s: float) -> HistoryOpened | None:
        """What has come of it, after waiting for so long at most; None if nothing has.

        What is opened later is closed at once.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        with self._lock:
            self._is_given_up = True
            return self._opened

    def _open(self) -> None:
        try:
            opened = _restored(History(self._file, report=self._report))
        except Exception as error:
            opened = HistoryOpened(_in_memory(), [], None, sentence(error))
        with self._lock:
            is_given_up = self._is_given_up
            if not is_given_up:
                self._opened = opened
        if not is_given_up:
            self._post(opened)
        elif opened.history is not None:
            with suppress(HistoryError):  # nothing was to be saved in it
                opened.history.close()


def _restored(history: History) -> HistoryOpened:
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


def _in_memory() -> History | None:
    try:
        return History(None)
    except HistoryError:  # this SQLite lacks what any history needs
        return None
