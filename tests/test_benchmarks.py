"""Benchmarks say what was measured: no option is ignored, no rate counts tokens of another time."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from benchmarks import machine, tables
from benchmarks.servers import Served, decode_rate

POSITIONAL = {"command", "file", "names", "report", "server", "what"}
"""Named where they are declared just as where they are used."""
FOLDER = Path(machine.__file__).parent
FILES = sorted(FOLDER.glob("*.py"))


def options(tree: ast.AST) -> set[str]:
    """Attributes under which `argparse` gives what a program is called with."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr != "add_argument":
                continue
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            dest = [word.value.value for word in node.keywords if word.arg == "dest"]  # type: ignore[attr-defined]
            long = [name for name in names if name.startswith("--")] or names
            found.add((dest or long)[0].lstrip("-").replace("-", "_"))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_option_is_used(file: Path) -> None:
    tree = ast.parse(file.read_text())
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    # Some are passed on by name: `getattr(options, name)`.
    read |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} - POSITIONAL
    assert options(tree) <= read


def test_the_decode_rate_is_of_the_time_when_all_requests_decode() -> None:
    early = Served(1.0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    late = Served(4.0, [4.0, 5.0, 6.0, 7.0])
    assert decode_rate([early, late]) == 5 / 3
    assert decode_rate([early]) == 1.0
    assert decode_rate([Served(1.0, [1.0]), Served(2.0, [2.0])]) == 0.0


@pytest.mark.parametrize("name", ["kernels-h200", "kernels-prefill-h200"])
def test_the_tables_of_the_page_come_from_the_reports(name: str) -> None:
    report = json.loads((FOLDER / "results" / f"{name}.json").read_text())
    page = (FOLDER.parent / "docs" / "kernels.md").read_text()
    shown = {
        "kernels-h200": {"decode", "prefill", "elementwise"},
        "kernels-prefill-h200": {"how INT8 is read"},
    }
    for title in shown[name]:
        section, make = tables.TABLES[title]
        assert make(report[section]) in page, title


def test_hardware_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "describe_gpu", lambda: "NVIDIA H200")
    assert "CPU" in machine.describe_machine(device="cpu")["hardware"]
    for device in ("cuda", "auto"):
        about = machine.describe_machine(device=device)
        assert about["hardware"] == "NVIDIA H200"
        assert "CPU" in about["host"]
    monkeypatch.setattr(machine, "describe_gpu", lambda: None)
    assert "CPU" in machine.describe_machine()["hardware"]
