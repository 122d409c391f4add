"""Long disorder through the app: tabs that are opened, asked, stopped, asked again, forked and closed.

The real app runs over an engine with few KV blocks and a history in a file, on a screen in memory. Every answer
is compared with what the same question gives alone; in the end no block may be in use, no request and no tab's
widgets may be left over, and the history must be whole. ``benchmarks/soak.py`` has the command.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import random
import sqlite3
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.soak_cases import Sample, difference, slope
from nanochat.backend.interface import Question, Turn
from nanochat.backend.local import LocalBackend
from nanochat.engine.config import EngineConfig
from nanochat.engine.engine import Engine
from nanochat.engine.outputs import RequestOutput
from nanochat.ui.app import NanochatApp
from nanochat.ui.chat import Chat, Message
from nanochat.ui.chat_pane import ChatPane
from nanochat.ui.main_screen import MainScreen
from nanochat.ui.stage import Stage

MAX_TABS = 8
SIZE = (120, 36)
TURN_S = 0.02
"""Between two looks at the tabs."""
LIMIT_S = 60.0


@dataclass
class Tally:
    """What has been seen."""

    asked: int = 0
    ended: int = 0
    """Answers of which all was seen; the others' tabs were closed."""
    differing: list[str] = field(default_factory=list)
    actions: Counter[str] = field(default_factory=Counter)
    rss_mib: list[Sample] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """A question that is asked many times, with a seed."""

    text: str
    sampling: dict[str, Any]


def make_cases(count: int, seed: int) -> list[Case]:
    """Questions of which many begin alike, and every way of sampling."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 8))) for _ in range(40)]
    trunks = [" ".join(rng.choices(words, k=rng.randint(1, 20))) for _ in range(max(1, count // 8))]
    return [
        Case(
            f"{rng.choice(trunks)} {' '.join(rng.choices(words, k=rng.randint(1, 6)))}",
            {
                "temperature": rng.choice([0.0, 0.7, 1.2]),
                "top_k": rng.choice([0, 20]),
                "max_tokens": rng.randint(1, 40),
                "seed": rng.getrandbits(31),
                "ignore_eos": True,
            },
        )
        for _ in range(count)
    ]


def config(folder: Path, *, alone: bool = False) -> EngineConfig:
    """The engine under test, or with ``alone`` one in which no request meets another."""
    return EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        num_kv_blocks=40,
        max_num_seqs=1 if alone else 16,
        max_num_batched_tokens=512 if alone else 96,
        prefix_caching=not alone,
    )


def references(folder: Path, cases: list[Case]) -> list[RequestOutput]:
    """What each case gives alone."""
    started = Chat().started
    with Engine(config(folder, alone=True)) as engine:
        backend = LocalBackend(engine)
        return [
            backend.start(Turn(number, None, started, (Question(case.text),), case.sampling)).handle.result(
                LIMIT_S
            )
            for number, case in enumerate(cases)
        ]


class Crowd:
    """Everyone at the tabs at once."""

    def __init__(self, stage: Stage, cases: list[Case], expected: list[RequestOutput], seed: int) -> None:
        self.tally = Tally()
        self._main: MainScreen = stage.main
        self._cases, self._expected = cases, expected
        self._random = random.Random(seed)
        self._case_of: dict[int, int] = {}
        """By chat id."""
        self._waiting: dict[int, tuple[Message, bool]] = {}
        """By chat id: an answer whose end is to be looked at, and whether it was stopped."""

    async def go(self, count: int) -> None:
        """Have so many answers begun, and all of them ended."""
        process = psutil.Process()
        every = max(1, count // 100)
        while self.tally.asked < count:
            await self._act(self._random.choice(self._main.workspace.chats))
            self._settle()
            await asyncio.sleep(TURN_S)
            if len(self.tally.rss_mib) <= self.tally.asked // every:
                self.tally.rss_mib.append((self.tally.asked, process.memory_info().rss / 2**20))
        end_s = time.monotonic() + LIMIT_S
        while self._waiting and time.monotonic() < end_s:
            self._settle()
            await asyncio.sleep(TURN_S)
        self.tally.differing += [f"chat {chat_id} has not ended" for chat_id in self._waiting]

    async def _act(self, chat: Chat) -> None:
        """Something that a person can do with this tab now."""
        if chat.is_busy:
            name = self._random.choice(["leave", "leave", "leave", "stop", "close"])
        elif not chat.path:
            name = "ask"
        else:
            name = self._random.choice(["again", "again", "fork", "close", "new"])
        if name in ("fork", "new") and len(self._main.workspace.chats) >= MAX_TABS:
            name = "close"
        self.tally.actions[name] += 1
        self._main._show(chat)
        await getattr(self, f"_{name}")(chat)

    async def _leave(self, chat: Chat) -> None:
        """Let it answer."""

    async def _ask(self, chat: Chat) -> None:
        number = self._case_of.setdefault(chat.id, self._random.randrange(len(self._cases)))
        chat.sampling = dict(self._cases[number].sampling)
        self._main.ask(chat, self._cases[number].text)
        self._begun(chat)

    async def _again(self, chat: Chat) -> None:
        self._main.action_again()
        self._begun(chat)

    def _begun(self, chat: Chat) -> None:
        if chat.live is not None:
            self.tally.asked += 1
            self._waiting[chat.id] = (chat.live, False)

    async def _stop(self, chat: Chat) -> None:
        self._main.action_stop()
        if chat.id in self._waiting:
            self._waiting[chat.id] = (self._waiting[chat.id][0], True)

    async def _fork(self, chat: Chat) -> None:
        await self._main.action_fork_chat()
        self._case_of[self._main.chat.id] = self._case_of[chat.id]

    async def _new(self, chat: Chat) -> None:
        await self._main.action_new_chat()

    async def _close(self, chat: Chat) -> None:
        self._waiting.pop(chat.id, None)
        await self._main._close(chat)

    def _settle(self) -> None:
        """Compare the answers that have ended."""
        for chat_id, (message, was_stopped) in list(self._waiting.items()):
            if message.output is None:
                if self._main.workspace.find(chat_id) is None:
                    del self._waiting[chat_id]
                continue
            del self._waiting[chat_id]
            self.tally.ended += 1
            number = self._case_of[chat_id]
            fault = difference(message.output, self._expected[number], was_stopped)
            if fault is not None:
                self.tally.differing.append(f"case {number}: {fault}")


async def visit(folder: Path, file: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The soak in the app, as a report."""
    cases = make_cases(options.cases, options.seed)
    expected = references(folder, cases)
    app = NanochatApp(config(folder), history_file=file)
    started_s = time.monotonic()
    async with app.run_test(size=SIZE) as pilot:
        stage = Stage(app, pilot)
        await stage.until_loaded()
        await stage.until(lambda: stage.main.archive.history is not None, LIMIT_S, "Opening the history")
        crowd = Crowd(stage, cases, expected, options.seed)
        await crowd.go(options.count)
        await stage.until_idle()
        bridge = stage.main.bridge
        stats = bridge.backend.engine.stats() if bridge and isinstance(bridge.backend, LocalBackend) else None
        num_panes, num_tabs = len(app.query(ChatPane)), len(stage.main.workspace.chats)
        problem = stage.main.archive.close(LIMIT_S)
    app.close_engine()
    gc.collect()
    tally = crowd.tally
    growth, error = slope(tally.rss_mib)
    for line in tally.differing[:5]:
        print(line, file=sys.stderr)
    blocks = stats.blocks_used if stats is not None else -1
    is_whole = problem is None and _is_whole(file)
    return {
        "requests": tally.asked,
        "seen_to_their_end": tally.ended,
        "differing": len(tally.differing),
        "actions": dict(tally.actions),
        "preemptions": stats.preemptions if stats is not None else -1,
        "blocks_in_use": blocks,
        "panes_without_a_tab": num_panes - num_tabs,
        "history_is_whole": is_whole,
        "rss_mib_over_time": [round(mib, 1) for _, mib in tally.rss_mib[:: max(1, len(tally.rss_mib) // 20)]],
        "rss_mib_first_and_last": [round(tally.rss_mib[0][1], 1), round(tally.rss_mib[-1][1], 1)],
        "rss_mib_per_10000_requests": round(growth, 1),
        "rss_standard_error": round(error, 1),
        "seconds": round(time.monotonic() - started_s, 1),
        "ok": not tally.differing and blocks == 0 and num_panes == num_tabs and is_whole,
    }


def _is_whole(file: Path) -> bool:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        checks = [
            connection.execute(f"PRAGMA {name}").fetchall()
            for name in ("integrity_check", "foreign_key_check")
        ]
        streaming = connection.execute("SELECT count(*) FROM messages WHERE state = 'streaming'").fetchone()[
            0
        ]
    return checks == [[("ok",)], []] and streaming == 0


def run_bridge(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The soak through the app's bridge, as a report."""
    return asyncio.run(visit(folder, folder.parent / "data" / "history.db", options))
