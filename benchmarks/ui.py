"""How quick the chat app is: starting, long chats, search, streaming, typing, and what it costs the engine.

    python -m benchmarks.ui                                  # the default model, 8 tabs
    python -m benchmarks.ui --model FOLDER --seconds 20 --json results.json

The real app runs over a real engine on a screen in memory of 120 x 36 characters; nothing is written to a
terminal. A key's echo ends when the screen with the character has been drawn. The engine's rate is measured
while the same answers run, in many short turns with and without the app taking and showing what comes, and
compared turn by turn, so that other work on the machine falls on both. How long the event loop is held at a
time is measured by a task that only wants its turn: in seconds, and in processor time of its thread, which
other programs don't lengthen.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.app_engine import engine_of
from benchmarks.history import RARE, exported, fill
from benchmarks.machine import describe_machine
from nanochat.engine.config import EngineConfig
from nanochat.history import History
from nanochat.ui.app import NanochatApp
from nanochat.ui.markdown_view import MarkdownView
from nanochat.ui.search_screen import Found, SearchScreen
from nanochat.ui.stage import Stage

ENDLESS: dict[str, Any] = {"max_tokens": 100_000, "ignore_eos": True, "temperature": 0.7, "seed": 1}
SIZE = (120, 36)
KEYS = 200
PAUSE_S = 0.1
"""Between two keys: a quick typist."""
Session = Callable[[Stage], Awaitable[dict[str, float]]]


async def drawn(app: NanochatApp) -> None:
    """Wait until what has changed is on the screen."""
    done = asyncio.Event()
    app.screen.call_after_refresh(done.set)
    await done.wait()


async def wait_for(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def with_app(config: EngineConfig, file: Path | None, session: Session) -> dict[str, float]:
    """Run the app, and something in it; adds how long it took until the history and the model were there."""
    app = NanochatApp(config, sampling=ENDLESS, history_file=file)
    start_s = time.perf_counter()
    async with app.run_test(size=SIZE) as pilot:
        stage = Stage(app, pilot)
        await drawn(app)
        painted_s = time.perf_counter() - start_s
        await wait_for(lambda: app.main_screen.archive.history is not None)
        await drawn(app)
        figures = {
            "first paint, ms": painted_s * 1e3,
            "tabs are back, ms": (time.perf_counter() - start_s) * 1e3,
        }
        await stage.until_loaded()
        figures |= await session(stage)
    while not app.close_engine():
        pass
    return figures


def saved_chats(longest_id: int) -> Session:
    """Opening the longest chat, and searching."""

    async def run(stage: Stage) -> dict[str, float]:
        app, main = stage.app, stage.main
        start_s = time.perf_counter()
        main.open_saved(Found(longest_id, None))
        await wait_for(lambda: main.chat.store_id == longest_id)
        await drawn(app)
        figures = {"open the longest chat, ms": (time.perf_counter() - start_s) * 1e3}
        for name, words in (("rare word", RARE), ("common letters", "e t a")):
            main.action_search(words)
            await wait_for(lambda: isinstance(app.screen, SearchScreen))
            start_s = time.perf_counter()
            found: list[object] = []
            main.archive.read(lambda history, words=words: history.search(words), found.append)
            await wait_for(lambda found=found: found)
            figures[f"search, {name}, ms"] = (time.perf_counter() - start_s) * 1e3
            app.screen.dismiss(None)
            await wait_for(lambda: app.screen is main)
        return figures

    return run


def many_tabs(tabs: int, turns: int, seconds: float) -> Session:
    """Typing while all tabs answer, the engine's rate with and without the app, and leaving in the midst of it."""

    async def run(stage: Stage) -> dict[str, float]:
        for number in range(tabs):
            if number:
                await stage.new_tab()
            stage.ask(f"Write a long story about a lighthouse, number {number}.")
        await stage.until_said(20)
        figures = await typing(stage) | await compared_rates(stage, turns, seconds)
        show_answers(stage)
        await asyncio.sleep(1.0)
        start_s = time.perf_counter()
        stage.app.leave()
        await wait_for(lambda: not stage.app.is_running)
        while not stage.app.close_engine():
            pass
        return figures | {"leaving, ms": (time.perf_counter() - start_s) * 1e3}

    return run


async def typing(stage: Stage) -> dict[str, float]:
    prompt = stage.main.pane(stage.main.chat).prompt
    times = []
    for number in range(KEYS):
        await asyncio.sleep(PAUSE_S)
        before = len(prompt.text)
        start_s = time.perf_counter()
        stage.app.simulate_key("abcdefghij"[number % 10])
        await wait_for(lambda before=before: len(prompt.text) > before)
        await drawn(stage.app)
        times.append((time.perf_counter() - start_s) * 1e3)
    ordered = sorted(times)
    return {
        "echo p50, ms": statistics.median(times),
        "echo p95, ms": ordered[int(0.95 * len(ordered))],
        "echo max, ms": ordered[-1],
    }


async def compared_rates(stage: Stage, turns: int, seconds: float) -> dict[str, float]:
    """The rate of answers that go on, while the app shows them and while it doesn't even take them, in turn."""
    ratios, shown, plain, used = [], [], [], []
    for turn in range(turns):
        pair = {}
        for is_shown in (True, False) if turn % 2 else (False, True):  # a context that grows slows both
            pair[is_shown], busy = await rate(stage, seconds, is_shown=is_shown)
            if is_shown:
                used.append(busy)
        if pair[False] > 0:  # else other programs had the whole machine
            ratios.append(pair[True] / pair[False])
        shown.append(pair[True])
        plain.append(pair[False])
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "decode with the app, tok/s": statistics.median(shown),
        "decode alone, tok/s": statistics.median(plain),
        "share of the rate alone": statistics.median(ratios),
        "  lower quartile": quarters[0],
        "  upper quartile": quarters[2],
        "UI thread, share of a core": statistics.median(used),
    }


async def rate(stage: Stage, seconds: float, *, is_shown: bool) -> tuple[float, float]:
    """The engine's tokens a second, and the UI thread's processor time a second."""
    show_answers(stage) if is_shown else hide_answers(stage)
    await asyncio.sleep(0.3)  # what has come meanwhile is drawn at once; the last look is 0.22 s away at most
    stats = engine_of(stage).stats
    before, start_s, cpu_s = stats().generation_tokens, time.perf_counter(), time.thread_time()
    await asyncio.sleep(seconds)
    taken_s = time.perf_counter() - start_s
    return (stats().generation_tokens - before) / taken_s, (time.thread_time() - cpu_s) / taken_s


def hide_answers(stage: Stage) -> None:
    """Have the app's next look for what has come be its last."""
    stage.main.poll_soon = lambda delay_s=0.0: None  # type: ignore[method-assign]


def show_answers(stage: Stage) -> None:
    """Have the app look for what has come again."""
    vars(stage.main).pop("poll_soon", None)
    stage.main.poll_soon()


STREAMED = {
    "list of 200 items": "".join(
        f"{number}. item with **some** text and `code`\n" for number in range(1, 201)
    ),
    "fence of 2,000 lines": "```python\n"
    + "".join(f"value_{n} = compute({n})\n" for n in range(2_000))
    + "```\n",
    "table of 50 x 10": "| "
    + " | ".join(f"column {n}" for n in range(10))
    + " |\n"
    + "|---" * 10
    + "|\n"
    + "".join("| " + " | ".join(f"cell {row}.{n}" for n in range(10)) + " |\n" for row in range(50)),
}
DELTA = 60
"""Characters that come at once: a quick model's, 25 times a second."""


async def streaming(stage: Stage) -> dict[str, float]:
    """What each new piece of long answers costs: this thread's processor time, and how long until it is seen."""
    main = stage.main
    figures = {}
    for name, text in STREAMED.items():
        await main.action_new_chat()
        chat = main.chat
        pane, answer = main.pane(chat), chat.ask(name)
        pane.show_turn(answer)
        await drawn(stage.app)
        costs: list[float] = []
        waits: list[float] = []
        for start in range(0, len(text), DELTA):
            start_s, cpu_s = time.perf_counter(), time.thread_time()
            answer.answer.append(text[start : start + DELTA], 15)
            pane.grow()
            await drawn(stage.app)
            costs.append((time.thread_time() - cpu_s) * 1e3)
            waits.append((time.perf_counter() - start_s) * 1e3)
        for what, times in (("", sorted(costs)), ("seen after, ", sorted(waits))):
            figures[f"{name}: {what}p95, ms"] = times[int(0.95 * len(times))]
            figures[f"{name}: {what}max, ms"] = times[-1]
        chat.withdraw()
    return figures


PARAGRAPH = "Paragraph {} says that **something** happened in the `year` it tells of, and nobody knew.\n\n"


def long_answer(paragraphs: int) -> dict[str, float]:
    """Opening a saved answer of so many paragraphs, then another width: how long the loop is held at a time."""
    text = "".join(PARAGRAPH.format(number) for number in range(paragraphs))
    held: list[tuple[float, float]] = []

    async def watch() -> None:
        now = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(0.002)
            before, now = now, (time.perf_counter(), time.thread_time())
            held.append((now[0] - before[0], now[1] - before[1]))

    async def run(file: Path, chat_id: int) -> dict[str, float]:
        app = NanochatApp(EngineConfig(model=""), history_file=file)
        app._loader.start = lambda: None  # type: ignore[method-assign]
        async with app.run_test(size=SIZE) as pilot:
            main = app.main_screen
            await wait_for(lambda: main.archive.history is not None)
            await drawn(app)
            gc.collect()
            gc.freeze()  # as the loader does once the model is there
            task = asyncio.create_task(watch())
            start_s = time.perf_counter()
            main.open_saved(Found(chat_id, None))
            await wait_for(lambda: main.query(MarkdownView))
            view = main.query(MarkdownView).first()
            await wait_for(lambda: view.size.height)
            seen_s = time.perf_counter() - start_s
            await wait_for(lambda: view.is_complete)
            whole_s = time.perf_counter() - start_s
            await pilot.resize_terminal(SIZE[0] - 30, SIZE[1])
            await wait_for(lambda: view.is_complete)
            task.cancel()
        walls, cpus = (sorted(times) for times in zip(*held, strict=True))
        return {
            "its first lines are seen, ms": seen_s * 1e3,
            "all of it is laid out, ms": whole_s * 1e3,
            "the loop is held, max, ms": walls[-1] * 1e3,
            "of processor time, max, ms": cpus[-1] * 1e3,
        }

    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "history.db"
        with History(file) as history:
            chat_id = history.import_json(json.dumps(exported("Long", ["Tell me all.", text], 1.7e9)))
        return asyncio.run(run(file, chat_id))


def make_history(folder: Path, chats: int, messages: int) -> tuple[Path, int]:
    """A file of so many chats, the longest and seven others open in tabs."""
    file = folder / "history.db"
    with History(file) as history:
        longest_id = fill(history, chats, messages)
        others = [chat.id for chat in history.list_chats(7)]
        history.save_tabs(others, others[0])
    return file, longest_id


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="default: the app's own")
    parser.add_argument("--tabs", type=int, default=8)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="length of each turn with or without the app"
    )
    parser.add_argument("--turns", type=int, default=20, help="such turns, of each; four or more")
    parser.add_argument("--chats", type=int, default=1_000)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    config = EngineConfig(model=options.model, max_model_len=options.max_model_len)
    with tempfile.TemporaryDirectory() as name:
        file, longest_id = make_history(Path(name), options.chats, options.messages)
        results: dict[str, dict[str, float]] = {
            f"{options.chats:,} saved chats": asyncio.run(with_app(config, file, saved_chats(longest_id))),
            "one answer streaming": asyncio.run(with_app(config, None, streaming)),
            f"{options.tabs} tabs answering": asyncio.run(
                with_app(
                    config,
                    Path(name) / "tabs.db",
                    many_tabs(options.tabs, options.turns, options.seconds),
                )
            ),
            "an answer of 4,000 paragraphs": long_answer(4_000),
            "an answer of 10 MB": long_answer(110_000),
        }
    machine: dict[str, Any] = {
        **describe_machine("textual"),
        "model": options.model or "default",
        "messages": options.messages,
    }
    print(" · ".join(f"{key} {value}" for key, value in machine.items()))
    for title, figures in results.items():
        print(title)
        for figure, value in figures.items():
            print(f"  {figure:40}{value:10.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps({**machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
