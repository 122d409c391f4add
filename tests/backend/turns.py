"""Turns as a chat makes them."""

from __future__ import annotations

from typing import Any

from nanochat.backend.interface import Turn
from nanochat.engine.outputs import RequestMetrics, RequestOutput
from nanochat.ui.chat import Chat


def chat_of(*texts: str) -> Chat:
    """A chat in which these were said in turn, the last by the user."""
    chat = Chat()
    for question, answer in zip(texts[::2], texts[1::2], strict=False):
        chat.ask(question)
        chat.end_answer(RequestOutput(answer, [], "stop", None, None, RequestMetrics()))
    chat.ask(texts[-1])
    return chat


def turn_of(
    *texts: str, system: str | None = None, sampling: dict[str, Any] | None = None, **options: Any
) -> Turn:
    """The turn that follows from it."""
    chat = chat_of(*texts)
    messages = tuple(message for message in chat.context if message is not chat.live)
    return Turn(chat.id, system, chat.started, messages, sampling or {}, **options)
