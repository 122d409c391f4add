"""The app in a process of its own, with chats that answer until it is killed.

Appends to a file, many times a second, what a person in front of it would have seen by then: for each saved
answer its id, the number of its tokens, and whether it has ended.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import time
from pathlib import Path

from nanochat.history import History
from nanochat.ui import archive
from nanochat.ui.app import NanochatApp
from nanochat.ui.chat import Chat
from tests.ui.driver import ENDLESS, LONG, tiny_config

TABS = 3
REPORT_S = 0.02


def answers(chats: list[Chat]) -> dict[int, tuple[int, bool]]:
    """By the id in the history."""
    return {
        message.store_id: (
            len(message.output.token_ids) if message.output is not None else message.answer.num_tokens,
            message.output is not None and not message.is_interrupted,
        )
        for chat in chats
        for message in chat.messages()
        if message.role == "assistant" and message.store_id is not None
    }


async def stream(model: Path, history: Path, report: Path, seed: int) -> None:
    """One chat answers without end, the others again and again."""
    randoms = random.Random(seed)
    # Short, so that a busy machine is not taken for text that waits too long.
    archive.History = functools.partial(History, save_interval_s=0.1)  # type: ignore[assignment,misc]
    app = NanochatApp(tiny_config(model, **LONG), sampling=ENDLESS, history_file=history)
    async with app.run_test(size=(100, 30)):
        main = app.main_screen
        while main.bridge is None or main.archive.history is None:
            await asyncio.sleep(0.01)
        for _ in range(TABS - 1):
            await main.action_new_chat()
        chats = main.workspace.chats[-TABS:]
        with report.open("a", encoding="utf-8") as file:
            while True:
                for chat in chats:
                    if not chat.is_busy:
                        if chat is not chats[0]:
                            chat.sampling = {"max_tokens": randoms.randint(1, 150)}
                        main.ask(chat, f"Question {randoms.random()}")
                file.write(json.dumps([time.monotonic(), answers(chats)]) + "\n")
                file.flush()
                await asyncio.sleep(REPORT_S)


def run(model: Path, history: Path, report: Path, seed: int) -> None:
    """Never returns."""
    asyncio.run(stream(model, history, report, seed))
