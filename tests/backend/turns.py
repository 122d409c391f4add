"""Turns as a chat makes them, and what a server makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from nanochat.backend.interface import Turn
from nanochat.backend.opening import open_backend
from nanochat.backend.remote.backend import RemoteBackend
from nanochat.backend.remote.config import RemoteConfig
from nanochat.engine.outputs import RequestMetrics, RequestOutput
from nanochat.errors import NanochatError
from nanochat.ui.chat import Chat
from tests.backend.fake_server import FakeServer


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


def connect(server: FakeServer, **options: Any) -> RemoteBackend:
    """An open connection; the caller closes it."""
    opened = open_backend(RemoteConfig(url=server.url, **options))
    assert isinstance(opened, RemoteBackend)
    return opened


def answer(backend: RemoteBackend, *texts: str, **options: Any) -> RequestOutput:
    """The whole answer to a turn."""
    return backend.start(turn_of(*(texts or ("Hi",)), **options)).handle.result(30)


def refusal(backend: RemoteBackend, *texts: str, **options: Any) -> NanochatError:
    """Why a turn is refused, in a sentence fit to be shown."""
    with pytest.raises(NanochatError) as caught:
        answer(backend, *texts, **options)
    message = str(caught.value)
    assert message.endswith((".", "?"))
    assert "\n" not in message
    assert len(message) < 600
    return caught.value
