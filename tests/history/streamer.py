"""A process of its own that streams answers into a history until it is killed.

Prints, before it does so, each piece of a long answer, and after it is saved, each finished one::

    python streamer.py FILE stream SEED     until killed
    python streamer.py FILE share CHAT NAME COUNT
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from nanochat.history import History


def say(*words: object) -> None:
    print(*words, flush=True)


def stream(path: Path, seed: int) -> None:
    randoms = random.Random(seed)
    # Short, so that a busy machine is not taken for text that waits too long.
    history = History(path, save_interval_s=0.1)
    history.restore_tabs()
    chat_id = history.create_chat(f"Chat {seed}")
    history.save_tabs([chat_id])
    question = history.add_message(chat_id, None, "Q")
    long_answer = history.begin_answer(chat_id, question)
    say("long", chat_id, long_answer)
    next_short = time.monotonic() + randoms.random()
    while True:
        now = time.monotonic()
        say("piece", now)
        history.grow_answer(long_answer, f"{now} ", [1, 2, 3])
        if now > next_short:
            short = history.begin_answer(chat_id, question)
            text = f"answer {now} " * randoms.randint(1, 2000)
            history.grow_answer(short, text[:10])
            history.finish_answer(short, text=text, token_ids=[4] * 1000, finish_reason="stop")
            history.flush()
            say("finished", short, len(text))
            next_short = now + randoms.random() * 2
        time.sleep(randoms.random() * 0.02)


def share(path: Path, chat_id: int, name: str, count: int) -> None:
    """Add turns to a chat that others add to as well."""
    with History(path, save_interval_s=0.01) as history:
        own_chat, parent = history.create_chat(name), None
        for number in range(count):
            history.add_message(chat_id, None, f"{name} {number}")
            parent = history.add_message(own_chat, parent, f"{name} Q{number}")
            parent = history.begin_answer(own_chat, parent)
            for piece in range(5):
                history.grow_answer(parent, f"{name} {piece} ")
            history.finish_answer(parent, text=f"{name} A{number}", token_ids=[number], finish_reason="stop")


if __name__ == "__main__":
    if sys.argv[2] == "stream":
        stream(Path(sys.argv[1]), int(sys.argv[3]))
    else:
        share(Path(sys.argv[1]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
