"""Errors a user can cause. Each message is one sentence or two that say what to do.

Commands print the message alone and exit with status 1, or 2 for :class:`WrongUsage`; the app shows it in
the chat it concerns.
"""

from __future__ import annotations


class NanochatError(Exception):
    """Base of every error whose message is meant for the person at the keyboard."""


class InvalidOption(NanochatError, ValueError):
    """An option or parameter has a value that can't work."""


class WrongUsage(InvalidOption):
    """The command line itself holds the mistake, whatever model, files and settings there are."""


class ModelNotFound(NanochatError):
    """The model named by the user isn't there, or isn't complete."""


class UnsupportedModel(NanochatError):
    """The model's architecture, tensor types or tokenizer can't be run."""


class PromptTooLong(NanochatError):
    """The prompt can never run; the message states its length and the limit."""


class NotEnoughMemory(NanochatError):
    """The model or its cache doesn't fit; the message states what would."""


class EngineClosed(NanochatError):
    """The engine was closed, or its step thread has died; the message says which."""


class RankLost(NanochatError):
    """One of the processes that a model is divided among has died or hangs; the message says which."""


class DeviceLost(NanochatError):
    """A GPU has failed in such a way that this process can't use it any more; the message says how."""


class HistoryError(NanochatError):
    """The chat history can't be opened, read or written; the message says why and what helps."""


def install_hint(extra: str) -> str:
    """How to add an optional extra, as a sentence's end. From the folder: PyPI's nanochat is another project."""
    return f"add it in nanochat's own folder with .venv/bin/pip install -e '.[{extra}]'."


def has_long_number(error: Exception) -> bool:
    """Whether a text was refused for a number of too many digits: Python's words for it are advice for programmers."""
    return "set_int_max_str_digits" in str(error)


def one_line(error: BaseException, limit: int = 200) -> str:
    """An error's own words, fit for a terminal: printable, on one line, of at most ``limit`` characters."""
    return "".join(filter(str.isprintable, " ".join(str(error).split())))[:limit]


def reason_of(error: BaseException) -> str:
    """The same within a sentence of ours, so without a full stop; its type where it has no words."""
    return one_line(error, 300).rstrip(".") or type(error).__name__
