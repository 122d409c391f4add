"""Terminals that fail, block, are closed or send rubbish: the app goes on where it can, and ends where it can't."""

from __future__ import annotations

import os
import pty
import select
import signal
import sqlite3
import subprocess
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import textual
from textual.drivers import linux_driver

from nanochat.ui import textual_private
from tests.terminal import Terminal, until
from tests.test_signals import check_given_back, environment, is_stopped

NO_FAILURE = (0, 1)
"""1 once it is known that there is no model."""
ANY_WRITES = 2_000
"""Many more than Textual's queue to the terminal takes."""


def test_the_private_parts_are_where_this_version_has_them() -> None:
    assert textual.__version__.startswith("8."), "check nanochat/ui/textual_private.py against this version"
    decoder_for = vars(linux_driver)["getincrementaldecoder"]
    assert decoder_for in (getincrementaldecoder, textual_private._decoder_for)
    for name in ("_sigtstp_application", "_sigcont_application", "_run_input_thread"):
        assert name in vars(linux_driver.LinuxDriver)


WRITING = """
import os, sys
from pathlib import Path
from nanochat.ui.terminal import reserved_screen
from textual.drivers._writer_thread import WriterThread

lost = []
with reserved_screen(Path(os.devnull), lambda: lost.append(1)):
    os.set_blocking(sys.__stderr__.fileno(), False)  # as another program may at any time
    writer = WriterThread(sys.__stderr__)
    writer.start()
    for _ in range({writes}):
        writer.write("picture " * 100)
    writer.stop()
os._exit(10 + len(lost))
"""


@contextmanager
def writing(descriptor: int) -> Iterator[subprocess.Popen[bytes]]:
    """A program that writes to its terminal what Textual's thread would."""
    program = WRITING.format(writes=ANY_WRITES)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=descriptor, stdout=descriptor, stderr=descriptor
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_slow_terminal_that_is_not_waited_for_gets_everything() -> None:
    parent, child = pty.openpty()
    os.set_blocking(child, False)
    with writing(child) as process:
        time.sleep(0.5)  # whatever it takes without being read is written now
        size = 0
        while process.poll() is None or select.select([parent], [], [], 0.1)[0]:
            if select.select([parent], [], [], 0.1)[0]:
                size += len(os.read(parent, 65_536))
        assert process.returncode == 10
        assert size == ANY_WRITES * 800
    assert not os.get_blocking(child)  # as it was before
    os.close(parent)
    os.close(child)


def test_a_terminal_that_fails_is_told_of_once_and_never_waited_for() -> None:
    parent, child = pty.openpty()
    with writing(child) as process:
        os.close(child)
        os.read(parent, 10)
        os.close(parent)
        assert process.wait(60) == 11


@contextmanager
def app(folder: Path, *, before: str = "") -> Iterator[Terminal]:
    """The app without a model; ``before``: what its process does first."""
    program = f"import os, signal, sys\n{before}\nfrom nanochat.cli import main\nsys.exit(main())"
    command = [sys.executable, "-c", program, "--model", str(folder / "none")]
    terminal = Terminal(command, environment(folder))
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()


def write_draft(terminal: Terminal, folder: Path, text: str) -> None:
    """Write this once the prompt is there, and wait until it is saved."""
    until(lambda: b"/ for commands" in terminal.written)
    os.write(terminal._parent, text.encode("utf-8", "surrogateescape"))
    until(lambda: drafts(folder))


def drafts(folder: Path) -> list[str]:
    """What is saved of prompts; nothing as long as the history is being made."""
    with closing(sqlite3.connect(folder / "history.db")) as connection:
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'drafts'").fetchone() is None:
            return []
        return [text for (text,) in connection.execute("SELECT text FROM drafts")]


def test_a_byte_that_is_no_text_ends_nothing(tmp_path: Path) -> None:
    with app(tmp_path) as terminal:
        write_draft(terminal, tmp_path, "caf\udce9 \udcff and on")
        terminal.send("\x11")
        assert terminal.wait(60) in NO_FAILURE
    assert drafts(tmp_path) == ["caf\ufffd \ufffd and on"]
    check_given_back(terminal.written)


def test_a_closed_terminal_ends_the_app_also_where_hang_ups_are_ignored(tmp_path: Path) -> None:
    with app(tmp_path, before="signal.signal(signal.SIGHUP, signal.SIG_IGN)") as terminal:
        write_draft(terminal, tmp_path, "unsent")
        terminal.hang_up()
        assert terminal.process.wait(60) == 128 + signal.SIGHUP
    assert drafts(tmp_path) == ["unsent"]


FAILING_INPUT = """
from textual.drivers.linux_driver import LinuxDriver
def fail(driver):
    raise ValueError("rubbish")
LinuxDriver.run_input_thread = fail
"""


def test_an_app_that_fails_says_so(tmp_path: Path) -> None:
    with app(tmp_path, before=FAILING_INPUT) as terminal:
        assert terminal.wait(60) == 1
    assert b"The app has failed" in terminal.written


STOPPED_AT_ONCE = """
import queue
put = queue.Queue._put

def stop_within_lock(self, item):
    put(self, item)
    if isinstance(item, str) and not stopped:
        stopped.append(1)
        os.kill(os.getpid(), signal.SIGTSTP)

stopped = []
queue.Queue._put = stop_within_lock
"""
"""The app is stopped with the first it writes to the terminal: its driver is there, and it isn't mounted yet."""


def test_a_stop_before_the_first_picture(tmp_path: Path) -> None:
    with app(tmp_path, before=STOPPED_AT_ONCE) as terminal:
        until(lambda: is_stopped(terminal))
        before = len(terminal.written)
        terminal.process.send_signal(signal.SIGCONT)
        until(lambda: b"^P" in terminal.written[before:])
        write_draft(terminal, tmp_path, "unsent")
        terminal.send("\x11")
        assert terminal.wait(60) in NO_FAILURE
        assert b"The app has failed" not in terminal.written
    check_given_back(terminal.written)
