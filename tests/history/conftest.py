"""A history in a file of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nanochat.history import History
from nanochat.history import database as database_module
from nanochat.history import writer as writer_module


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "history.db"


@pytest.fixture
def history(file: Path) -> Iterator[History]:
    with History(file) as opened:
        yield opened


@pytest.fixture
def saved(file: Path) -> Path:
    """A closed history of one chat with one message."""
    with History(file) as history:
        history.add_message(history.create_chat("Chat"), None, "Hello")
    return file


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(writer_module, "RETRY_S", 0.05)
