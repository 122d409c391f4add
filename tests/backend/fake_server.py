"""A small server of OpenAI's API that says what a test tells it to, and remembers what it was asked.

Written on bare sockets, so that a test can also break off, stall, or send what no framework would.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


class Reply:
    """Writes an answer to one request."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def raw(self, data: bytes) -> None:
        self._connection.sendall(data)

    def whole(self, status: int, body: Any, kind: str = "application/json", headers: str = "") -> None:
        """A complete answer; what isn't text is sent as JSON."""
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n{headers}"
        self.raw(head.encode() + b"Connection: close\r\n\r\n" + data)

    def begin_stream(self) -> None:
        self.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")

    def event(self, data: Any) -> None:
        """One event of a stream."""
        text = data if isinstance(data, str) else json.dumps(data)
        self.raw(f"data: {text}\n\n".encode())

    def piece(self, content: Any = None, finish: str | None = None, **delta: Any) -> None:
        """A chunk of an answer."""
        delta = delta if content is None else {"content": content, **delta}
        self.event({"id": "1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    def end(self, prompt: int = 20, completion: int = 3, cached: int = 8, finish: str = "stop") -> None:
        """The last chunks of an answer."""
        self.piece(finish=finish)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        self.event({"id": "1", "choices": [], "usage": usage})
        self.event("[DONE]")


Script = Callable[[Asked, Reply], None]


def say(*pieces: str, pause_s: float = 0.0) -> Script:
    """Answer in these pieces."""

    def script(asked: Asked, reply: Reply) -> None:
        reply.begin_stream()
        for piece in pieces:
            reply.piece(piece)
            time.sleep(pause_s)
        reply.end(completion=len(pieces))

    return script


def refuse(status: int, body: Any, headers: str = "") -> Script:
    """Answer with an error."""
    return lambda asked, reply: reply.whole(status, body, headers=headers)


def break_off(*pieces: str) -> Script:
    """Close the connection in mid-answer, as a server that is killed does."""

    def script(asked: Asked, reply: Reply) -> None:
        reply.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            data = (
                f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': piece}}]})}\n\n".encode()
            )
            reply.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    return script


def talk_on(asked: Asked, reply: Reply) -> None:
    """Answer without an end, until the other side hangs up."""
    reply.begin_stream()
    while True:
        reply.piece("word ")
        time.sleep(0.01)


@dataclass
class FakeServer:
    """Serves one model named ``fake``; chats are answered by ``chat``, one script after another."""

    chat: list[Script] = field(default_factory=list)
    """The last one stays."""
    models: Any = field(
        default_factory=lambda: {"object": "list", "data": [{"id": "fake", "max_model_len": 2048}]}
    )
    models_kind: str = "application/json"
    metrics: str | None = None
    metrics_kind: str = "text/plain"
    asked: list[Asked] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)
    """Set when a client has left in mid-answer."""
    port: int = 0
    _listener: socket.socket | None = None
    _open: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, on the port of before if there was one."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def stop(self) -> None:
        """Stop listening and drop every connection, as if killed."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def chats(self) -> list[Any]:
        """The bodies of the requests for chat completions, oldest first."""
        return [asked.body for asked in self.asked if asked.path.endswith("/chat/completions")]

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                asked = _read(connection)
                if asked is not None:
                    self.asked.append(asked)
                    self._answer(asked, Reply(connection))
        except OSError:
            self.hung_up.set()

    def _answer(self, asked: Asked, reply: Reply) -> None:
        if asked.path.endswith("/models") and self.models is not None:
            reply.whole(200, self.models, self.models_kind)
        elif asked.path.endswith("/chat/completions"):
            script = self.chat.pop(0) if len(self.chat) > 1 else self.chat[0]
            script(asked, reply)
        elif asked.path == "/metrics" and self.metrics is not None:
            reply.whole(200, self.metrics, self.metrics_kind)
        else:
            reply.whole(404, {"detail": "Not Found"})


def _read(connection: socket.socket) -> Asked | None:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65_536)
        if not piece:
            return None
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    length = int(headers.get("content-length", 0))
    while len(body) < length:
        body += connection.recv(65_536)
    method, path, _ = first.split(" ")
    return Asked(method, path, headers, json.loads(body) if body else None)


@contextmanager
def fake_server(*chat: Script, **options: Any) -> Iterator[FakeServer]:
    """A running server."""
    server = FakeServer(list(chat) or [say("Hello", " there", ".")], **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()
