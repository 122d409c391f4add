"""Drives the real app over a real engine with a tiny model."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.content import Content
from textual.pilot import Pilot
from textual.widgets import Static

from nanochat.backend.local import LocalBackend
from nanochat.backend.remote.config import RemoteConfig
from nanochat.engine.config import EngineConfig
from nanochat.settings import AppSettings, Preset
from nanochat.ui.actions import remapped
from nanochat.ui.app import NanochatApp
from nanochat.ui.chat import Chat
from nanochat.ui.chat_pane import ChatPane
from nanochat.ui.markdown_view import MarkdownView
from nanochat.ui.message import NoteView
from nanochat.ui.prompt import Prompt

SIZE = (120, 36)
SHORT = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
ENDLESS = {"max_tokens": 60_000, "temperature": 0.0, "ignore_eos": True}
LONG = {"num_kv_blocks": 4096, "max_model_len": 65_536}
"""Engine options for endless answers with the model ``long_llama``."""
WAIT_S = 60.0


def tiny_config(model: Path, **options: Any) -> EngineConfig:
    settings = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 512, "max_model_len": 2048}
    return EngineConfig(model=str(model), **(settings | options))


class Driver:
    """What a person at the keyboard does and sees."""

    def __init__(self, app: NanochatApp, pilot: Pilot[None], load: Callable[[], None]) -> None:
        self.app = app
        self.pilot = pilot
        self.load = load

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the app run until something holds."""
        end_s = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > end_s:
                raise AssertionError("it did not come about in time")
            await self.settle()
        await self.settle()

    async def until_ready(self) -> None:
        await self.until(lambda: self.app.main_screen.bridge is not None)

    async def until_idle(self) -> None:
        """Until no chat answers, and what has come is laid out."""
        await self.until(lambda: not self.app.main_screen.workspace.busy)
        await self.until(lambda: all(view.is_complete for view in self.pane.query(MarkdownView)))

    async def settle(self) -> None:
        """Let every widget handle what has been posted, and what that posts in turn, also on a busy machine.

        ``pause()`` without a time would wait for an idle CPU.
        """
        for _ in range(4):
            await self.pilot.pause(0.005)

    async def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        for key in keys:
            self.app.simulate_key(key)
        await self.settle()

    async def write(self, text: str) -> None:
        """Put a text into the prompt, as if typed."""
        self.prompt.insert(text)
        await self.settle()

    async def say(self, text: str) -> None:
        """Write a text and send it."""
        await self.write(text)
        await self.press("enter")

    async def ask(self, text: str) -> str:
        """Send a text and wait for the whole answer."""
        chat, before = self.chat, len(list(self.chat.messages()))
        await self.say(text)
        await self.until(lambda: len(list(chat.messages())) > before)  # a busy machine takes its time
        await self.until_idle()
        return self.answer_text()

    @property
    def chat(self) -> Chat:
        return self.app.main_screen.chat

    @property
    def pane(self) -> ChatPane:
        return self.app.main_screen.pane(self.chat)

    @property
    def prompt(self) -> Prompt:
        return self.pane.query_one(Prompt)

    def answer_text(self) -> str:
        answer = self.chat.last_answer
        assert answer is not None
        assert answer.output is not None
        return answer.output.text

    def notices(self) -> list[str]:
        """Sentences from the app in the chat in view."""
        return [plain(notice) for notice in self.pane.query(NoteView)]

    async def until_told(self, text: str) -> None:
        """Until a passing notification says something."""
        await self.until(
            lambda: any(text in told.message or text in told.title for told in self.app._notifications)
        )

    async def until_seen(self, text: str) -> None:
        """Until a text stands on the screen."""
        await self.until(lambda: text in self.screen_text())

    def screen_text(self) -> str:
        """What stands on the screen now, row by row; nothing before a new screen is drawn."""
        width, height = self.app.size
        lines = self.app.screen._compositor.render_strips()
        if not self.app.screen.is_mounted or len(lines) != height:
            return ""
        return "\n".join(strip.text[:width] for strip in lines)


def plain(static: Static) -> str:
    content = static.content
    return content.plain if isinstance(content, Content) else str(content)


@asynccontextmanager
async def started(
    model: Path | RemoteConfig,
    *,
    size: tuple[int, int] = SIZE,
    sampling: dict[str, Any] | None = None,
    system: str | None = None,
    screenshots: Path | None = None,
    look: AppSettings | None = None,
    presets: dict[str, Preset] | None = None,
    keys: dict[str, str] | None = None,
    hold: bool = False,
    history: Path | None = None,
    wait_for_history: bool = True,
    **options: Any,
) -> AsyncIterator[Driver]:
    """The app with its history open and its model loaded; with ``hold``, loading begins with ``load``.

    ``model`` may also be a server to connect with. In the end the engine must have given every block back.
    """
    app = NanochatApp(
        model if isinstance(model, RemoteConfig) else tiny_config(model, **options),
        system=system,
        sampling=SHORT if sampling is None else sampling,
        look=look or AppSettings(screenshot_folder=str(screenshots or "")),
        presets=presets,
        actions=remapped(keys or {}),
        history_file=history,
    )
    start_loading = app._loader.start
    if hold:
        app._loader.start = lambda: None  # type: ignore[method-assign]
    async with app.run_test(size=size, notifications=True) as pilot:
        driver = Driver(app, pilot, start_loading)
        if wait_for_history:
            await driver.until(lambda: app.main_screen.archive.history is not None)
        if not hold:
            await driver.until_ready()
        try:
            yield driver
        finally:
            bridge = app.main_screen.bridge if app.is_running and app.screen_stack else None
    while not app.close_engine():
        pass
    if bridge is not None and isinstance(bridge.backend, LocalBackend):
        stats = bridge.backend.engine.stats()
        assert (stats.blocks_used, stats.running, stats.waiting) == (0, 0, 0)
