"""Whatever a text holds and whichever way it comes, the terminal gets printable text, and gets it soon.

What is looked at are the very characters that Textual's driver would write to the terminal.
"""

from __future__ import annotations

import json
import re
import time
import unicodedata
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.drivers.headless_driver import HeadlessDriver

from nanochat.cli import main
from nanochat.engine.handle import RequestHandle
from nanochat.engine.outputs import Event, RequestMetrics, RequestOutput
from nanochat.history import History
from nanochat.sanitize import sanitize
from nanochat.ui.app import NanochatApp
from nanochat.ui.markdown_document import MarkdownDocument
from nanochat.ui.transcript import Transcript
from tests.hostile import HOSTILE, LONG, SHORT
from tests.test_cli import Output
from tests.ui.driver import Driver, started

SOON_S = 5.0
"""For one text, on a busy machine."""

TALL = (100, 150)
"""Only what is in view is drawn."""

# What Textual itself writes: colours, cursor moves, modes, the pointer's shape; no other strings (OSC, DCS, APC).
_OWN_SEQUENCES = re.compile(
    r"\x1b\]22;[a-z-]+\x07|\x1b\[[0-9;]*[mHABCDKJ]|\x1b\[\?(25|2026|2048|1049|7)[hl]|\x1b\[<u"
)
_KEPT_FORMATS = "\u200c\u200d"


def unprintable(text: str) -> list[str]:
    """Characters a terminal might obey or would hide."""
    return [
        character
        for character in set(text)
        if character not in "\n\r"
        and character not in _KEPT_FORMATS
        and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    ]


class Recorder(HeadlessDriver):
    """A terminal that keeps what it is sent."""

    sent: list[str]

    @property
    def is_headless(self) -> bool:
        return False

    def write(self, data: str) -> None:
        self.__dict__.setdefault("sent", []).append(data)

    def take(self) -> str:
        """What has come since the last call."""
        sent, self.sent = "".join(self.__dict__.get("sent", [])), []
        return sent


def check_sent(sent: str) -> None:
    plain = _OWN_SEQUENCES.sub("", sent)
    assert not unprintable(plain), (unprintable(plain), plain[:500])


@asynccontextmanager
async def recorded(
    model: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> AsyncIterator[tuple[Driver, Recorder]]:
    """The app drawing for a :class:`Recorder`."""
    run_test = NanochatApp.run_test
    monkeypatch.setattr(NanochatApp, "get_driver_class", lambda _: Recorder)
    monkeypatch.setattr(NanochatApp, "run_test", lambda app, **how: run_test(app, headless=False, **how))
    async with started(model, size=TALL, **options) as driver:
        terminal = driver.app._driver
        assert isinstance(terminal, Recorder)
        yield driver, terminal
        check_sent(terminal.take())


def answering(driver: Driver, monkeypatch: pytest.MonkeyPatch, texts: Iterable[str]) -> None:
    """The next answers are these, in pieces of odd lengths."""
    bridge, answers = driver.app.main_screen.bridge, iter(texts)
    assert bridge is not None

    def submit(*_: Any, **options: Any) -> RequestHandle:
        text = next(answers)
        handle = RequestHandle(1, lambda _: None)
        step = max(3, len(text) // 7)
        for start in range(0, len(text), step):
            handle.push(Event(text[start : start + step], (1,)))
        handle.push(
            Event("", (2,), "stop"), RequestOutput(text, [1, 2], "stop", None, None, RequestMetrics())
        )
        return handle

    monkeypatch.setattr(bridge.backend.engine, "submit", submit)


def storable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


async def see_all(driver: Driver) -> None:
    """From the end to the beginning of the chat in view."""
    transcript = driver.pane.query_one(Transcript)
    transcript.scroll_home(animate=False)
    await driver.settle()
    transcript.scroll_end(animate=False)
    await driver.settle()


def groups(size: int) -> list[str]:
    """The short texts, some in each."""
    texts = list(SHORT.values())
    return ["\n\n".join(texts[start : start + size]) for start in range(0, len(texts), size)]


def test_there_are_enough_of_them() -> None:
    assert len(HOSTILE) >= 200


@pytest.mark.parametrize("name", HOSTILE)
def test_cleaning_leaves_printable_text_and_is_quick(name: str) -> None:
    started_s = time.thread_time()
    cleaned = sanitize(HOSTILE[name])
    assert time.thread_time() - started_s < SOON_S
    assert not unprintable(cleaned.replace("\t", ""))
    assert sanitize(cleaned) == cleaned


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_laying_out_leaves_printable_text_and_is_quick(name: str) -> None:
    started_s = time.thread_time()
    document = MarkdownDocument(sanitize(HOSTILE[name]))
    document.layout(80)
    assert time.thread_time() - started_s < SOON_S
    assert not unprintable("".join(line.content.plain for line in document.lines))


@pytest.mark.parametrize(
    "scheme", ["https://", "http://", "mailto:", "HTTPS://", "ssh://", "file://", "vscode:", "//"]
)
def test_only_links_to_the_web_and_to_mail_look_like_links(scheme: str) -> None:
    document = MarkdownDocument(f"[here]({scheme}example.org)")
    document.layout(80)
    styles = [str(span.style) for line in document.lines for span in line.content.spans]
    assert (".link" in styles) == (scheme.lower() in ("https://", "http://", "mailto:"))
    assert "example.org" in "".join(line.content.plain for line in document.lines)


async def test_generated(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with recorded(tiny_llama, monkeypatch) as (driver, terminal):
        texts = groups(24)
        answering(driver, monkeypatch, texts)
        for number, _ in enumerate(texts):
            await driver.say(f"question {number}")
            await driver.until_idle()
            await driver.settle()
            sent = terminal.take()
            check_sent(sent)
            assert number in (2, 3) or "user" in sent or "␛" in sent  # it was drawn
        await see_all(driver)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
async def test_generated_at_length(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    async with recorded(tiny_llama, monkeypatch) as (driver, terminal):
        answering(driver, monkeypatch, [LONG[name]])
        started_s = time.thread_time()
        await driver.say("question")
        await driver.until_idle()
        await see_all(driver)
        assert time.thread_time() - started_s < 2 * SOON_S
        check_sent(terminal.take())


async def test_typed_and_sent(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a terminal reports as keys; a key that is no character types nothing."""
    async with recorded(tiny_llama, monkeypatch) as (driver, terminal):
        answering(driver, monkeypatch, ["fine"] * 99)
        for text in ["".join(SHORT[name][:40] for name in list(SHORT)[start::40]) for start in range(40)]:
            for character in dict.fromkeys(text):
                if character not in "\t\n\r\x1b":
                    driver.prompt.post_message(events.Key("k", character))
            await driver.settle()
        await driver.press("enter")
        await driver.until_idle()
        await see_all(driver)
        check_sent(terminal.take())


async def test_pasted_and_sent(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with recorded(tiny_llama, monkeypatch) as (driver, terminal):
        texts = [*groups(40), "\x1b]52;c;ZXZpbA==\a" * 60_000]
        answering(driver, monkeypatch, ["fine"] * len(texts))
        for text in texts:
            driver.prompt.post_message(events.Paste(text))
            await driver.settle()
            await driver.press("enter")
            await driver.until_idle()
        await see_all(driver)
        check_sent(terminal.take())
        assert driver.app.clipboard == ""


def write_history(path: Path) -> None:
    with History(path) as history:
        chats = []
        for number, text in enumerate(groups(60)):
            chat = history.create_chat(storable(text[:200]), system=text, model=text[:100])
            question = history.add_message(chat, None, text)
            answer = history.begin_answer(chat, question, text[:100])
            failed = text[:500] if number % 2 else None
            history.finish_answer(answer, text=text, token_ids=[1], finish_reason="stop", error=failed)
            chats.append(chat)
        history.save_tabs(chats)


async def test_loaded_from_the_history(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_history(tmp_path / "history.db")
    async with recorded(tiny_llama, monkeypatch, history=tmp_path / "history.db") as (driver, terminal):
        await driver.until(lambda: len(driver.app.main_screen.workspace.chats) > 3)
        for _ in driver.app.main_screen.workspace.chats:
            await see_all(driver)
            await driver.app.main_screen.run_action("do('edit')")
            await driver.settle()
            await driver.app.main_screen.run_action("do('next_chat')")
            await driver.settle()
            check_sent(terminal.take())


async def test_a_message_that_is_edited(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with History(tmp_path / "history.db") as history:
        chat = history.create_chat("Chat")
        history.add_message(chat, None, "edit \x1b[2J\u202e\x9b31m this")
        history.save_tabs([chat])
    async with recorded(tiny_llama, monkeypatch, history=tmp_path / "history.db") as (driver, terminal):
        await driver.say("/edit")
        await driver.until(lambda: "edit" in driver.prompt.text)
        check_sent(terminal.take())
        assert driver.prompt.text == "edit ␛[2J\ufffd31m this"


async def test_in_dialogs(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with History(tmp_path / "history.db") as history:
        chat = history.create_chat("Title \x1b[2J [/bold]", system="system \x1b[2J\u202e\x9b31m [/bold]")
        history.add_message(chat, None, "question")
        history.save_tabs([chat])
    async with recorded(tiny_llama, monkeypatch, history=tmp_path / "history.db") as (driver, terminal):
        await driver.until(lambda: driver.chat.title != "New chat")
        for command, shown in (
            ("settings", "Settings of this chat"),
            ("rename", "Title ␛[2J"),
            ("search", "Search"),
        ):
            await driver.app.main_screen.run_action(f"do('{command}')")
            await driver.until_seen(shown)
            for field in driver.app.screen.query("Input, TextArea"):
                field.post_message(events.Paste("p\x1b]52;c;ZXZpbA==\aq\u202e"))
            await driver.settle()
            check_sent(terminal.take())
            await driver.press("escape")


async def test_imported(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_history(tmp_path / "other.db")
    files = []
    with History(tmp_path / "other.db") as history:
        for chat in history.list_chats():
            files.append(tmp_path / f"{chat.id}.json")
            files[-1].write_text(history.export_json(chat.id))
            assert not unprintable(history.export_markdown(chat.id).replace("\t", ""))
    async with recorded(tiny_llama, monkeypatch, history=tmp_path / "history.db") as (driver, terminal):
        for number, file in enumerate(files, start=1):
            await driver.say(f"/import {file}")
            await driver.until(lambda n=number: len(driver.app.main_screen.workspace.chats) >= n)
            await see_all(driver)
            check_sent(terminal.take())


@pytest.mark.parametrize("kind", ["answer", "error"])
def test_asked_on_a_terminal(
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    text = "".join(HOSTILE.values()) if kind == "answer" else "".join(SHORT.values())
    error = None if kind == "answer" else text

    def submit(*_: Any, **options: Any) -> RequestHandle:
        handle = RequestHandle(1, lambda _: None)
        for start in range(0, len(text), 9_999):
            handle.push(Event(text[start : start + 9_999], (1,)))
        output = RequestOutput(text, [1], "stop" if error is None else "error", error, None, RequestMetrics())
        handle.push(Event("", (), output.finish_reason), output)
        return handle

    monkeypatch.setattr("nanochat.engine.engine.Engine.submit", submit)
    terminal = Output(terminal=True)
    monkeypatch.setattr("sys.stdout", terminal)
    status = main(["ask", "Hi", "--model", str(tiny_llama), "--device", "cpu", "--kv-blocks", "64"])
    assert status == (0 if error is None else 1)
    assert not unprintable(terminal.text.replace("\t", ""))
    assert not unprintable(capsys.readouterr().err)


def test_json_of_hostile_answers_is_one_line_of_ascii(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    text = storable("".join(SHORT.values()))

    def submit(*_: Any, **options: Any) -> RequestHandle:
        handle = RequestHandle(1, lambda _: None)
        handle.push(Event(text, (1,), "stop"), RequestOutput(text, [1], "stop", None, None, RequestMetrics()))
        return handle

    monkeypatch.setattr("nanochat.engine.engine.Engine.submit", submit)
    options = ["--json", "--model", str(tiny_llama), "--device", "cpu", "--kv-blocks", "64"]
    assert main(["ask", "Hi", *options]) == 0
    line = capsys.readouterr().out
    assert line.isascii()
    assert line.count("\n") == 1
    assert json.loads(line)["text"] == text
