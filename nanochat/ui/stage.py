"""Drives the running app as a person would, for demonstrations and pictures: ask, wait, look."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from textual.pilot import Pilot

from nanochat.errors import NanochatError
from nanochat.ui.app import NanochatApp
from nanochat.ui.chat import Chat
from nanochat.ui.main_screen import MainScreen

TICK_S = 0.05


class Stage:
    """The app with nobody in front of it."""

    def __init__(self, app: NanochatApp, pilot: Pilot[Any]) -> None:
        self.app = app
        self.pilot = pilot

    @property
    def main(self) -> MainScreen:
        """The screen with the chats."""
        return self.app.main_screen

    async def until(self, condition: Callable[[], object], limit_s: float, what: str) -> None:
        """Let the app run until something holds.

        Raises:
            NanochatError: the model could not be loaded, or it took longer than ``limit_s``.
        """
        end_s = time.monotonic() + limit_s
        while not condition():
            if self.app.load_error is not None:
                raise NanochatError(self.app.load_error)
            if time.monotonic() > end_s:
                raise NanochatError(f"{what} took longer than {limit_s:g} seconds.")
            await asyncio.sleep(TICK_S)
        await self.pilot.pause(TICK_S)

    async def until_loaded(self, limit_s: float = 600.0) -> None:
        """Until the model takes requests."""
        await self.until(lambda: self.main.bridge is not None, limit_s, "Loading the model")

    async def until_idle(self, limit_s: float = 300.0) -> None:
        """Until no chat is answering."""
        await self.until(lambda: not self.main.workspace.busy, limit_s, "Answering")

    async def until_said(self, num_tokens: int, limit_s: float = 300.0) -> None:
        """Until every answer under way has so many tokens or has ended."""

        def have_said() -> bool:
            live = [chat.live for chat in self.main.workspace.chats if chat.live is not None]
            return all(message.answer.num_tokens >= num_tokens for message in live)

        await self.until(have_said, limit_s, "Answering")

    async def new_tab(self) -> Chat:
        """Open a tab; returns its chat, now in view."""
        await self.main.action_new_chat()
        return self.main.chat

    async def fork(self) -> Chat:
        """Fork the chat in view; returns the fork, now in view."""
        await self.main.action_fork_chat()
        return self.main.chat

    async def show(self, number: int) -> None:
        """Bring a tab into view, counted from 1."""
        self.main.action_jump(number)
        await self.pilot.pause(TICK_S)

    def ask(self, text: str) -> None:
        """Send a message in the chat in view."""
        self.main.ask(self.main.chat, text)

    async def picture(self) -> str:
        """The screen as SVG, once everything is drawn."""
        self.main.show_stats()
        await self.pilot.pause(TICK_S)
        return self.app.export_screenshot(title="nanochat")
