"""Asks the history on a thread of its own, so that no slow disk is felt. Knows nothing of widgets."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from nanochat.errors import HistoryError
from nanochat.history import History

logger = logging.getLogger(__name__)

T = TypeVar("T")


def read(
    history: History | None, ask: Callable[[History], T], done: Callable[[T | HistoryError], object] | None
) -> None:
    """Call ``ask`` on a new thread, and then, there too, ``done`` with its result or the error.

    Without a history, ``done`` gets an error at once.
    """

    def run() -> None:
        result: T | HistoryError
        try:
            if history is None:
                raise HistoryError("The chat history isn't open yet; try again in a moment.")
            result = ask(history)
        except Exception as error:  # whatever it is, who waits for the result must hear of it
            result = HistoryError(sentence(error))
        if done is not None:
            done(result)

    threading.Thread(target=run, name="nanochat-history-read", daemon=True).start()


def sentence(error: Exception) -> str:
    """What went wrong with the history, to be shown; what nobody has foreseen is logged, too."""
    if not isinstance(error, HistoryError):
        logger.error("using the history failed", exc_info=error)
        return f"The chat history can't be used because of an internal error ({type(error).__name__})."
    return str(error)
