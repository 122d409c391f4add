"""Clients that go away, dawdle, never read, send too much or come in thousands."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2
import pytest

from nanochat.server import app, connections, run
from nanochat.server.wire import to_json
from tests.engine.conftest import wait_until
from tests.server.conftest import MakeServer, Running

ENDLESS = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60_000, "ignore_eos": True}


def connect(api: Running) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", api.port), timeout=20)
    made.settimeout(20)
    return made


def request(
    api: Running, body: bytes = b"", *, path: str = "/v1/chat/completions", headers: str = ""
) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}"
    if "content-length" not in headers and "chunked" not in headers:
        head += f"content-length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def is_refused(client: socket.socket) -> bool:
    """Whether the server has told this one, which doesn't block, to come later."""
    with suppress(BlockingIOError):
        return client.recv(100).startswith(b"HTTP/1.1 503")
    return False


@pytest.fixture
def long_api(make_server: MakeServer, long_llama: Path) -> Running:
    """A server whose answers don't end by themselves in any test's time."""
    return make_server(long_llama, num_kv_blocks=8_192, max_requests=8)


class TestAClientThatGoesAway:
    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("leave", ["close", "half-close", "reset"])
    def test_its_blocks_are_free_within_a_step(self, long_api: Running, stream: bool, leave: str) -> None:
        engine = long_api.engine
        steps: list[int] = []
        take = engine._cancel

        def cancel(request_id: int) -> None:
            steps.append(engine.stats().steps)
            take(request_id)

        engine._cancel = cancel  # type: ignore[method-assign]
        body = to_json(ENDLESS | {"model": long_api.model, "stream": stream, "n": 2})
        with connect(long_api) as client:
            client.sendall(request(long_api, body))
            wait_until(lambda: engine.stats().generation_tokens > 10)
            if leave == "half-close":
                client.shutdown(socket.SHUT_WR)
                wait_until(lambda: not engine.stats().requests)
            elif leave == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        wait_until(lambda: not engine.stats().requests)
        assert engine.stats().blocks_used == 0
        # The step that ran when it was heard of, and no other: an idle engine makes none.
        assert engine.stats().steps - steps[-1] <= 1
        wait_until(lambda: not long_api.service._num_choices)

    def test_the_others_go_on(self, long_api: Running) -> None:
        body = ENDLESS | {"model": long_api.model, "stream": True}
        url = f"{long_api.url}/v1/chat/completions"
        with httpx2.stream("POST", url, json=body | {"max_tokens": 100}) as staying:
            with httpx2.stream("POST", url, json=body) as leaving:
                next(leaving.iter_raw())
            assert staying.read().endswith(b"data: [DONE]\n\n")

    def test_before_its_body_has_come(self, long_api: Running) -> None:
        with connect(long_api) as client:
            client.sendall(request(long_api, headers="content-length: 100\r\n"))
        assert httpx2.get(f"{long_api.url}/health").status_code == 200


class TestAClientThatDawdles:
    def test_the_head_of_a_request(self, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connections, "HEAD_S", 1.0)
        api = make_server()
        with connect(api) as silent, connect(api) as slow, connect(api) as second:
            second.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            started = time.monotonic()
            with suppress(OSError):
                while time.monotonic() < started + 15:
                    slow.sendall(b"G" if slow.fileno() < 0 else b"x")
                    second.sendall(b"y")
                    time.sleep(0.1)
            assert time.monotonic() - started < 10
            for client in (silent, slow, second):
                read_all(client)
        wait_until(lambda: not api.server.server_state.connections)

    def test_the_body_of_a_request(self, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(app, "BODY_S", 0.5)
        api = make_server()
        with connect(api) as client:
            client.sendall(request(api, headers="content-length: 100\r\n") + b"{")
            reply = read_all(client)
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert b"invalid_request_error" in reply

    def test_one_that_never_reads(
        self, make_server: MakeServer, long_llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Many answers with log-probabilities: more than all buffers on the way can hold."""
        monkeypatch.setattr(connections, "STALL_S", 1.0)
        api = make_server(long_llama, num_kv_blocks=8_192)
        for made in api.server.servers:
            for listening in made.sockets:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        body = ENDLESS | {"model": api.model, "stream": True, "logprobs": True, "top_logprobs": 20}
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.connect(("127.0.0.1", api.port))
            client.sendall(request(api, to_json(body | {"n": 4})))
            wait_until(lambda: api.engine.stats().running == 4)
            wait_until(lambda: not api.engine.stats().requests)
            assert not api.server.server_state.connections
            assert httpx2.get(f"{api.url}/health").status_code == 200

    @pytest.mark.parametrize("size", [65_536, 16])
    def test_one_that_reads_slowly(
        self, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, size: int
    ) -> None:
        """An answer waits to be taken for longer than a client may do nothing: it comes, but not to one that dawdles."""
        monkeypatch.setattr(connections, "STALL_S", 5.0)
        api = make_server()
        for made in api.server.servers:
            for listening in made.sockets:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        body = ENDLESS | {"model": api.model, "logprobs": True, "top_logprobs": 20, "n": 4, "max_tokens": 100}
        received = b""
        with socket.socket() as client:
            client.settimeout(120)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.connect(("127.0.0.1", api.port))
            client.sendall(request(api, to_json(body), headers="connection: close\r\n"))
            with suppress(ConnectionResetError):
                while (part := client.recv(size)) and (size > 16 or api.server.server_state.connections):
                    received += part
                    time.sleep(0.03)
        assert received.startswith(b"HTTP/1.1 200")
        assert received.endswith(b"}") == (size > 16)


class TestTooMuch:
    @pytest.mark.parametrize("is_chunked", [False, True])
    def test_a_body_of_100_mb(self, api: Running, is_chunked: bool) -> None:
        def parts() -> Iterator[bytes]:
            for _ in range(100):
                yield b"x" * 1_000_000

        headers = {"content-type": "application/json"}
        if not is_chunked:
            headers["content-length"] = "100000000"
        reply = httpx2.post(f"{api.url}/v1/chat/completions", content=parts(), headers=headers)
        assert reply.status_code == 413
        assert "8,388,608 bytes" in reply.json()["error"]["message"]

    def test_bodies_that_never_end(self, api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each alone may be as large as it is; together they aren't kept."""
        monkeypatch.setattr(app, "MAX_BODIES_BYTES", 1_000_000)
        with ExitStack() as held:
            clients = [held.enter_context(connect(api)) for _ in range(3)]
            for client in clients:
                client.sendall(request(api, headers="content-length: 8000000\r\n") + b" " * 400_000)
                client.settimeout(0.0)
            wait_until(lambda: any(map(is_refused, clients)))
            assert httpx2.get(f"{api.url}/health").status_code == 200
        body = to_json({"model": api.model, "prompt": "Hi", "max_tokens": 1}) + b" " * 500_000
        headers = {"content-type": "application/json"}
        wait_until(
            lambda: httpx2.post(f"{api.url}/v1/completions", content=body, headers=headers).status_code == 200
        )

    def test_one_that_asks_first(self, api: Running) -> None:
        with connect(api) as client:
            client.sendall(request(api, headers="content-length: 100000000\r\nexpect: 100-continue\r\n"))
            assert read_all(client).startswith(b"HTTP/1.1 413 ")

    @pytest.mark.parametrize("length", ["99999999999999999999999", "-1", "1e3", "5, 6"])
    def test_a_length_that_is_none(self, api: Running, length: str) -> None:
        with connect(api) as client:
            client.sendall(request(api, headers=f"content-length: {length}\r\n"))
            client.shutdown(socket.SHUT_WR)
            assert read_all(client)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 413", b"")

    @pytest.mark.parametrize(
        "head",
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # somebody tries TLS
            b"GET / HTTP/1.1\r\nhost: a\r\nhost: localhost\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET / HTTP/9.9\r\nhost: localhost\r\nconnection: close\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: gzip\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 400_000 + b"\r\n\r\n",
            b"GET /\x00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ],
    )
    def test_a_head_that_is_none(self, api: Running, head: bytes) -> None:
        with connect(api) as client:
            with suppress(ConnectionError):  # it may be told before it has said all
                client.sendall(head)
            reply = read_all(client)
        assert reply.startswith(b"HTTP/1.1 4")
        assert b'{"error":{"message":"' in reply

    def test_rubbish_behind_a_request(self, long_api: Running) -> None:
        body = to_json(ENDLESS | {"model": long_api.model, "stream": True})
        with connect(long_api) as client:
            client.sendall(request(long_api, body) + b"\x00rubbish\r\n\r\n")
            client.recv(100)
        wait_until(lambda: not long_api.engine.stats().requests)

    def test_an_upgrade_is_not_taken(self, api: Running) -> None:
        headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "x"}
        assert httpx2.get(f"{api.url}/health", headers=headers).status_code == 200


class TestTooMany:
    def flood(self, api: Running, count: int, limit: int) -> None:
        """So many connections that say nothing: as many as the limit are kept, all others told to come later."""
        state = api.server.server_state
        with ExitStack() as held:
            waiting = [held.enter_context(connect(api)) for _ in range(count)]
            for client in waiting:
                client.settimeout(0.0)

            def all_others_are_told() -> bool:
                waiting[:] = [client for client in waiting if not is_refused(client)]
                return len(waiting) == limit

            wait_until(all_others_are_told)
            wait_until(lambda: len(state.connections) == limit)
        wait_until(lambda: not state.connections)
        assert httpx2.get(f"{api.url}/health").status_code == 200

    def test_connections_are_bounded(self, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run, "SPARE_CONNECTIONS", 8)
        self.flood(make_server(max_requests=8), 200, limit=16)

    @pytest.mark.slow
    def test_ten_thousand(self, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            connections, "HEAD_S", 300.0
        )  # they are to be refused, not to be dropped for silence
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        self.flood(make_server(max_requests=256), min(10_000, most_files - 2_000), limit=512)
