"""Listens, serves until it is told to end, and ends in order: streams get their end, the status is 0."""

from __future__ import annotations

import asyncio
import errno
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn

from nanochat.addresses import is_loopback
from nanochat.errors import NanochatError, WrongUsage
from nanochat.server.app import make_app
from nanochat.server.connections import Connection
from nanochat.server.service import Service

SPARE_CONNECTIONS = 256
"""Beside those whose requests can be answered: idle ones, and those that are told to come later."""
KEEP_ALIVE_S = 30
LAST_WORDS_S = 5
"""Once the server ends, its last answers must have gone out by then."""
_SPARE_FILES = 128
_BACKLOG = 1024
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ApiServer(uvicorn.Server):
    """uvicorn's server for one service."""

    def __init__(self, service: Service, *, max_requests: int, api_key: str | None, any_host: bool) -> None:
        class LimitedConnection(Connection):
            max_connections = max_requests + SPARE_CONNECTIONS

        self._service = service
        super().__init__(
            uvicorn.Config(
                make_app(service, api_key=api_key, any_host=any_host),
                http=LimitedConnection,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="error",  # a line for each broken request would fill the disk
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=LAST_WORDS_S,
            )
        )
        _allow_files(max_requests + SPARE_CONNECTIONS + _SPARE_FILES)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if counter % 10 == 0:
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.check(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers under way end with an error that says why."""
        self._service.close()
        await super().shutdown(sockets)


def check_address(host: str, port: int, api_key: str | None) -> None:
    """Refuse an address that can't be used, or that others could use.

    Raises:
        WrongUsage: the message says what to do.
    """
    if not host.strip():
        raise WrongUsage("--host is empty; leave it out to serve this machine only.")
    if not 0 <= port <= 65_535:
        raise WrongUsage(f"--port must lie between 0 and 65535, not {port}.")
    if api_key is not None and not api_key.strip():
        raise WrongUsage("The API key is empty; give one that can't be guessed.")
    if api_key is None and not is_loopback(host):
        raise WrongUsage(
            f"At {host[:60]} anybody who can reach this machine could use the server: give it an --api-key, "
            "or leave --host out to serve this machine only."
        )


def bind(host: str, port: int) -> list[socket.socket]:
    """Sockets for all addresses of a host. Not listening yet, so that nobody waits while a model loads.

    Raises:
        NanochatError: the address can't be used.
    """
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            if family not in (socket.AF_INET, socket.AF_INET6):
                continue
            with suppress(OSError) if sockets else _nothing():  # localhost may have no IPv6
                made = socket.socket(family, kind, protocol)
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                chosen = sockets[0].getsockname()[1] if sockets else address[1]
                made.bind((address[0], chosen, *address[2:]))
                sockets.append(made)
    except (OSError, UnicodeError) as error:
        raise _cant_be_used(host, port, error) from error
    return sockets


def listen(sockets: Sequence[socket.socket]) -> None:
    """Let clients in. Another program may have bound the same address and come first.

    Raises:
        NanochatError: the address can't be used.
    """
    for made in sockets:
        try:
            made.listen(_BACKLOG)
        except OSError as error:
            host, port, *_ = made.getsockname()
            raise _cant_be_used(host, port, error) from error


def _cant_be_used(host: str, port: int, error: OSError | UnicodeError) -> NanochatError:
    reason = getattr(error, "strerror", None) or type(error).__name__
    is_host = isinstance(error, (socket.gaierror, UnicodeError)) or error.errno == errno.EADDRNOTAVAIL
    if is_host:
        return NanochatError(
            f"{host[:60]} is no address of this machine ({reason}); choose another --host, or leave it out to serve "
            "this machine only."
        )
    return NanochatError(f"{host[:60]}, port {port} can't be used: {reason}; choose another --port.")


def serve(server: ApiServer, sockets: Sequence[socket.socket]) -> None:
    """Serve until SIGINT or SIGTERM, or until ``server.should_exit`` is set; a second SIGINT hurries."""
    with _signals_kept():
        asyncio.run(server.serve(list(sockets)))


@contextmanager
def _signals_kept() -> Iterator[None]:
    """uvicorn raises the signals that have ended it once more when it is done; here that does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _do_nothing) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _do_nothing(_: int, __: FrameType | None) -> None:
    return


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _allow_files(needed: int) -> None:
    """Every connection is an open file; systems begin with few and allow more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
