"""A small server, and a connection with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nanochat.backend.remote import client
from nanochat.backend.remote.backend import RemoteBackend
from tests.backend.fake_server import FakeServer, fake_server
from tests.backend.turns import connect


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


@pytest.fixture
def backend(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteBackend]:
    monkeypatch.setattr(client, "MAX_RETRIES", 0)
    opened = connect(server)
    yield opened
    opened.close()
