"""Signals and lost terminals: chats are saved, the terminal is given back, no process stays, the status tells."""

from __future__ import annotations

import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from nanochat.history import History
from nanochat.ui.signals import EndingSignals
from tests.terminal import ENDLESS, WAIT_S, Terminal, until

PATIENT = (
    "-c",
    """
import sys
from nanochat.ui import signals
signals.GRACE_S = 600.0  # on a slow machine, too, the app shall leave by itself
from nanochat.__main__ import start
sys.exit(start())
""",
)
"""Arguments of Python for the app."""


def environment(folder: Path) -> dict[str, str]:
    names = ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "NANOCHAT_DATA_DIR")
    return os.environ | {"TERM": "xterm-256color"} | dict.fromkeys(names, str(folder))


@contextmanager
def running_app(model: Path, folder: Path, program: Sequence[str] = PATIENT) -> Iterator[Terminal]:
    """The app in a terminal with an answer under way, whose beginning is saved, as is what is being written."""
    (folder / "config.toml").write_text(ENDLESS)
    command = [
        sys.executable,
        *program,
        "--model",
        str(model),
        "--config",
        str(folder / "config.toml"),
    ]
    terminal = Terminal(command, environment(folder))
    try:
        until(lambda: b"kv float32" in terminal.written)
        terminal.send("question\r")
        with History(folder / "history.db") as other:
            until(other.list_chats)
            (chat,) = other.list_chats()
            until(lambda: len(other.path(chat.id)) > 1 and other.path(chat.id)[1].text)
        terminal.send("unsent")
        with closing(sqlite3.connect(folder / "history.db")) as connection:
            until(lambda: connection.execute("SELECT text FROM drafts").fetchall() == [("unsent",)])
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()


def check_saved(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "history.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with History(folder / "history.db") as history:
        (chat,) = history.restore_tabs()
        question, answer = history.path(chat.id)
        assert (question.text, answer.state) == ("question", "interrupted")
        assert chat.draft == "unsent"
        assert answer.text


def check_given_back(written: bytes) -> None:
    """The alternative screen is left, the cursor shown, mouse and paste modes are off; no traceback."""
    for on, off in ((b"1049h", b"1049l"), (b"25l", b"25h"), (b"1003h", b"1003l"), (b"2004h", b"2004l")):
        assert written.rfind(b"\x1b[?" + off) > written.rfind(b"\x1b[?" + on)
    assert b"Traceback" not in written


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_the_app_as_if_the_user_had_quit(
    long_llama: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with running_app(long_llama, tmp_path) as terminal:
        terminal.process.send_signal(number)
        until(lambda: terminal.process.poll() is not None)
        assert terminal.is_as_before
        assert terminal.wait(1) == 128 + number
        assert terminal.processes() == []
    check_given_back(terminal.written)
    check_saved(tmp_path)


@pytest.mark.slow
def test_a_closed_terminal_ends_the_app_and_loses_nothing(long_llama: Path, tmp_path: Path) -> None:
    with running_app(long_llama, tmp_path) as terminal:
        terminal.hang_up()
        assert terminal.process.wait(WAIT_S) == 128 + signal.SIGHUP
        assert terminal.processes() == []
    check_saved(tmp_path)


def is_stopped(terminal: Terminal) -> bool:
    return "T" in Path(f"/proc/{terminal.process.pid}/stat").read_text().rpartition(")")[2][:3]


STOPPED_WHILE_WRITING = """
import os, queue, signal, sys
from pathlib import Path
from nanochat.cli import main

put, begin = queue.Queue._put, Path(sys.argv.pop(1))

def stop_within_lock(self, item):
    put(self, item)
    if isinstance(item, str) and begin.exists():  # what goes to the terminal
        begin.unlink()
        os.kill(os.getpid(), getattr(signal, begin.name))

queue.Queue._put = stop_within_lock
sys.exit(main())
"""
"""The signal comes where its handler may not use the terminal, because the code that it interrupts does."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGSTOP])
def test_a_stop_comes_upon_the_writing_to_the_terminal(
    long_llama: Path, tmp_path: Path, number: signal.Signals
) -> None:
    begin = tmp_path / number.name
    with running_app(long_llama, tmp_path, ("-c", STOPPED_WHILE_WRITING, str(begin))) as terminal:
        for _ in range(3):
            begin.touch()
            until(lambda: is_stopped(terminal))
            before = len(terminal.written)
            terminal.process.send_signal(signal.SIGCONT)
            until(lambda start=before: b"kv float32" in terminal.written[start:])  # type: ignore[misc]
        terminal.send("\x11")  # ^Q
        assert terminal.wait(WAIT_S) == 0
    check_given_back(terminal.written)
    check_saved(tmp_path)


@pytest.mark.slow
def test_the_app_is_stopped_and_goes_on(long_llama: Path, tmp_path: Path) -> None:
    with running_app(long_llama, tmp_path) as terminal:
        terminal.process.send_signal(signal.SIGTSTP)
        until(lambda: is_stopped(terminal))
        assert terminal.is_as_before
        check_given_back(terminal.written)
        before = len(terminal.written)
        terminal.process.send_signal(signal.SIGCONT)
        until(lambda: b"\x1b[?1049h" in terminal.written[before:])
        # What never changes is drawn again too.
        until(
            lambda: all(text in terminal.written[before:] for text in (b"tok/s", b"kv float32", b"^P")),
        )
        assert not terminal.is_as_before
        terminal.send("\x11")  # ^Q
        assert terminal.wait(WAIT_S) == 0
    check_given_back(terminal.written)
    check_saved(tmp_path)


@pytest.mark.slow
def test_a_stop_that_nobody_can_notice_does_no_harm(long_llama: Path, tmp_path: Path) -> None:
    """Of SIGSTOP a process only learns that it goes on."""
    with running_app(long_llama, tmp_path) as terminal:
        threads = Path(f"/proc/{terminal.process.pid}/task")
        names = sorted((task / "comm").read_text() for task in threads.iterdir())
        for _ in range(3):
            terminal.process.send_signal(signal.SIGSTOP)
            until(lambda: is_stopped(terminal))
            before = len(terminal.written)
            terminal.process.send_signal(signal.SIGCONT)
            until(lambda start=before: b"\x1b[?1049h" in terminal.written[start:])  # type: ignore[misc]
            until(lambda start=before: b"kv float32" in terminal.written[start:])  # type: ignore[misc]
            assert not terminal.is_as_before
        # A second set of Textual's threads would keep the process from ending.
        until(lambda: sorted((task / "comm").read_text() for task in threads.iterdir()) == names)
        terminal.send("\x11")  # ^Q
        assert terminal.wait(WAIT_S) == 0
    check_given_back(terminal.written)
    check_saved(tmp_path)


@pytest.mark.slow
def test_ctrl_z_gives_the_terminal_to_the_shell_until_fg(long_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(ENDLESS)
    app = [
        sys.executable,
        "-m",
        "nanochat",
        "--model",
        str(long_llama),
        "--config",
        str(tmp_path / "config.toml"),
    ]
    # With job control, the shell goes on when the app stops.
    shell = f"{shlex.join(app)}; echo put''aside; sleep 1; fg"
    terminal = Terminal(["sh", "-mc", shell], environment(tmp_path))
    try:
        until(lambda: b"kv float32" in terminal.written)
        terminal.send("\x1a")
        until(lambda: b"putaside" in terminal.written)
        check_given_back(terminal.written)
        before = terminal.written.index(b"putaside")
        until(lambda: all(text in terminal.written[before:] for text in (b"kv float32", b"^P")))
        terminal.send("\x11")  # ^Q
        assert terminal.wait(WAIT_S) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
    check_given_back(terminal.written)


@pytest.mark.slow
def test_ctrl_z_without_a_shell_is_refused(long_llama: Path, tmp_path: Path) -> None:
    with running_app(long_llama, tmp_path) as terminal:
        terminal.send("\x1a")
        until(lambda: b"put aside here" in terminal.written)


ASK = [
    sys.executable,
    "-m",
    "nanochat",
    "ask",
    "--max-tokens",
    "60000",
    "--kv-blocks",
    "4096",
    "--device",
    "cpu",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)],
)
@pytest.mark.parametrize("delay_s", [0.4, 1.0, None])
def test_a_signal_ends_an_answer(
    long_llama: Path, tmp_path: Path, number: signal.Signals, status: int, delay_s: float | None
) -> None:
    """While Python's modules are imported, while the model is loaded, while it answers (None)."""
    (tmp_path / "config.toml").write_text(ENDLESS)
    options = ["--model", str(long_llama), "--config", str(tmp_path / "config.toml"), "question"]
    terminal = Terminal([*ASK, *options], environment(tmp_path))
    try:
        if delay_s is None:
            until(lambda: len(terminal.written) > 20)
        else:
            time.sleep(delay_s)
        if number == signal.SIGINT:
            terminal.send("\x03")  # ^C: the terminal itself sends the signal
        else:
            terminal.process.send_signal(number)
        until(lambda: terminal.process.poll() is not None)
        assert terminal.is_as_before
        assert terminal.wait(1) == status
        assert terminal.processes() == []
    finally:
        terminal.process.kill()
    assert b"Traceback" not in terminal.written


FROM_OUR_FIRST_LINE = [
    sys.executable,
    "-c",
    """
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)  # what start() does first
install = signal.signal

def tell(number, handler):
    before = install(number, handler)
    if number == signal.SIGINT and callable(handler):
        print("handled", flush=True)
    return before

signal.signal = tell
print("started", flush=True)
import sys
from nanochat.__main__ import start
sys.exit(start())
""",
    *ASK[3:],
]
"""Python's own start, in which an interrupt ends it with status 1 and a traceback, isn't ours to test."""


@pytest.mark.slow
@pytest.mark.parametrize("presses", [1, 2])
def test_an_interrupt_at_any_moment_is_no_traceback(long_llama: Path, tmp_path: Path, presses: int) -> None:
    """Also while modules are imported, where Python may swallow it."""
    (tmp_path / "config.toml").write_text(ENDLESS)
    options = ["--model", str(long_llama), "--config", str(tmp_path / "config.toml"), "question"]
    for step in range(8):
        terminal = Terminal([*FROM_OUR_FIRST_LINE, *options], environment(tmp_path))
        try:
            until(lambda terminal=terminal: b"started" in terminal.written)
            time.sleep(0.2 + 0.16 * step)
            # Before the commands are imported, it ends Python as the system does; a shell sees 130 too.
            statuses = (130,) if b"handled" in terminal.written else (130, -signal.SIGINT)
            for _ in range(presses):
                terminal.send("\x03")
                time.sleep(0.03)
            assert terminal.wait(WAIT_S) in statuses
        finally:
            terminal.process.kill()
        assert b"Traceback" not in terminal.written
        assert b"Exception ignored" not in terminal.written


@pytest.mark.slow
def test_a_closed_terminal_ends_an_answer(long_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(ENDLESS)
    options = ["--model", str(long_llama), "--config", str(tmp_path / "config.toml"), "question"]
    terminal = Terminal([*ASK, *options], environment(tmp_path))
    try:
        until(lambda: len(terminal.written) > 20)
        terminal.hang_up()
        assert terminal.process.wait(WAIT_S) != 0
    finally:
        terminal.process.kill()


def _run(program: str) -> int:
    return subprocess.run([sys.executable, "-c", program], check=False, timeout=WAIT_S).returncode


def test_an_app_that_hangs_is_ended_after_its_chats_are_saved(tmp_path: Path) -> None:
    program = f"""
import os, signal, time
from pathlib import Path
from nanochat.ui import signals
signals.GRACE_S = 0.2
ending = signals.EndingSignals(lambda: Path({str(tmp_path / "saved")!r}).touch())
with ending.awaited():
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        time.sleep(60)
"""
    assert _run(program) == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()


def test_what_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ending = EndingSignals(lambda: None)
        with ending.awaited():
            os.kill(os.getpid(), signal.SIGHUP)
        assert ending.status is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_without_a_signal_all_is_as_before() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with EndingSignals(lambda: None).awaited():
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] != before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
