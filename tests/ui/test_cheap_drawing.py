"""What makes drawing cheap changes nothing on the screen."""

from __future__ import annotations

import asyncio
import gc
import inspect
import random
import time
from pathlib import Path
from typing import Literal

import pytest
import textual
from rich.segment import Segment
from rich.style import Style
from textual._compositor import ChopsUpdate, Compositor, LayoutUpdate
from textual.app import App
from textual.geometry import Region
from textual.screen import UPDATE_PERIOD, Screen
from textual.scrollbar import ScrollBar
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets._toast import Toast

from nanochat.settings import AppSettings
from nanochat.ui.app import NanochatApp
from nanochat.ui.blank import BlankHorizontal, BlankSwitcher, BlankVertical, BlankVerticalScroll
from nanochat.ui.chat_screen import TIDY_ROUNDS, TIDY_S
from nanochat.ui.chrome import Header
from nanochat.ui.loader import YOUNG_ROUNDS
from nanochat.ui.main_screen import MainScreen
from nanochat.ui.markdown_view import MarkdownView
from nanochat.ui.recent import Recent
from nanochat.ui.transcript import Transcript
from tests.ui.driver import ENDLESS, LONG, SIZE, Driver, started
from tests.ui.test_screen import Scripted, output

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
            driver.app.notify(text, timeout=600.0)
        await driver.until(lambda: "notice 3" in terminal.text)
        for notification in list(driver.app._notifications):
            driver.app._unnotify(notification)
            await driver.settle()
        await driver.until(lambda: not driver.app._notifications and not driver.app.screen.query(Toast))
        await driver.press("f3", "f3", "escape", "f3", "escape", "f3", "escape")
        await driver.until_idle()
        await driver.until(lambda: terminal.text == driver.screen_text())
        assert "notice" not in terminal.text


def test_textual_still_has_what_the_lean_compositor_uses() -> None:
    assert textual.__version__.startswith("8."), "check nanochat/ui/textual_private.py against this version"
    for name in ("cuts", "visible_widgets", "_regions_to_spans", "render_partial_update"):
        assert hasattr(Compositor, name)
    assert Compositor()._dirty_regions == set()
    assert callable(Screen._on_timer_update)
    assert inspect.iscoroutinefunction(Screen._on_idle)
    assert {"_layout_required", "_scroll_required", "_dirty_widgets"} <= vars(Screen()).keys()
    parameters = ["self", "size", "virtual_size", "container_size", "layout"]
    assert list(inspect.signature(Widget._size_updated).parameters) == parameters
    assert {"_layout_cache", "_size", "_container_size", "_vertical_scrollbar"} <= vars(Widget()).keys()


def changed(update: ChopsUpdate | None) -> dict[tuple[int, int], tuple[object, ...]]:
    """What an update writes where it has to: a character and its colours by row and column."""
    found = {}
    for y, first, last in update.spans if update is not None else ():
        for x, strip in update.chops[y].items():
            for column, cell in enumerate((c for s in strip or () for c in cells(s)), x):
                if first <= column < last:
                    found[y, column] = cell
    return found


async def test_what_is_drawn_of_a_change_is_what_textual_draws(tiny_llama: Path) -> None:
    randoms = random.Random(1)
    async with started(tiny_llama) as driver:
        for question in ("First", "Second", "Third"):
            await driver.ask(question)
        driver.app.notify("A notice that lies above the panel")
        await driver.until_seen("A notice that")
        screen = driver.app.screen
        compositor = screen._compositor
        assert type(compositor) is not Compositor
        width, height = driver.app.size
        for _ in range(100):
            regions = set()
            for _ in range(randoms.randint(1, 4)):
                x, y = randoms.randrange(-5, width), randoms.randrange(-5, height)
                regions.add(Region(x, y, randoms.randint(1, width - x), randoms.choice((1, 1, height - y))))
            for widget in randoms.sample(list(compositor.visible_widgets), 2):
                widget.refresh()
            compositor._dirty_regions = set(regions)
            lean = compositor.render_partial_update()
            on_screen = {region.intersection(driver.app.size.region) for region in regions}
            compositor._dirty_regions = {region for region in on_screen if region}
            plain = Compositor.render_partial_update(compositor)
            assert changed(lean) == changed(plain)
            assert len(changed(lean)) == sum(
                last - first for _, first, last in (plain.spans if plain else ())
            )
        assert compositor.render_partial_update() is None


async def test_a_widget_that_has_not_heard_of_its_new_size_leaves_no_hole(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines are too short, or too few: what stood there before is not left on the screen."""
    render_lines = Widget.render_lines

    def late(self: Widget, crop: Region) -> list[Strip]:
        strips = render_lines(self, crop)
        return [strip.crop(0, crop.width // 3) for strip in strips[: max(1, len(strips) // 2)]]

    async with started(tiny_llama) as driver:
        await driver.ask("First")
        compositor = driver.app.screen._compositor
        with monkeypatch.context() as patch:
            for cls in (Widget, MarkdownView):
                patch.setattr(cls, "render_lines", late)
            compositor._dirty_regions = {driver.app.size.region}
            assert len(changed(compositor.render_partial_update())) == driver.app.size.area
        await driver.press("f2")
        await driver.until_seen("First")


async def test_a_new_line_lays_the_screen_out_once_and_draws_no_other_line_anew(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts, drawn_lines = [], []
    reflow, draw = Compositor.reflow, MarkdownView._draw
    monkeypatch.setattr(Compositor, "reflow", lambda *given: layouts.append(1) or reflow(*given))
    monkeypatch.setattr(
        MarkdownView,
        "_draw",
        lambda view, line, y, width: drawn_lines.append(y) or draw(view, line, y, width),
    )
    async with started(tiny_llama) as driver:
        answer = Scripted(driver)
        await answer.start()
        await answer.push("one\n\ntwo\n\nthree")
        await driver.until_seen("three")
        await driver.settle()
        layouts.clear()
        drawn_lines.clear()
        await answer.push("\n\nfour")
        await driver.until_seen("four")
        await driver.settle()
        assert len(layouts) == 1
        assert set(drawn_lines) == {4, 5, 6}  # the cursor stood in the first
        await answer.end(output("one\n\ntwo"))
        await driver.until(lambda: "four" not in driver.screen_text())


async def test_a_scroll_bar_is_drawn_anew_when_it_looks_other_than_before(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tiny_llama) as driver:
        answer = Scripted(driver)
        await answer.start()
        await answer.push("line\n\n" * 300)
        bar = driver.pane.query_one(Transcript).vertical_scrollbar
        await driver.until(lambda: bar.display and bar.window_virtual_size > 600)
        refreshed: list[ScrollBar] = []
        refresh = ScrollBar.refresh
        monkeypatch.setattr(
            ScrollBar,
            "refresh",
            lambda bar, *given, **by: refreshed.append(bar) or refresh(bar, *given, **by),
        )

        def seen() -> list[list[tuple[object, ...]]]:
            strips = bar.render_lines(bar.size.region)
            return [[cell for segment in strip for cell in cells(segment)] for strip in strips]

        redrawn: list[bool] = []
        for number in range(6):
            size, shown = bar.window_virtual_size, len(refreshed)
            await answer.push("more\n\n" * (100 if number == 3 else 1))
            await driver.until(lambda size=size: bar.window_virtual_size > size)
            redrawn.append(len(refreshed) > shown)
            as_drawn = seen()
            refresh(bar)
            assert seen() == as_drawn
        assert redrawn[3]
        assert sum(redrawn) <= 3
        driver.pane.scroll_page(-1)
        await driver.settle()
        assert seen() != as_drawn
        for change in ({"mouse_over": True}, {"mouse_over": False}):
            before = seen()
            for name, value in change.items():
                setattr(bar, name, value)
            await driver.settle()
            assert seen() != before
        await answer.end(output("done"))


async def test_what_changes_is_drawn_at_once_and_sixty_times_a_second_at_most(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tiny_llama) as driver:
        screen, header = driver.app.main_screen, driver.app.main_screen.query_one(Header)
        await driver.settle()
        frames: list[float] = []
        lean = type(screen._compositor).render_partial_update
        monkeypatch.setattr(
            type(screen._compositor),
            "render_partial_update",
            lambda compositor: frames.append(time.monotonic()) or lean(compositor),
        )
        for _ in range(100):
            header.refresh()
            await asyncio.sleep(0.001)
        await driver.settle()
        assert 2 <= len(frames) <= 60 * (frames[-1] - frames[0]) + 2
        await asyncio.sleep(2 * UPDATE_PERIOD)
        resumed: list[int] = []
        monkeypatch.setattr(screen._update_timer, "resume", lambda: resumed.append(1))
        count = len(frames)
        header.refresh()
        await driver.until(lambda: len(frames) > count)
        assert not resumed


def test_a_growing_text_leaves_nothing_behind() -> None:
    recent: Recent[int, str] = Recent()
    for number in range(10):
        recent.keep(number, str(number))
        assert recent.get(0) == "0"
        assert recent.get(number - 2) == (str(number - 2) if number == 2 else None)
        recent.forget_unused()
    recent.forget_unused()
    assert recent.get(0) is None


async def test_garbage_is_looked_for_when_nothing_is_answered(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected = []
    async with started(tiny_llama, sampling=ENDLESS) as driver:
        monkeypatch.setattr(gc, "collect", lambda: collected.append(driver.app.main_screen.workspace.busy))
        monkeypatch.setattr(gc, "get_count", lambda: (0, 0, TIDY_ROUNDS))
        assert gc.get_threshold()[2] == YOUNG_ROUNDS
        await driver.say("First")
        await driver.until_seen("tokens")
        driver.app.main_screen._tidy()
        assert not collected  # it would stop the answer
        await driver.press("escape")
        await driver.until_idle()
        await driver.pilot.pause(TIDY_S)
        await driver.until(lambda: collected)
        assert collected == [[]]
