"""A person's hour at the app in minutes: the real app with a real model in tmux, and nothing stray on the screen.

Opens tabs, types, pastes, forks, stops, answers again, resizes, takes screenshots, searches, switches and closes,
in an order drawn from a seed, until the time is up; then quits. What is on the screen is looked at after every
action: no escape sequence and no control character may stand there as text. Every few actions the screen is let
come to rest and then drawn anew by the app, after a resize: it must look as before, or something that is not the
app's (a library's message, a stray byte) had been written over it. In the end the terminal must be as before.

    python -m benchmarks.tmux_script --minutes 10 --json benchmarks/results/tmux.json
    python -m benchmarks.tmux_script --minutes 1 --model FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine

SIZES = ((120, 36), (80, 24), (160, 45), (100, 20), (60, 15))
START_S = 120.0
REST_S = 8.0
"""A screen that has not changed for so long is at rest: longer than a notice is shown. Longer still on a machine
where each program has to wait for its turn."""
MAX_REST_S = 120.0
ANSWER_S = 4.0
"""An answer is let run for at most so long before it is stopped."""
CHECK_EVERY = 6
"""Actions between two comparisons of the screen with itself drawn anew."""
STRAY = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f]|\^\[|\[\?\d+[hl]|\[<\d+;\d+|\[\d+(;\d+)*m|Traceback|Warning:"
)
QUESTIONS = (
    "Name three rivers in Europe.",
    "Write a haiku about the sea.",
    "What is 17 + 25?",
    "Give me a table of four planets and their moons.",
    "Write a Python function that reverses a list.",
    "List ten uses of a paper clip.",
)
PASTE = "Sum this up:\n" + "\n".join(
    f"{number}. line of a pasted text, größer, 東京 🎉" for number in range(30)
)
SETTINGS = "[sampling]\nmax_tokens = 120\n\n[app]\nreduced_motion = true\n"


class Tmux:
    """A tmux server of one's own with one window, in which a command runs."""

    def __init__(self, folder: Path, command: str) -> None:
        self._socket = str(folder / "tmux")
        self._folder = folder
        columns, rows = SIZES[0]
        self("new-session", "-d", "-x", str(columns), "-y", str(rows), "sh")
        self("set-option", "-g", "window-size", "manual")
        time.sleep(0.5)
        self.type(command)
        self.press("Enter")

    def __call__(self, *words: str) -> str:
        return subprocess.run(
            ["tmux", "-S", self._socket, "-f", "/dev/null", *words],
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    def type(self, text: str) -> None:
        self("send-keys", "-l", "--", text)

    def press(self, *keys: str) -> None:
        self("send-keys", *keys)

    def paste(self, text: str) -> None:
        file = self._folder / "paste"
        file.write_text(text, encoding="utf-8")
        self("load-buffer", str(file))
        self("paste-buffer", "-p")

    def resize(self, columns: int, rows: int) -> None:
        self("resize-window", "-x", str(columns), "-y", str(rows))

    def screen(self) -> list[str]:
        return [line.rstrip() for line in self("capture-pane", "-p").split("\n")]

    def flag(self, name: str) -> str:
        return self("display-message", "-p", f"#{{{name}}}").strip()

    def close(self) -> None:
        self("kill-server")


class Visitor:
    """Does things in the app, and looks at the screen."""

    def __init__(self, tmux: Tmux, pictures: Path, seed: int) -> None:
        self.faults: list[str] = []
        self.done: Counter[str] = Counter()
        self.compared = 0
        self.leaving_s: float | None = None
        self._tmux = tmux
        self._pictures = pictures
        self._random = random.Random(seed)
        self._size = SIZES[0]
        self._tabs = 1
        self._last = "start"

    def wait_for(self, text: str, seconds: float) -> bool:
        """Whether a text comes onto the screen in time; a fault if not."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            if text in "\n".join(self._tmux.screen()):
                return True
            time.sleep(0.1)
        self._fault(f"no {text!r} within {seconds:.0f} s")
        return False

    def act(self) -> None:
        """One thing that a person does, drawn at random."""
        names = (
            "say",
            "say",
            "paste",
            "fork",
            "new",
            "again",
            "resize",
            "screenshot",
            "search",
            "switch",
            "panel",
        )
        name = self._random.choice((*names, "help", "picker", "scroll", "close"))
        self._last = name
        getattr(self, f"_{name}")()
        self.done[name] += 1
        self.look()

    def look(self) -> list[str]:
        """The screen; what doesn't belong there is a fault."""
        lines = self._tmux.screen()
        for line in lines:
            if (found := STRAY.search(line)) is not None:
                self._fault(f"{found.group()!r} on the screen: {line.strip()[:100]!r}")
        return lines

    def compare(self) -> None:
        """The screen at rest must look the same when it is drawn anew."""
        self._tmux.press("Escape")
        if (before := self._rest()) is None:
            return
        columns, rows = self._size
        self._tmux.resize(columns, rows - 1)  # another width would scroll the row of tabs
        time.sleep(0.5)
        self._tmux.resize(columns, rows)
        after = self._rest()
        self.compared += 1
        if after is None:
            return
        differing = [
            pair for pair in zip(map(_plain, before), map(_plain, after), strict=True) if pair[0] != pair[1]
        ]
        if differing:
            self._fault(f"drawn anew, {len(differing)} lines differ, such as {differing[:1]!r}")

    def _rest(self) -> list[str] | None:
        end_s, since_s, lines = time.monotonic() + MAX_REST_S, time.monotonic(), self.look()
        while time.monotonic() < end_s:
            time.sleep(0.5)
            now = self._tmux.screen()
            if now != lines or re.search(r" (running|queued)$", now[0]) is not None:
                since_s, lines = time.monotonic(), now
            elif time.monotonic() - since_s >= REST_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)):
                return self.look()
        self._fault("the screen does not come to rest")
        return None

    def _fault(self, text: str) -> None:
        self.faults.append(f"after {self._last} at {self._size}: {text}")
        print(self.faults[-1], file=sys.stderr)

    def _answer(self) -> None:
        time.sleep(self._random.uniform(0.5, ANSWER_S))
        self._tmux.press("Escape")
        time.sleep(0.3)

    def _say(self) -> None:
        question = self._random.choice(QUESTIONS)
        for word in question.split(" "):
            self._tmux.type(f"{word} ")
            time.sleep(0.05)
        self._tmux.press("Enter")
        # A busy app may read the Escape of before together with the first letter, as a key with Alt.
        self.wait_for(question[1:15], 20)
        self._answer()

    def _paste(self) -> None:
        self._tmux.paste(PASTE)
        time.sleep(0.3)
        self._tmux.press("Enter")
        self._answer()

    def _fork(self) -> None:
        if self._tabs < 8:
            self._tmux.press("C-f")
            self._tabs += 1
            time.sleep(0.3)

    def _new(self) -> None:
        if self._tabs < 8:
            self._tmux.press("C-n")
            self._tabs += 1
            time.sleep(0.3)

    def _close(self) -> None:
        if self._tabs > 1:
            self._tmux.press("C-w")
            self._tabs -= 1
            time.sleep(0.3)

    def _again(self) -> None:
        self._tmux.press("C-r")
        self._answer()

    def _resize(self) -> None:
        self._size = self._random.choice(SIZES)
        self._tmux.resize(*self._size)
        time.sleep(0.7)

    def _screenshot(self) -> None:
        before = len(list(self._pictures.glob("*.svg")))
        self._tmux.press("F5")
        end_s = time.monotonic() + 10
        while len(list(self._pictures.glob("*.svg"))) <= before:
            if time.monotonic() > end_s:
                self._fault("no screenshot was written")
                return
            time.sleep(0.1)

    def _search(self) -> None:
        self._tmux.press("F9")
        self._tmux.type("haiku")
        time.sleep(0.7)
        self._tmux.press(self._random.choice(["Escape", "Down"]))
        self._tmux.press("Escape")
        time.sleep(0.3)

    def _switch(self) -> None:
        self._tmux.press(self._random.choice(["F3", "F4", "M-1"]))
        time.sleep(0.3)

    def _panel(self) -> None:
        self._tmux.press("F2")
        time.sleep(0.3)

    def _help(self) -> None:
        self._tmux.press("F1")
        time.sleep(0.7)
        self.look()
        self._tmux.press("F1")
        time.sleep(0.3)

    def _picker(self) -> None:
        self._tmux.press("C-g")
        time.sleep(0.3)
        self._tmux.press(self._random.choice(["Home", "End", "1"]), "Enter")
        time.sleep(0.3)
        self._tmux.press(
            "C-u"
        )  # where the digit had chosen already, Enter was the prompt's: it holds nothing

    def _scroll(self) -> None:
        self._tmux.press(self._random.choice(["PageUp", "PageDown"]))
        time.sleep(0.2)


def _plain(line: str) -> str:
    """Without scroll bars: how far one is drawn depends on how the view came to its place."""
    return re.sub("[▁-▇]", " ", line).rstrip()


def leave(tmux: Tmux, visitor: Visitor) -> None:
    """Quit, and find the shell's terminal as it was."""
    started = time.monotonic()
    tmux.press("C-q")
    if not visitor.wait_for("STATUS=0", 10):
        return
    seconds = time.monotonic() - started
    flags = {name: tmux.flag(name) for name in ("alternate_on", "mouse_any_flag", "cursor_flag")}
    if flags != {"alternate_on": "0", "mouse_any_flag": "0", "cursor_flag": "1"}:
        visitor.faults.append(f"the terminal is not as before: {flags}")
    visitor.leaving_s = round(seconds, 1)
    visitor.look()


def environment(folder: Path) -> dict[str, str]:
    """Where the app finds its settings, and leaves its chats and log."""
    config = folder / "config.toml"
    pictures = folder / "pictures"
    pictures.mkdir()
    config.write_text(f'{SETTINGS}screenshot_folder = "{pictures}"\n', encoding="utf-8")
    return {"NANOCHAT_DATA_DIR": str(folder / "data"), "XDG_STATE_HOME": str(folder / "state")}


def run(minutes: float, seed: int, options: list[str]) -> dict[str, Any]:
    """Visit the app for so long; returns a report."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = environment(folder)
        words = [sys.executable, "-m", "nanochat", "--config", str(folder / "config.toml"), *options]
        set_variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
        path = f"PYTHONPATH={shlex.quote(os.getcwd())}"
        tmux = Tmux(folder, f"clear; {path} {set_variables} {shlex.join(words)}; echo STATUS=$?")
        visitor = Visitor(tmux, folder / "pictures", seed)
        try:
            if visitor.wait_for("· kv ", START_S):
                visit(visitor, minutes)
                leave(tmux, visitor)
        finally:
            tmux.close()
        logs = [path.read_text(errors="replace") for path in (folder / "state").rglob("*.log")]
    return {
        "minutes": minutes,
        "seed": seed,
        "actions": dict(visitor.done),
        "screens_compared": visitor.compared,
        "leaving_s": visitor.leaving_s,
        "faults": visitor.faults,
        "tracebacks_in_the_log": sum(log.count("Traceback") for log in logs),
        "ok": not visitor.faults and not any("Traceback" in log for log in logs),
    }


def visit(visitor: Visitor, minutes: float) -> None:
    """Act until the time is up."""
    end_s = time.monotonic() + minutes * 60
    step: Callable[[], None]
    number = 0
    while time.monotonic() < end_s:
        number += 1
        step = visitor.compare if number % CHECK_EVERY == 0 else visitor.act
        step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="as nanochat takes it; left out: the default model")
    parser.add_argument("--threads", type=int, help="as nanochat takes it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    given = [
        f"--{name}={value}" for name in ("model", "threads") if (value := getattr(options, name)) is not None
    ]
    report = run(options.minutes, options.seed, given)
    print(json.dumps(report, indent=1, ensure_ascii=False))
    if options.json is not None:
        options.json.write_text(
            json.dumps(describe_machine("textual") | report, indent=1, ensure_ascii=False) + "\n"
        )
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
