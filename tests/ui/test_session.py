"""A whole session in a real terminal: what xterm's keys do, how it ends, and what it leaves behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from nanochat.history import History
from tests.terminal import ENDLESS, WAIT_S, Terminal, until

TABS = 8


@pytest.mark.slow
def test_eight_busy_tabs_in_a_terminal_and_a_quick_way_out(long_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(ENDLESS)
    environment = os.environ | {"TERM": "xterm-256color", "NANOCHAT_DATA_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "nanochat", "--model", str(long_llama)]
    terminal = Terminal([*command, "--config", str(tmp_path / "config.toml")], environment)
    try:
        until(lambda: b"\x1b[?1049h" in terminal.written)
        until(lambda: b"kv float32" in terminal.written)
        with History(tmp_path / "history.db") as other:
            for number in range(TABS):
                terminal.send(f"chat {number}\r" if number == 0 else f"\x0echat {number}\r")
                until(lambda number=number: len(other.list_chats()) == number + 1)
            ids = {chat.title: chat.id for chat in other.list_chats()}
            until(lambda: all(other.path(chat_id)[1].text for chat_id in ids.values()))
            terminal.send("\x1b3")  # Alt 3
            time.sleep(0.5)
            terminal.send("\x072")  # ^G, 2
            until(lambda: other.chat(ids["chat 1"]).is_in_view)
        terminal.send("\x11")
        assert terminal.wait(WAIT_S) == 0
    finally:
        terminal.process.kill()
    assert terminal.written.rfind(b"\x1b[?1049l") > terminal.written.rfind(b"\x1b[?1049h")
    assert b"\x1b[?25h" in terminal.written[terminal.written.rfind(b"\x1b[?1049l") - 200 :]
    assert b"Traceback" not in terminal.written
    with History(tmp_path / "history.db") as history:
        tabs = history.restore_tabs()
        assert [chat.title for chat in tabs] == [f"chat {number}" for number in range(TABS)]
        assert [chat.title for chat in tabs if chat.is_in_view] == ["chat 1"]
        for chat in tabs:
            question, answer = history.path(chat.id)
            assert question.text == chat.title
            assert answer.state == "interrupted"
            assert answer.text
