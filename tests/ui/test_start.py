"""Starting and leaving: no torch before the first paint, a fit terminal, and nothing stray on the screen."""

from __future__ import annotations

import gc
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.stray_output import MAX_LOG_BYTES, open_log
from nanochat.ui import terminal
from nanochat.ui.terminal import UnfitTerminal, check_terminal
from tests.ui.driver import started

HEAVY = ("torch", "transformers", "numpy", "jinja2", "tokenizers")


def test_the_app_is_imported_without_anything_heavy() -> None:
    program = f"import sys, nanochat.ui.app; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_a_terminal_one_sentence_and_status_one() -> None:
    program = "from nanochat.engine.config import EngineConfig; from nanochat.ui.app import run_app; raise SystemExit(run_app(EngineConfig()))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "nanochat ask" in done.stderr


@pytest.mark.parametrize(
    ("term", "size", "said"),
    [
        ("dumb", (80, 24), "dumb"),
        ("", (80, 24), "dumb"),
        ("xterm", (39, 24), "39 columns"),
        ("xterm", (80, 9), "9 rows"),
    ],
)
def test_unfit_terminals_are_refused(
    monkeypatch: pytest.MonkeyPatch, term: str, size: tuple[int, int], said: str
) -> None:
    monkeypatch.setenv("TERM", term)
    _pretend_terminal(monkeypatch, size)
    with pytest.raises(UnfitTerminal, match=said):
        check_terminal()


@pytest.mark.parametrize("size", [(40, 10), (0, 0), (300, 100)])
def test_fit_terminals_are_accepted(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    _pretend_terminal(monkeypatch, size)
    check_terminal()


def _pretend_terminal(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    monkeypatch.setattr(terminal.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(terminal.os, "isatty", lambda _: True)
    monkeypatch.setattr(terminal.os, "get_terminal_size", lambda _: os.terminal_size(size))


def test_stray_output_goes_to_the_log_and_the_screen_is_given_back(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "app.log"
    program = f"""
import os, sys
from pathlib import Path
from nanochat.ui.terminal import reserved_screen
with reserved_screen(Path({str(log)!r})):
    os.write(1, b"stray out"); os.write(2, b"stray err")
    sys.__stderr__.write("picture"); sys.__stderr__.flush()
    os.get_terminal_size(sys.__stdout__.fileno())
os.write(2, b"after")
"""
    assert _run_in_terminal(program) == "pictureafter"
    assert log.read_text() == "stray outstray err"


def test_a_log_begun_anew_keeps_what_several_write(tmp_path: Path) -> None:
    """Stray output and the app's own lines come by ways of their own, and neither is written over the other."""
    log = tmp_path / "app.log"
    log.write_bytes(b"x" * (MAX_LOG_BYTES + 1))
    stray = open_log(log)
    with log.open("a") as logger:
        for name in ("one", "two"):
            os.write(stray, f"stray {name}\n".encode())
            logger.write(f"line {name}\n")
            logger.flush()
    os.close(stray)
    assert log.read_text().splitlines() == ["stray one", "line one", "stray two", "line two"]


def test_a_log_that_cannot_be_written_does_not_stop_the_app(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    program = f"""
import os, sys
from pathlib import Path
from nanochat.ui.terminal import reserved_screen
with reserved_screen(Path({str(tmp_path / "file" / "app.log")!r})):
    os.write(2, b"stray")
os.write(2, b"after")
"""
    assert _run_in_terminal(program) == "after"


def _run_in_terminal(program: str) -> str:
    """What a program writes to its terminal."""
    parent, child = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", program], stdin=child, stdout=child, stderr=child)
    os.close(child)
    written = b""
    while True:
        try:
            piece = os.read(parent, 4096)
        except OSError:  # the other side has closed
            break
        if not piece:
            break
        written += piece
    os.close(parent)
    assert process.wait() == 0
    return written.decode()


async def test_what_was_loaded_no_longer_costs_the_garbage_collector(tiny_llama: Path) -> None:
    """Its full rounds would stop the screen for more than 0.1 s each."""
    async with started(tiny_llama):
        assert gc.get_freeze_count() > 100_000
