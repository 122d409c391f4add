"""What stands on the screen: hostile text, small screens, resizing, reasoning, errors, and a failed start."""

from __future__ import annotations

import asyncio
import time
import unicodedata
from pathlib import Path

import pytest
from markdown_it.tree import SyntaxTreeNode

from benchmarks.ui import hide_answers, show_answers
from nanochat.engine.handle import RequestHandle
from nanochat.engine.outputs import Event, RequestMetrics, RequestOutput
from nanochat.engine.request import FinishReason
from nanochat.ui import chat_screen
from nanochat.ui.bridge import AnswerStarted
from nanochat.ui.chat_screen import MIN_POLL_S
from nanochat.ui.markdown_layout import MarkdownLayout
from nanochat.ui.markdown_view import MarkdownView
from nanochat.ui.message import AnswerMessage
from nanochat.ui.stage import Stage
from tests.ui.driver import ENDLESS, LONG, Driver, started

HOSTILE = (
    "\x1b[31mred\x1b]52;c;aGk=\x07 \x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\ [bold red]markup[/] \u202eoverride "
    "&#27;[2J \u2028 \x0b \x0c \x9b31m " + "\u0301" * 3000 + " " + "w" * 10_000 + "\u200b" * 1000
)


def output(text: str, reason: FinishReason = "stop", error: str | None = None) -> RequestOutput:
    return RequestOutput(text, [1] * 8, reason, error, None, RequestMetrics(20, 16, 8, 0.0, 0.05, 99.0, 2))


class Scripted:
    """An answer whose text is given here instead of by the model, so that any text can be shown."""

    def __init__(self, driver: Driver, tags: tuple[str, str] | None = None) -> None:
        self._driver = driver
        self._handle = RequestHandle(1_000_000, lambda _: None)
        self.chat_id = driver.chat.id
        self._tags = tags

    async def start(self, *, is_sent: bool = True) -> None:
        main = self._driver.app.main_screen
        chat = self._driver.chat
        assert main.bridge is not None
        self._driver.pane.show_turn(chat.ask("Question"))
        if is_sent:
            main.poll_soon()
        main.post_message(AnswerStarted(chat.id, self._handle, self._tags))
        await self._driver.settle()

    async def rest(self, pause_s: float) -> None:
        """Until the app won't look for more text for about so long."""
        main = self._driver.app.main_screen
        assert main.bridge is not None
        main.bridge.report_cost(self.chat_id, None, now_s=time.monotonic() + pause_s)
        await self._driver.until(lambda: next_look_s(self._driver) > pause_s / 2)

    async def push(self, text: str) -> None:
        self._handle.push(Event(text, (1, 2)))
        await self._driver.pilot.pause(0.06)

    async def end(self, final: RequestOutput, *, is_last: bool = True) -> None:
        self._handle.push(Event("", (), final.finish_reason), final)
        if is_last:
            await self._driver.until_idle()
        else:
            await self._driver.until(lambda: not self._driver.chat.is_busy)


def next_look_s(driver: Driver) -> float:
    """Seconds until the app looks for what has come."""
    timer = driver.app.main_screen._next_poll
    return timer.when() - asyncio.get_running_loop().time() if timer is not None else 0.0


def shown(driver: Driver) -> str:
    (view,) = driver.pane.query(MarkdownView)
    return view.text


async def test_hostile_text_reaches_the_screen_as_harmless_characters(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        answer = Scripted(driver)
        await answer.start()
        for start in range(0, len(HOSTILE), 1500):
            await answer.push(HOSTILE[start : start + 1500])
        await answer.end(output(HOSTILE))
        text = driver.screen_text()
        assert {char for char in text if unicodedata.category(char) in ("Cc", "Cf")} <= {"\n"}
        assert "␛[31mred" in shown(driver)
        assert "[bold red]markup[/]" in shown(driver)
        assert shown(driver).count("w") >= 10_000


async def test_what_begins_or_is_stopped_is_looked_for_at_once_while_another_chat_rests(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_screen, "MAX_STATS_S", 60.0)
    async with started(tiny_llama, sampling=ENDLESS) as driver:
        resting = Scripted(driver)
        await resting.start()
        await resting.rest(30.0)
        await driver.press("ctrl+n")
        late = Scripted(driver)
        await late.start(is_sent=False)
        assert next_look_s(driver) <= MIN_POLL_S  # the backend has taken it
        await late.rest(30.0)
        await driver.press("ctrl+n")
        bridge = driver.app.main_screen.bridge
        assert bridge is not None
        looks: list[float] = []
        poll = bridge.poll
        monkeypatch.setattr(bridge, "poll", lambda: looks.append(time.monotonic()) or poll())
        monkeypatch.setattr(bridge, "submit", lambda chat: None)
        await driver.say("Sent, but not taken yet")
        await driver.until(lambda: looks)
        driver.chat.withdraw()
        await driver.until(lambda: next_look_s(driver) > 10)
        await driver.press("alt+2", "escape")
        for _ in range(20):  # also when the end takes its time
            assert next_look_s(driver) <= MIN_POLL_S
            await driver.settle()
        await late.end(output("Late"), is_last=False)
        await driver.until(lambda: next_look_s(driver) > 10)
        await driver.press("alt+1", "escape")
        await resting.end(output("Rested"))


async def test_the_benchmark_holds_back_what_comes(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        stage = Stage(driver.app, driver.pilot)
        answer = Scripted(driver)
        await answer.start()
        hide_answers(stage)
        await driver.pilot.pause(0.3)
        await answer.push("Held back")
        await driver.pilot.pause(0.3)
        assert driver.chat.live is not None
        assert driver.chat.live.answer.text == ""
        show_answers(stage)
        await driver.until_seen("Held back")
        await answer.end(output("Held back"))


@pytest.mark.parametrize("step", [3, 50])
async def test_a_streamed_answer_looks_like_a_fresh_one(tiny_llama: Path, step: int) -> None:
    text = "# Head\n\n1. one\n2. two\n   - deep\n\n```py\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | 中文 |\n\nend ❤️"
    async with started(tiny_llama) as driver:
        answer = Scripted(driver)
        await answer.start()
        for start in range(0, len(text), step):
            await answer.push(text[start : start + step])
        await answer.end(output(text))
        (view,) = driver.pane.query(MarkdownView)
        streamed = view.text
        view.replace(text)
        await driver.settle()
        assert view.text == streamed
        assert view.size.height == len(streamed.split("\n"))


async def test_an_answer_can_be_selected_line_by_line(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        answer = Scripted(driver)
        await answer.start()
        await answer.push("# First\n\n- second **line**\n")
        await answer.end(output("# First\n\n- second **line**\n"))
        (view,) = driver.pane.query(MarkdownView)
        await driver.pilot.mouse_down(view, offset=(0, 0))
        await driver.pilot.hover(view, offset=(10, 2))
        await driver.pilot.mouse_up(view, offset=(10, 2))
        await driver.settle()
        selected = driver.app.screen.get_selected_text()
        assert selected is not None
        assert selected.rstrip().startswith("First\n\n• second")


async def test_colours_can_be_switched(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        await driver.ask("Hello")
        await driver.say("/theme")
        assert driver.app.theme == "nanochat-light"
        await driver.say("/theme dark")
        assert driver.app.theme == "nanochat-dark"


async def test_reasoning_is_folded_and_unfolds(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        answer = Scripted(driver, ("<think>", "</think>"))
        await answer.start()
        await answer.push("<think>first I")
        await driver.until_seen("Thinking…")
        await answer.push(" wonder</think>\n\nThe answer.")
        await answer.end(output("<think>first I wonder</think>\n\nThe answer."))
        await driver.until_seen("▸ Thought · 4 tokens")
        assert shown(driver) == "The answer."
        assert "wonder" not in driver.screen_text()
        await driver.press("ctrl+t")
        await driver.until_seen("first I wonder")


async def test_unfolded_reasoning_costs_its_last_part_as_it_grows(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    parse = MarkdownLayout.parse

    def counting(layout: MarkdownLayout, source: str) -> list[SyntaxTreeNode]:
        parsed.append(len(source))
        return parse(layout, source)

    async with started(tiny_llama) as driver:
        answer = Scripted(driver, ("<think>", "</think>"))
        await answer.start()
        await answer.push("<think>" + "".join(f"Thought {number}.\n\n" for number in range(500)))
        await driver.press("ctrl+t")
        await driver.until_seen("Thought 499.")
        monkeypatch.setattr(MarkdownLayout, "parse", counting)
        for number in range(500, 503):
            await answer.push(f"Thought {number}.\n\n")
            await driver.until_seen(f"Thought {number}.")
        assert 0 < max(parsed) < 100
        await driver.press("ctrl+t")
        await driver.until(lambda: "Thought 502." not in driver.screen_text())
        await answer.push("Last.</think>\n\nThe answer.")
        await driver.until_seen("The answer.")
        await driver.press("ctrl+t")
        await driver.until_seen("Last.")


async def test_a_failed_answer_says_so_in_its_chat(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        answer = Scripted(driver)
        await answer.start()
        await answer.push("Half an")
        await answer.end(output("Half an", "error", "The step ran out of memory; close a chat."))
        await driver.until_seen("The step ran out of memory; close a chat.")
        await driver.until_seen("✗ 1")
        assert "Half an" in driver.screen_text()


async def test_the_footer_tells_what_an_answer_cost(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        answer = Scripted(driver)
        await answer.start()
        await answer.end(output("Yes."))
        await driver.until_seen("TTFT 50 ms · 99 tok/s · 8 tokens · prompt 20 (16 cached) · preempted ×2")


async def test_scrolling_up_is_not_yanked_back(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        answer = Scripted(driver)
        await answer.start()
        await answer.push("line\n\n" * 60)
        transcript = driver.pane.query_one("Transcript")
        await driver.until(lambda: transcript.scroll_y > 20)
        await driver.press("pageup")
        await driver.settle()
        held = transcript.scroll_y
        await answer.push("more\n\n" * 20)
        await driver.settle()
        assert transcript.scroll_y == held
        while transcript.scroll_y < transcript.max_scroll_y:
            await driver.press("pagedown")
        await answer.push("and more\n\n" * 20)
        await driver.until(lambda: transcript.scroll_y == transcript.max_scroll_y)


@pytest.mark.parametrize("size", [(40, 10), (80, 24), (200, 60)])
async def test_every_size_shows_the_chat_and_the_prompt(tiny_llama: Path, size: tuple[int, int]) -> None:
    async with started(tiny_llama, size=size) as driver:
        answer = Scripted(driver)
        await answer.start()
        await answer.push("Visible text")
        await driver.until_seen("Visible text")
        await driver.until_seen("Ask something")
        await answer.end(output("Visible text"))


async def test_a_screen_that_is_too_small_says_so_and_loses_nothing(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True) as driver:
        await driver.write("a draft")
        await driver.pilot.resize_terminal(30, 8)
        await driver.until_seen("Too small: 30 × 8.")
        assert "a draft" not in driver.screen_text()
        await driver.press("!")
        await driver.pilot.resize_terminal(40, 10)
        await driver.until_seen("a draft!")
        assert "Too small" not in driver.screen_text()


NARROW = [(1, 40), (2, 40), (4, 30), (7, 30), (14, 30), (60, 1), (1, 1)]


@pytest.mark.parametrize(
    "keys", [("", "ctrl+p"), pytest.param(("f7", "ctrl+g", "f1"), marks=pytest.mark.slow)]
)
async def test_no_size_ends_the_app_whatever_is_open(tiny_llama: Path, keys: tuple[str, ...]) -> None:
    """A window that is made very narrow for a moment, as by tiling window managers and in tmux."""
    async with started(tiny_llama, hold=True) as driver:
        for key in keys:
            await driver.press(*filter(None, [key]))
            for width, height in NARROW:
                await driver.pilot.resize_terminal(width, height)
                await driver.settle()
            await driver.pilot.resize_terminal(120, 36)
            await driver.press("escape")
        await driver.until_seen("Ask something")


@pytest.mark.slow
async def test_resizing_while_answers_stream(long_llama: Path) -> None:
    async with started(long_llama, sampling=ENDLESS, **LONG) as driver:
        await driver.say("Go")
        await driver.until(lambda: driver.chat.live and driver.chat.live.answer.text)
        for width, height in ((80, 24), (20, 5), (1, 1), (200, 60), (40, 10), (120, 36)):
            await driver.pilot.resize_terminal(width, height)
            await driver.settle()
        assert len(driver.pane.query(AnswerMessage)) == 1
        await driver.press("escape")
        await driver.until_idle()
        await driver.settle()
        shown = driver.screen_text()
        driver.pane.show_path()  # laid out anew
        await driver.settle()
        assert driver.screen_text() == shown


async def test_a_model_that_cannot_be_loaded_says_what_to_do_and_gives_prompts_back(tmp_path: Path) -> None:
    async with started(tmp_path / "nowhere", hold=True) as driver:
        await driver.say("Too early")
        driver.load()
        await driver.until(lambda: driver.app.load_error)
        await driver.until_seen("There is no model to answer")
        assert driver.prompt.text == "Too early"
        await driver.press("enter")
        await driver.until(driver.notices)
        assert "nowhere" in driver.notices()[0]
        await driver.press("ctrl+q")
        await driver.until(lambda: not driver.app.is_running)
        assert driver.app.return_code == 1


async def test_tabs_show_what_their_chats_are_doing(long_llama: Path) -> None:
    async with started(long_llama, sampling=ENDLESS, **LONG) as driver:
        await driver.until_seen("✎ 1 New chat")
        await driver.say("Go")
        await driver.until_seen("● 1 Go")
        await driver.press("ctrl+n")
        first = driver.app.main_screen.workspace.chats[0]
        assert driver.app.main_screen.bridge is not None
        driver.app.main_screen.bridge.stop(first.id)
        await driver.until_seen("◆ 1 Go")
        await driver.press("f3")
        await driver.until_seen("○ 1 Go")
