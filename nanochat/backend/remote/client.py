"""The official client, held to what we want: only our key and few headers go out, and little comes in at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai

from nanochat.backend.remote.config import RemoteConfig

MAX_STREAM_BYTES = 64 * 2**20
"""Of one answer as it comes over the network: about 200,000 tokens, each with what the API puts around it."""
MAX_BODY_BYTES = 4 * 2**20
"""Of anything else: a list of models, an error, a page of metrics."""
MAX_RETRIES = 3
"""Of a request that found no connection, or a server too busy or failing: after about 0.5, 1 and 2 seconds."""
CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 600.0
"""A server may read a long prompt, or let it wait, for this long."""
_TIMEOUT = httpx2.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, write=60.0, pool=60.0)
_LIMITS = httpx2.Limits(max_connections=1000, max_keepalive_connections=20)
_SENT_HEADERS = frozenset(
    {"host", "accept", "connection", "content-type", "content-length", "transfer-encoding", "user-agent"}
)


class TooMuch(Exception):
    """The server sends more than is taken; the message is a sentence's end."""


class GuardedClient(httpx2.AsyncClient):
    """Sends the key it was given and no other, whatever the environment holds; and takes no endless bodies."""

    def __init__(self, key: str | None, **options: Any) -> None:
        """``key`` goes with every request as a bearer's token."""
        super().__init__(**options)
        self._authorization = f"Bearer {key}" if key is not None else None

    async def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        for name in [name for name in request.headers if name.lower() not in _SENT_HEADERS]:
            del request.headers[name]
        # A compressed body may be a million times as large as it looks.
        request.headers["Accept-Encoding"] = "identity"
        if self._authorization is not None:
            request.headers["Authorization"] = self._authorization
        response = await super().send(request, stream=True, **options)
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        # Not the charset that the server names: of Python's, some decode to no text at all, or to a flood of it.
        response.encoding = "utf-8"
        body: Any = response.stream
        response.stream = _Bounded(body, MAX_STREAM_BYTES if is_stream else MAX_BODY_BYTES)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await response.aclose()
            raise TooMuch("sends compressed data, which was not asked for")
        if not stream:
            await response.aread()
        return response


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, body: httpx2.AsyncByteStream, limit: int) -> None:
        self._body, self._limit = body, limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._limit
        async for piece in self._body:
            left -= len(piece)
            if left < 0:
                raise TooMuch(f"sends more than {self._limit / 2**20:.0f} MB in one answer")
            yield piece

    async def aclose(self) -> None:
        await self._body.aclose()


def make_http(config: RemoteConfig, key: str | None) -> GuardedClient:
    """The connections, for one event loop."""
    # A proxy from the environment can't reach a server on this machine; certificates from there count.
    direct = {"http://": None, "https://": None} if config.is_on_this_machine else None
    return GuardedClient(key, timeout=_TIMEOUT, limits=_LIMITS, mounts=direct, follow_redirects=False)


def make_client(config: RemoteConfig, http: GuardedClient) -> openai.AsyncOpenAI:
    """The official client over these connections."""
    return openai.AsyncOpenAI(
        api_key="none",  # the guarded client puts the real one in; not None, which means the environment's
        admin_api_key="",
        base_url=config.base_url,
        max_retries=MAX_RETRIES,
        timeout=_TIMEOUT,
        http_client=http,
    )
