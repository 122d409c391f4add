"""The page on reliability names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "reliability.md"
NAMED = sorted(set(re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8"))))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_it_exists(file: str, name: str) -> None:
    assert re.search(rf"\bdef {name}\(", (TESTS / file).read_text(encoding="utf-8"))


def test_every_fault_has_one() -> None:
    rows = re.findall(r"^\| (\d+) \|.*::test_", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(row) for row in rows] == list(range(1, 33))


def test_every_promise_has_one() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page.split("## What the app promises, and its tests")[1].split("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and not row.startswith("| promise")]
    assert len(rows) > 30
    assert [row for row in rows if "::test_" not in row] == []
