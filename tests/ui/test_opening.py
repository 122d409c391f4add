"""A long chat among many saved ones is on the screen soon."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nanochat.history import History
from tests.ui.driver import started
from tests.ui.test_search import import_chat

SOON_S = 2.0
"""From nothing to the long chat's end on the screen, on a machine that has more to do."""


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
    start_s = time.monotonic()
    async with started(tiny_llama, history=file, hold=True) as driver:
        await driver.until_seen("message 1999")
        taken_s = time.monotonic() - start_s
        assert len(driver.chat.path) == 2_000
    print(f"opened in {taken_s:.2f} s")
    assert taken_s < SOON_S
