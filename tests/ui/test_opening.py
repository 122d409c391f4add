"""A long chat among many saved ones is on the screen soon."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.widget import Widget

from nanochat.history import History
from nanochat.ui import pace
from nanochat.ui.markdown_document import MarkdownDocument
from nanochat.ui.markdown_view import MarkdownView
from nanochat.ui.transcript import WINDOW, Transcript
from tests.ui.driver import Driver, started
from tests.ui.test_search import import_chat

PARAGRAPHS = "".join(f"Paragraph {number} says that **something** happened.\n\n" for number in range(4_000))
HOLD_SHARE = 0.25
"""Of all processor time until everything is laid out, for how much of it nothing else may be served at a time.
benchmarks/ui.py has the figures."""
SOON_S = 20.0
"""Processor time from nothing to the long chat's end on the screen: no figure, but far less than if every message
were laid out, or looked at for every other. benchmarks/ui.py has the figures."""


@pytest.mark.slow
async def test_a_long_chat_among_a_thousand_opens_soon(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    with History(file) as history:
        for number in range(1_000):
            chat = history.create_chat(f"Chat {number}")
            history.add_message(chat, None, "question " * 20)
    import_chat(
        file, "Long", [f"message {number}\n\nand *more* of it" for number in range(2_000)], as_tab=True
    )
    start_s = time.thread_time()
    async with started(tiny_llama, history=file, hold=True) as driver:
        await driver.until_seen("message 1999")
        taken_s = time.thread_time() - start_s
        assert len(driver.chat.path) == 2_000
    print(f"opened in {taken_s:.2f} s")
    assert taken_s < SOON_S


@asynccontextmanager
async def longest_hold() -> AsyncIterator[list[float]]:
    """The longest time that the event loop was held meanwhile, as the only item; of this thread's processor time."""
    longest = [0.0]

    async def watch() -> None:
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            longest[0] = max(longest[0], time.thread_time() - last_s)
            last_s = time.thread_time()

    task = asyncio.create_task(watch())
    gc.disable()  # a collection of all that other tests have left takes longer
    try:
        yield longest
    finally:
        gc.enable()
        task.cancel()


async def until_laid_out(driver: Driver) -> None:
    await driver.until(lambda: all(view.is_complete for view in driver.pane.query(MarkdownView)))


async def test_an_answer_of_thousands_of_paragraphs_holds_nothing_up(
    tiny_llama: Path, tmp_path: Path
) -> None:
    file = tmp_path / "history.db"
    import_chat(file, "Long", ["question 1", PARAGRAPHS, "question 2", "answer 2"], as_tab=True)
    start_s = time.thread_time()
    async with longest_hold() as longest, started(tiny_llama, history=file, hold=True) as driver:
        await driver.until_seen("answer 2")
        longest[0] = 0.0
        await driver.press(*"typed meanwhile".replace(" ", ""))
        assert driver.prompt.text == "typedmeanwhile"
        await until_laid_out(driver)
        await driver.until_seen("answer 2")  # its end is still followed
        await driver.press("pageup", "pageup")
        transcript = driver.pane.query_one("Transcript")
        await driver.until_seen("Paragraph 39")
        await driver.pilot.resize_terminal(80, 30)
        await until_laid_out(driver)
        assert transcript.max_scroll_y > 7_900
    taken_s = time.thread_time() - start_s
    print(f"held for {longest[0]:.3f} of {taken_s:.3f} s")
    assert longest[0] < HOLD_SHARE * taken_s


def held_back(monkeypatch: pytest.MonkeyPatch) -> Callable[[Transcript], None]:
    """Nothing is laid out by itself any more; what is given back lays out a line or so."""
    monkeypatch.setattr(pace, "SLICE_S", 0.0)
    lay_out_more = Transcript._lay_out_more
    monkeypatch.setattr(Transcript, "_lay_out_more", lambda self: None)
    return lay_out_more


async def test_what_is_in_view_stays_while_a_long_answer_above_it_is_laid_out(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out_more = held_back(monkeypatch)
    file = tmp_path / "history.db"
    texts = ["question", PARAGRAPHS[:40_000], *[f"message {n}\n\nand more" for n in range(WINDOW - 2)]]
    import_chat(file, "Long", texts, as_tab=True)
    async with started(tiny_llama, history=file, hold=True) as driver:
        await driver.until_seen(f"message {WINDOW - 3}")
        transcript = driver.pane.query_one(Transcript)
        views = driver.pane.query(MarkdownView)
        while any(not view.is_complete for view in list(views)[1:]):
            lay_out_more(transcript)
            await driver.pilot.pause()
        await driver.press("pageup")

        def place() -> tuple[Widget, float]:
            """The first message in view, and how far its top is above the view's."""
            first = transcript._first_in_view()
            return first, first.virtual_region.y - transcript.scroll_y

        held = place()
        assert not views.first().is_complete
        assert held[0] is not views.first().parent
        while not views.first().is_complete:
            lay_out_more(transcript)
            await driver.pilot.pause()
        await driver.until(lambda: place() == held)


async def test_a_scroll_bar_that_appears_does_not_begin_the_layout_anew(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text's first slices fit the view, then a bar is needed: with another width it would begin anew, without one."""
    monkeypatch.setattr(pace, "SLICE_S", 0.0)
    widths = set[int]()
    layout = MarkdownDocument.layout

    def note_width(document: MarkdownDocument, width: int, *how: Callable[[], bool]) -> int:
        widths.add(width)
        return layout(document, width, *how)

    monkeypatch.setattr(MarkdownDocument, "layout", note_width)
    file = tmp_path / "history.db"
    import_chat(file, "Long", ["question", PARAGRAPHS[:40_000]], as_tab=True)
    async with started(tiny_llama, history=file, hold=True, size=(100, 50)) as driver:
        await until_laid_out(driver)
        assert driver.pane.query_one(Transcript).max_scroll_y > 100
    assert len(widths) == 1


@pytest.mark.parametrize(
    ("keys", "length", "pages", "least"),
    [(("pageup", "pageup"), 30_000, 2, 500), (("pageup", "pagedown"), 20_000, 0, 300)],
    ids=["they count from the end", "a page down takes one back"],
)
async def test_pages_turned_while_the_end_is_laid_out(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: tuple[str, str],
    length: int,
    pages: int,
    least: int,
) -> None:
    lay_out_more = held_back(monkeypatch)
    file = tmp_path / "history.db"
    import_chat(file, "Long", ["question", PARAGRAPHS[:length]], as_tab=True)
    async with started(tiny_llama, history=file, hold=True) as driver:
        transcript = driver.pane.query_one(Transcript)
        await driver.until(transcript._unfinished)
        await driver.press(*keys)
        while transcript._unfinished():
            lay_out_more(transcript)
            await driver.pilot.pause()
        page = transcript.scrollable_content_region.height
        await driver.until(lambda: transcript.scroll_y == transcript.max_scroll_y - pages * page > least)
