"""A server over the tiny model, on a thread of its own, proven idle and consistent after every test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from nanochat.engine.config import EngineConfig
from nanochat.engine.engine import Engine
from nanochat.server.run import ApiServer, bind, serve
from nanochat.server.service import Service
from tests.engine.conftest import assert_idle_and_consistent, wait_until


@dataclass
class Running:
    """A server that answers."""

    engine: Engine
    service: Service
    server: ApiServer
    port: int
    api_key: str | None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def model(self) -> str:
        return self.engine.model_name

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client, which doesn't try twice here."""
        options = {"api_key": self.api_key or "none", "max_retries": 0, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return httpx2.post(self.url + path, json=body, timeout=30, **options)


MakeServer = Callable[..., Running]


def start_server(
    model: Path,
    *,
    max_requests: int = 256,
    api_key: str | None = None,
    any_host: bool = False,
    port: int = 0,
    **options: Any,
) -> tuple[Running, Callable[[], None]]:
    """A server that runs, and what ends it."""
    service_options = {name: options.pop(name) for name in ("settings", "system") if name in options}
    defaults = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 512}
    engine = Engine(EngineConfig(**{**defaults, **options, "model": str(model)}), debug=True)
    service = Service(engine, max_requests=max_requests, **service_options)
    server = ApiServer(service, max_requests=max_requests, api_key=api_key, any_host=any_host)
    sockets = bind("127.0.0.1", port)
    running = Running(engine, service, server, sockets[0].getsockname()[1], api_key)
    thread = threading.Thread(target=serve, args=(server, sockets), name="server under test")
    thread.start()
    wait_until(lambda: server.started)

    def end() -> None:
        server.should_exit = True
        thread.join(30)
        engine.close()
        assert not thread.is_alive()
        assert_idle_and_consistent(engine)

    return running, end


@pytest.fixture
def make_server(tiny_llama: Path) -> Iterator[MakeServer]:
    """``make_server(**options)``: a server of its own for a test; options of it, of its service and its engine."""
    ends: list[Callable[[], None]] = []

    def make(model: Path = tiny_llama, **options: Any) -> Running:
        running, end = start_server(model, **options)
        ends.append(end)
        return running

    yield make
    for end in ends:
        end()


@pytest.fixture(scope="module")
def shared_server(tiny_llama: Path) -> Iterator[Running]:
    running, end = start_server(tiny_llama)
    yield running
    end()


@pytest.fixture
def api(shared_server: Running) -> Iterator[Running]:
    """A server that tests of a module share; idle when each of them is over."""
    yield shared_server
    assert_idle_and_consistent(shared_server.engine)
    # A client has its answer a moment before the server is done with it.
    wait_until(lambda: not shared_server.service._answers)
    assert shared_server.service._num_choices == 0
