"""HTTP connections with limits that uvicorn has not: how many there are, and how long each may keep us waiting.

A client that sends the head of a request for ever, or never reads what it is sent, holds a connection and its
memory; here it loses it.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from nanochat.server.errors import ApiError, invalid
from nanochat.server.wire import to_json

HEAD_S = 10.0
"""From a connection's beginning, or a request's first byte, to the end of the request's head."""
STALL_S = 30.0
"""While anything waits to be taken, a client must take `LEAST_TAKEN` bytes, or all there is, in this time."""
LEAST_TAKEN = 4_096
"""So that a long answer reaches a slow client, and a byte now and then holds no connection."""


class _CountedTransport:
    """A transport that knows how much was written to it: what it holds alone doesn't tell what was taken."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._written += len(data)
        self._transport.write(data)

    @property
    def pending(self) -> int:
        """Bytes that wait here to be taken."""
        return self._transport.get_write_buffer_size()

    @property
    def taken(self) -> int:
        """Bytes that have left this process."""
        return self._written - self.pending


class Connection(H11Protocol):
    """One client's connection."""

    max_connections: ClassVar[int] = 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_since: float | None = None
        """Since when the head of a request is incomplete."""
        self._stalled_since: float | None = None
        """Since when the client has taken less than it must; None while nothing waits for it."""
        self._taken = 0
        """Bytes that it had taken then."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._counted = _CountedTransport(transport)
        super().connection_made(self._counted)  # type: ignore[arg-type]
        self._head_since = time.monotonic()
        if len(self.connections) > self.max_connections:
            self._answer_at_once(ApiError(503, "This server has too many connections; try again later."))

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)
            self._note_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Between requests, the time for keeping a connection counts, until the next one's first byte.
        self._head_since = None

    def send_400_response(self, msg: str) -> None:
        """Instead of uvicorn's, which is plain text."""
        if self.cycle is None or self.cycle.response_complete:
            self._answer_at_once(invalid(msg))
        else:  # another answer is on its way
            self.transport.abort()

    def check(self, now: float) -> None:
        """Drop the connection if its client has kept us waiting too long. Called every second or so."""
        taken = self._counted.taken
        if not self._counted.pending:
            self._stalled_since = None
        elif self._stalled_since is None or taken - self._taken >= LEAST_TAKEN:
            self._stalled_since, self._taken = now, taken
        for since, limit in ((self._head_since, HEAD_S), (self._stalled_since, STALL_S)):
            if since is not None and now - since > limit:
                self.transport.abort()

    def _note_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_since = None
        elif self._head_since is None:
            self._head_since = time.monotonic()

    def _answer_at_once(self, error: ApiError) -> None:
        """Without regard to the state of the protocol, and close."""
        body = to_json(error.body())
        head = (
            f"HTTP/1.1 {error.status} Error\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        with suppress(OSError):
            self.transport.write(head.encode("ascii") + body)
        self.transport.close()
