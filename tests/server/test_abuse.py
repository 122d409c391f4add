"""Clients of every kind at once, for a while: right answers for those who ask well, nothing left of the others."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from contextlib import suppress

import httpx2
import pytest

from tests.engine.conftest import assert_idle_and_consistent, wait_until
from tests.server.conftest import MakeServer, Running
from tests.server.test_connections import connect, request

LASTS_S = 6.0
KINDS = ("whole", "stream", "leave", "junk", "half", "flipped", "large")


class Crowd:
    """Threads that ask well or badly, by chance."""

    def __init__(self, api: Running) -> None:
        self.seen: Counter[str] = Counter()
        self._api = api
        self._good = {"model": api.model, "prompt": "abc", "temperature": 0, "max_tokens": 12}
        self._expected = self._text(self._api.post("/v1/completions", self._good).text)

    def ask(self, seed: int) -> None:
        rng, until = random.Random(seed), time.monotonic() + LASTS_S
        while time.monotonic() < until:
            kind = rng.choice(KINDS)
            if kind in ("whole", "stream"):
                reply = self._api.post("/v1/completions", self._good | {"stream": kind == "stream"})
                is_right = reply.status_code == 200 and self._text(reply.text) == self._expected
                self.seen["right" if is_right else f"{kind} {reply.status_code}"] += 1
            else:
                with suppress(OSError):  # the server may hang up on any of these
                    self._send_badly(rng, self._bad(rng, kind))
                self.seen[kind] += 1

    def _text(self, reply: str) -> str:
        events = [
            line.removeprefix("data: ") for line in reply.splitlines() if line.startswith(("{", "data: {"))
        ]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    def _bad(self, rng: random.Random, kind: str) -> bytes:
        body = {
            "model": self._api.model,
            "prompt": "x" * rng.randrange(1, 900),
            "max_tokens": 1_000,
            "n": rng.randrange(1, 5),
            "stream": rng.random() < 0.5,
            "ignore_eos": True,
            "logprobs": rng.choice([None, 3]),
        }
        sent = bytearray(request(self._api, json.dumps(body).encode(), path="/v1/completions"))
        if kind == "junk":
            return rng.randbytes(rng.randrange(1, 3_000))
        if kind == "large":
            return (
                request(self._api, headers="transfer-encoding: chunked\r\n") + b"100000\r\n" + b"x" * 0x100000
            )
        if kind == "flipped":
            for _ in range(rng.randrange(1, 6)):
                sent[rng.randrange(len(sent))] = rng.randrange(256)
        return bytes(sent[: rng.randrange(1, len(sent))] if kind == "half" else sent)

    def _send_badly(self, rng: random.Random, data: bytes) -> None:
        with connect(self._api) as client:
            client.sendall(data)
            client.settimeout(rng.random() * 0.3 + 0.001)
            with suppress(TimeoutError):
                client.recv(1_000)
            if rng.random() < 0.3:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


@pytest.mark.slow
def test_a_crowd(make_server: MakeServer) -> None:
    api = make_server(num_kv_blocks=300, max_requests=48)
    crowd = Crowd(api)
    threads = [threading.Thread(target=crowd.ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(crowd.seen) <= {"right", *KINDS}
    assert crowd.seen["right"] > 0
    wait_until(lambda: not api.service._num_choices and not api.server.server_state.connections)
    assert_idle_and_consistent(api.engine)
    assert httpx2.get(f"{api.url}/health").status_code == 200
