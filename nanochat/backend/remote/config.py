"""Which server to connect with, checked before anything is sent. Imports nothing that is slow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit, urlunsplit

from nanochat.addresses import is_loopback
from nanochat.errors import InvalidOption
from nanochat.sanitize import sanitize_line

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_URL = 2_000
_ENDPOINTS = ("/completions", "/models", "/responses", "/embeddings", "/messages")
"""What clients put behind an API's address themselves."""
_MAX_KEY = 8_192


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """A server of chats.

    Raises:
        InvalidOption: the address can't work, or the key's name isn't one.
    """

    url: str
    """Of the API, such as ``http://localhost:8000/v1``; without a path, ``/v1`` is meant."""
    model: str = ""
    """As the server calls it; empty: the only one that it has."""
    api_key_env: str = ""
    """Environment variable that holds the key; empty: none is sent."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", self.url.strip())
        _check_url(self.url)
        # What isn't a name may be the key itself, by mistake: it must not be repeated in a message.
        if self.api_key_env and not _VARIABLE.fullmatch(self.api_key_env):
            raise InvalidOption(
                "api_key_env must be the name of an environment variable, such as OPENAI_API_KEY, not the key itself."
            )

    @property
    def base_url(self) -> str:
        """The API's address without a slash at its end."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))

    @property
    def metrics_url(self) -> str:
        """Where servers of this kind have their Prometheus page."""
        return self.base_url.removesuffix("/v1") + "/metrics"

    @property
    def place(self) -> str:
        """The address as people say it: ``localhost:8000``."""
        return self.base_url.partition("://")[2].removesuffix("/v1")

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the server is on this machine, so that nothing sent there leaves it."""
        return is_loopback((urlsplit(self.url).hostname or "").rstrip("."))

    def key(self, environment: Mapping[str, str] = os.environ) -> str | None:
        """The API key; None if none is to be sent.

        Raises:
            InvalidOption: it isn't there or can't be one, or would go over the network unencrypted.
        """
        if not self.api_key_env:
            return None
        key = environment.get(self.api_key_env, "").strip()
        if not key:
            raise InvalidOption(
                f"The environment variable {self.api_key_env} is empty or not set; put the key there."
            )
        if len(key) > _MAX_KEY or not (key.isascii() and key.isprintable()) or " " in key:
            raise InvalidOption(
                f"What {self.api_key_env} holds can't be a key: it must be printable ASCII without blanks."
            )
        if not self.is_on_this_machine and urlsplit(self.url).scheme.lower() != "https":
            raise InvalidOption(
                f"The key in {self.api_key_env} would go to {self.place} unencrypted; use an https address, or a tunnel "
                "that ends on this machine (ssh -L, kubectl port-forward)."
            )
        return key


def _check_url(url: str) -> None:
    if not url:
        raise InvalidOption("url is empty; give the server's address, such as http://localhost:8000.")
    parts = _split(url)
    shown = sanitize_line(url, 100)
    with_scheme = _split(f"http://{url}") if "://" not in url and "@" not in url else None
    if with_scheme is not None and with_scheme.hostname:
        raise InvalidOption(f"url must be a whole address. Put http:// before it: http://{shown}")
    if parts is None or parts.scheme.lower() not in ("http", "https") or not parts.hostname:
        shown = shown if "@" not in shown else "what was given"  # it may hold a password
        raise InvalidOption(f"url must be an address such as http://localhost:8000, not {shown}.")
    if parts.username is not None or parts.password is not None:
        raise InvalidOption(
            "url must not hold a name or password; --api-key-env names the variable with the key."
        )
    if parts.query or parts.fragment:
        raise InvalidOption("url must end with its path: nothing after ? or # would reach the server.")
    if parts.path.rstrip("/").endswith(_ENDPOINTS):
        raise InvalidOption(
            "url must be that of the whole API: it ends in /v1 or in nothing, without chat/completions and the like."
        )


def _split(url: str) -> SplitResult | None:
    if len(url) > _MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        return None
    try:
        parts = urlsplit(url)
        _ = parts.port  # checked when it is read
    except ValueError:
        return None
    return parts
