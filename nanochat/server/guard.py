"""Who may ask: programs with the key, or without one programs of this machine; never a web page.

A page in a browser can send requests to a server that listens on this machine only. Most of them carry the page's
origin; those that don't are told by ``Sec-Fetch-Site``, and a page whose own name has been made to mean this
machine (DNS rebinding) by the name in ``Host``.
"""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from nanochat.addresses import is_loopback
from nanochat.server.errors import ApiError

OPEN_PATHS = frozenset(("/health",))
"""Answered without a key: a load balancer has none."""


class Guard:
    """An ASGI middleware that answers whoever may not ask."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, any_host: bool) -> None:
        self._app = app
        self._key_digest = None if api_key is None else _digest(api_key.encode("utf-8", errors="replace"))
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._why_refused(scope["path"], Headers(scope=scope))
            if error is not None:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _why_refused(self, path: str, headers: Headers) -> ApiError | None:
        if "origin" in headers or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return _refused("Web pages may not use this server.")
        if not self._any_host and not is_loopback(_host_name(headers.get("host", ""))):
            return _refused(
                "This server answers only requests to this machine's own names, such as localhost."
            )
        if self._key_digest is None or path in OPEN_PATHS:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Digests, so that the time to compare tells nothing of the key, not even its length.
        is_right = hmac.compare_digest(_digest(given.encode("latin-1")), self._key_digest)
        if scheme.lower() == "bearer" and is_right:
            return None
        return ApiError(
            401,
            "This server wants its API key: send the header Authorization: Bearer KEY.",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer", "connection": "close"},
        )


def _host_name(host: str) -> str:
    """``host`` without a port; empty if it is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _refused(message: str) -> ApiError:
    return ApiError(403, message, code="forbidden", headers={"connection": "close"})


def _digest(key: bytes) -> bytes:
    """Of the key without ASCII blanks around it, on both sides alike: no header can carry those."""
    return hashlib.sha256(key.strip()).digest()
