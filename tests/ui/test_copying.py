"""Copying: what is taken, and the ways it goes to a clipboard."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import sys
from pathlib import Path

import pytest
import textual
from hypothesis import given
from hypothesis import strategies as st
from textual._styles_cache import StylesCache
from textual.driver import Driver as TextualDriver

from nanochat.engine.outputs import RequestMetrics, RequestOutput
from nanochat.settings import AppSettings
from nanochat.ui import clipboard
from nanochat.ui.copy_actions import code_blocks
from nanochat.ui.textual_private import write_to_terminal
from tests.ui.driver import Driver, started

ANSWER = "Two ways:\n\n```python\nprint(1)\n```\n\nor\n\n    indented\n\n~~~\nlast\n~~~\n"


@given(st.text())
def test_the_sequence_holds_the_text_and_nothing_that_a_terminal_obeys(text: str) -> None:
    sequence = clipboard.osc52(text)
    match = re.fullmatch("\x1b]52;c;([A-Za-z0-9+/=]*)\a", sequence)
    assert match is not None
    assert base64.b64decode(match.group(1)).decode() == text.encode("utf-8", "replace").decode()


def test_for_tmux_the_sequence_is_wrapped_with_its_escapes_doubled() -> None:
    assert clipboard.through_tmux("\x1b]52;c;QQ==\a") == "\x1bPtmux;\x1b\x1b]52;c;QQ==\a\x1b\\"
    assert clipboard.sequences("A", {"TMUX": "/tmp/t"}) == [clipboard.through_tmux(clipboard.osc52("A"))]
    assert clipboard.sequences("A", {}) == []


@pytest.mark.parametrize(
    ("environment", "platform", "has", "command"),
    [
        ({}, "linux", {"xclip", "wl-copy"}, None),
        ({"DISPLAY": ":0"}, "linux", {"xclip", "xsel"}, "xclip"),
        ({"DISPLAY": ":0"}, "linux", {"xsel"}, "xsel"),
        ({"DISPLAY": ":0", "WAYLAND_DISPLAY": "w"}, "linux", {"xclip", "wl-copy"}, "wl-copy"),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "1 2"}, "linux", {"xclip"}, None),
        ({"TMUX": "t", "SSH_TTY": "x"}, "linux", {"xclip", "tmux"}, "tmux"),
        ({"WSL_DISTRO_NAME": "Debian"}, "linux", {"clip.exe"}, "clip.exe"),
        ({}, "darwin", {"pbcopy"}, "pbcopy"),
        ({"SSH_TTY": "x"}, "darwin", {"pbcopy"}, None),
    ],
)
def test_the_tool_is_one_of_this_machine(
    environment: dict[str, str], platform: str, has: set[str], command: str | None
) -> None:
    found = clipboard.tool(environment, lambda name: name if name in has else None, platform)
    assert (found and found[0]) == command


async def test_a_tool_gets_the_text_and_may_fail_or_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clipboard, "TOOL_WAIT_S", 60.0)
    file = tmp_path / "copied"
    program = f"import sys; open({str(file)!r}, 'wb').write(sys.stdin.buffer.read())"
    assert await clipboard.give_to([sys.executable, "-c", program], "né\n")
    assert file.read_bytes() == "né\n".encode()
    assert not await clipboard.give_to([sys.executable, "-c", "raise SystemExit(1)"], "x")
    assert not await clipboard.give_to([str(tmp_path / "none")], "x")
    monkeypatch.setattr(clipboard, "TOOL_WAIT_S", 0.2)
    # A wait of an hour for it would be this test's own.
    assert not await clipboard.give_to([sys.executable, "-c", "import time; time.sleep(3600)"], "x")


async def test_a_tool_is_no_part_of_what_ctrl_z_stops(tmp_path: Path) -> None:
    file = tmp_path / "group"
    program = f"import os; open({str(file)!r}, 'w').write(f'{{os.getpgrp()}} {{os.getsid(0)}}')"
    assert await clipboard.give_to([sys.executable, "-c", program], "x")
    group, session = map(int, file.read_text().split())
    assert group != os.getpgrp()
    assert session != os.getsid(0)


async def test_a_tool_ends_with_the_copying(tmp_path: Path) -> None:
    file = tmp_path / "process"
    program = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    copying = asyncio.create_task(clipboard.give_to([sys.executable, "-c", program], "x"))
    while not file.exists() or not file.read_text():
        await asyncio.sleep(0.01)
    copying.cancel()  # as the next copy does
    with pytest.raises(asyncio.CancelledError):
        await copying
    is_running = True
    while is_running:
        await asyncio.sleep(0.01)
        is_running = _is_running(int(file.read_text()))


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_code_blocks_are_found_in_order() -> None:
    assert code_blocks(ANSWER) == ["print(1)\n", "indented\n", "last\n"]
    assert code_blocks("none `inline`") == []
    assert code_blocks("<div>\n```\nx\n```\n</div>") == ["x\n"]  # as it is shown: HTML is text
    assert code_blocks("```\ncut off") == ["cut off"]


def test_textual_still_has_what_the_shim_uses() -> None:
    assert textual.__version__.startswith("8."), "check nanochat/ui/textual_private.py against this version"
    assert callable(TextualDriver.write)
    assert callable(StylesCache.get_inner_outer.cache_clear)


async def answered(driver: Driver, text: str) -> None:
    """A finished turn with this answer."""
    driver.chat.ask("Question?")
    driver.chat.end_answer(RequestOutput(text, [1], "stop", None, None, RequestMetrics()))
    driver.pane.show_path()
    await driver.settle()


async def test_copy_takes_what_is_named(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.press("alt+c")
        await driver.until_told("There is no answer to copy yet")
        await answered(driver, ANSWER)
        for command, expected in (
            ("/copy", ANSWER),
            ("/copy answer", ANSWER),
            ("/copy code", "last\n"),
            ("/copy code 1", "print(1)\n"),
            ("/copy question", "Question?"),
            ("/copy all", f"You:\nQuestion?\n\nAssistant:\n{ANSWER}"),
        ):
            await driver.say(command)
            await driver.until(lambda expected=expected: driver.app.clipboard == expected)
        await driver.press("alt+k")
        await driver.until(lambda: driver.app.clipboard == "last\n")
        await driver.say("/copy code 7")
        await driver.until_told("has 3 code blocks")
        await driver.say("/copy nonsense")
        await driver.until_told("/copy takes the last answer")


async def test_reasoning_is_not_copied(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await answered(driver, "<think>hm</think>\nYes.")
        answer = driver.chat.last_answer
        assert answer is not None
        answer.answer.tags = ("<think>", "</think>")
        await driver.press("alt+c")
        await driver.until(lambda: driver.app.clipboard == "Yes.")


async def test_copying_reaches_the_terminal_tmux_and_the_tool(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMUX", "/tmp/tmux,1,0")
    file = tmp_path / "copied"
    program = f"import sys; open({str(file)!r}, 'w').write(sys.stdin.read())"
    monkeypatch.setattr(clipboard, "tool", lambda environment: [sys.executable, "-c", program])
    written: list[str] = []
    async with started(tiny_llama, hold=True) as driver:
        await answered(driver, "Text")
        monkeypatch.setattr(driver.app._driver, "write", written.append)
        await driver.press("alt+c")
        await driver.until(lambda: file.exists() and file.read_text() == "Text")
        sequence = clipboard.osc52("Text")
        assert written[:2] == [sequence, clipboard.through_tmux(sequence)]
        write_to_terminal(driver.app, "x")
        assert written[-1] == "x"


async def test_the_tool_can_be_turned_off(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[object] = []
    monkeypatch.setattr(clipboard, "tool", used.append)
    async with started(tiny_llama, hold=True, look=AppSettings(clipboard="terminal")) as driver:
        await answered(driver, "Text")
        await driver.press("alt+c")
        await driver.until(lambda: driver.app.clipboard == "Text")
    assert used == []
