"""What stands between a paste's marks arrives as one paste, whatever it is and however it comes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import events
from textual._xterm_parser import XTermParser
from textual.message import Message

from nanochat.history import History
from nanochat.ui.paste_guard import BEGIN, END, SEQUENCE_S
from nanochat.ui.textual_private import let_pastes_be_pastes
from tests.terminal import WAIT_S, until
from tests.test_signals import running_app

ATTACK = "x\x1b[31m\r/rename PWNED\r" + "1234567890" * 8 + "\rsent\x1b\x1b[A\r"
PIECES = st.sampled_from(
    ["\x1b", "\x1b[", "[20", "0~", "1~", "\x1b[200", "\x1b[201", "\x1b[31m", "\r", "\n", "ä", "x" * 40]
)


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(XTermParser, "feed", XTermParser.feed)  # put back afterwards
    let_pastes_be_pastes()


def received(parser: XTermParser, pieces: Sequence[str]) -> list[Message]:
    return [message for piece in pieces for message in parser.feed(piece)]


def described(messages: list[Message]) -> list[str]:
    return [f"paste {m.text}" if isinstance(m, events.Paste) else f"key {m.key}" for m in messages]  # type: ignore[attr-defined]


@given(
    st.lists(st.lists(PIECES, max_size=12).map("".join), min_size=1, max_size=3),
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
)
def test_pastes_between_keys_cut_anywhere(texts: list[str], sizes: list[int]) -> None:
    texts = [text.replace(BEGIN, "").replace(END, "").rstrip("\x1b[201~") + "x" for text in texts]
    data = "".join(f"a{BEGIN}{text}{END}" for text in texts) + "b"
    pieces, count = [], 0
    while data:
        size = sizes[count % len(sizes)]
        pieces.append(data[:size])
        data, count = data[size:], count + 1
    expected = [line for text in texts for line in ("key a", f"paste {text}")]
    assert described(received(XTermParser(), pieces)) == [*expected, "key b"]


def test_what_would_have_run_a_command_is_one_paste() -> None:
    assert described(received(XTermParser(), [f"{BEGIN}{ATTACK}{END}"])) == [f"paste {ATTACK}"]


def test_escape_and_then_what_looks_like_a_mark_are_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr("nanochat.ui.paste_guard.time.monotonic", lambda: now)
    parser = XTermParser()
    assert described([*received(parser, ["\x1b"])]) == []
    now += 2 * SEQUENCE_S
    messages = received(parser, ["[200~"])
    assert not any(isinstance(message, events.Paste) for message in messages)
    assert parser.paste_guard.hide("\x1b[A") == "\x1b[A"  # type: ignore[attr-defined]


@pytest.mark.slow
def test_in_a_real_terminal_it_stays_in_the_prompt(long_llama: Path, tmp_path: Path) -> None:
    with running_app(long_llama, tmp_path) as terminal:
        terminal.send(f"{BEGIN}{ATTACK}{END}")
        until(lambda: b"sent" in terminal.written.rpartition(b"unsent")[2])
        terminal.send("\x11")
        assert terminal.wait(WAIT_S) == 0
    with History(tmp_path / "history.db") as history:
        (chat,) = history.restore_tabs()
        assert (len(history.path(chat.id)), chat.title) == (2, "question")
        assert "PWNED" in (chat.draft or "")
