"""What makes drawing cheap changes nothing on the screen."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from rich.segment import Segment
from rich.style import Style
from textual._compositor import ChopsUpdate, LayoutUpdate
from textual.app import App
from textual.screen import Screen
from textual.widgets._toast import Toast

from nanochat.settings import AppSettings
from nanochat.ui.app import NanochatApp
from nanochat.ui.blank import BlankHorizontal, BlankSwitcher, BlankVertical, BlankVerticalScroll
from nanochat.ui.main_screen import MainScreen
from tests.ui.driver import ENDLESS, LONG, SIZE, Driver, started

BLANK = (MainScreen, BlankHorizontal, BlankSwitcher, BlankVertical, BlankVerticalScroll)


async def drawn(driver: Driver) -> list[list[tuple[object, ...]]]:
    """What is seen in every line of the screen, drawn anew: each character and its colours."""
    for screen in driver.app.screen_stack:  # also what lies below a dialog
        for widget in screen.query("*"):
            widget.refresh()
        screen.refresh()
    await driver.settle()
    strips = driver.app.screen._compositor.render_strips()
    return [[cell for segment in strip for cell in cells(segment)] for strip in strips]


def cells(segment: Segment) -> list[tuple[object, ...]]:
    style = segment.style or Style()
    ground, attributes = style.bgcolor, (style.bold, style.italic, style.underline)
    return [(mark, None if mark == " " else (style.color, attributes), ground) for mark in segment.text]


@pytest.mark.parametrize("is_grey", [False, True])
@pytest.mark.parametrize("theme", ["dark", "light", "contrast"])
async def test_the_screen_is_as_without_it(
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    theme: Literal["dark", "light", "contrast"],
    is_grey: bool,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1") if is_grey else monkeypatch.delenv("NO_COLOR", raising=False)
    async with started(tiny_llama, look=AppSettings(theme=theme)) as driver:
        for question in ("First", "Second"):
            await driver.ask(question)
        await driver.say("/drop 1")  # what was left out is dimmed
        await driver.settle()
        quick = await drawn(driver)
        await driver.press("f9")
        await driver.until_seen("The chats used last")
        quick += await drawn(driver)
        await driver.press("escape")
        for cls in BLANK:
            monkeypatch.setattr(cls, "BLANK", False)
        monkeypatch.setattr(NanochatApp, "get_line_filters", App.get_line_filters)
        plain = await drawn(driver)
        assert "Second" in driver.screen_text()
        await driver.press("f9")
        await driver.until_seen("The chats used last")
        plain += await drawn(driver)
        assert len(quick) == 2 * driver.app.size.height
        for one, other in zip(quick, plain, strict=True):
            assert one == other


class Terminal:
    """What stands on a terminal that gets the app's updates, each of which tells only what has changed."""

    def __init__(self, size: tuple[int, int]) -> None:
        width, height = size
        self.rows = [[" "] * width for _ in range(height)]

    def take(self, app: App[None], screen: Screen[None], update: object) -> None:
        if isinstance(update, LayoutUpdate):
            for y, strips in enumerate(update.strips, update.region.y):
                self._write(y, update.region.x, "".join(strip.text for strip in strips), 0, len(self.rows[y]))
        elif isinstance(update, ChopsUpdate):
            for y, first, last in update.spans:
                for x, strip in update.chops[y].items():
                    if strip is not None:
                        self._write(y, x, strip.text, first, last)

    def _write(self, y: int, x: int, text: str, first: int, last: int) -> None:
        for column, mark in enumerate(text, x):
            if first <= column < last:
                self.rows[y][column] = mark

    @property
    def text(self) -> str:
        return "\n".join("".join(row) for row in self.rows)


async def test_notices_leave_nothing_behind_while_answers_come(
    long_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(SIZE)
    monkeypatch.setattr(NanochatApp, "_display", lambda *update: terminal.take(*update))
    async with started(long_llama, sampling=ENDLESS, **LONG) as driver:
        await driver.say("First")
        await driver.press("ctrl+n")
        await driver.say("/compare temperature=0 | temperature=1")
        for number in range(4):
            text = f"notice {number} that is long enough to reach over the panel"
            driver.app.notify(text, timeout=0.5 + 0.4 * number)
        await driver.until(lambda: "notice 3" in terminal.text)
        await driver.until(lambda: not driver.app._notifications and not driver.app.screen.query(Toast))
        await driver.press("f3", "f3", "escape", "f3", "escape", "f3", "escape")
        await driver.until_idle()
        await driver.until(lambda: terminal.text == driver.screen_text())
        assert "notice" not in terminal.text
