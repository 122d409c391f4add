"""A program in a real terminal: what it writes, what is typed, how it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

WAIT_S = 90.0
ENDLESS = """
[engine]
device = "cpu"
dtype = "float32"
num_kv_blocks = 4096
max_model_len = 65536

[sampling]
max_tokens = 60000
ignore_eos = true
temperature = 0.0
"""
"""A settings file under which a small model's answers go on for as long as a test lasts."""


class Terminal:
    """A process that has a pseudo-terminal of its own, and all that it writes there."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._parent, self._child = pty.openpty()
        fcntl.ioctl(self._child, termios.TIOCSWINSZ, struct.pack("HHHH", 36, 120, 0, 0))
        self.attributes = termios.tcgetattr(self._child)
        self.process = subprocess.Popen(
            command,
            stdin=self._child,
            stdout=self._child,
            stderr=self._child,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.written = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            while piece := os.read(self._parent, 65_536):
                self.written += piece

    def send(self, keys: str) -> None:
        """Type these, as a terminal sends them."""
        os.write(self._parent, keys.encode())

    @property
    def is_as_before(self) -> bool:
        """Whether lines are edited and echoed as before the process began."""
        return termios.tcgetattr(self._child) == self.attributes

    def wait(self, timeout_s: float) -> int:
        """The exit status; what was written before is there."""
        status = self.process.wait(timeout_s)
        self.close_child()
        self._reader.join(5)
        return status

    def close_child(self) -> None:
        """Let go of the process's side, so that reading ends with the process."""
        if self._child >= 0:
            os.close(self._child)
            self._child = -1

    def hang_up(self) -> None:
        """The window is closed, or the connection drops."""
        self.close_child()
        os.close(self._parent)

    def processes(self) -> list[int]:
        """Those that still live in the terminal's session."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    found.append(int(folder.name))
        return found


def until(condition: Callable[[], object], wait_s: float = WAIT_S) -> None:
    """Wait until it holds."""
    end_s = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)
