"""A history in a file of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nanochat.history import History


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "history.db"


@pytest.fixture
def history(file: Path) -> Iterator[History]:
    with History(file) as opened:
        yield opened
