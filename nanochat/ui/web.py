"""The app in a browser, through textual-serve: an optional extra. Each visitor gets a process of their own."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from types import ModuleType

from nanochat.errors import NanochatError, WrongUsage, install_hint

DEFAULT_ADDRESS = "localhost:8000"


def is_in_browser() -> bool:
    """Whether this process draws for a browser instead of a terminal."""
    return "web_driver" in os.environ.get("TEXTUAL_DRIVER", "")


def parse_address(text: str) -> tuple[str, int]:
    """``localhost:8000`` as host and port; either may be left out.

    Raises:
        WrongUsage: it isn't one.
    """
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = ("", text) if text.isdecimal() else (text, "")
    default_host, _, default_port = DEFAULT_ADDRESS.partition(":")
    port = port or default_port
    if not (port.isdecimal() and 1 <= int(port[:9]) <= 65_535) or any(c.isspace() for c in host):
        raise WrongUsage(f"--serve-web takes an address such as {DEFAULT_ADDRESS}, not {text[:60]!r}.")
    return host.strip("[]") or default_host, int(port)


def app_command(options: Sequence[str]) -> str:
    """The shell command that runs the app for one visitor."""
    return shlex.join([sys.executable, "-m", "nanochat", *options])


def serve(address: str, options: Sequence[str]) -> int:
    """Serve the app until interrupted; ``options`` are those of the app's command line.

    Raises:
        WrongUsage: the address isn't one.
        NanochatError: the extra isn't installed, or the address can't be used.
    """
    host, port = parse_address(address)
    server = _textual_serve().Server(app_command(options), host=host, port=port, title="nanochat")
    try:
        server.serve()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise NanochatError(f"The app can't be served at {host}:{port}: {reason}.") from error
    return 0


def _textual_serve() -> ModuleType:
    try:
        import textual_serve.server
    except ImportError:
        raise NanochatError(
            "Serving the app to a browser needs the extra web; " + install_hint("web")
        ) from None
    return textual_serve.server
