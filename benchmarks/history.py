"""How quick the chat history is with many chats: open, list, load, search, save.

    python -m benchmarks.history                       # 1,000 chats, 100,000 messages, in a temporary folder
    python -m benchmarks.history --messages 20000 --json results.json

Texts are made of words with Zipf-like frequencies, one chat in twenty of Chinese characters. Each figure is
the median of several runs and the slowest of them, on a file that the system has in its cache.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import resource
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.machine import describe_machine
from nanochat.history import History

LONG_CHAT = 2_000
"""Messages of the longest chat."""
WORDS_PER_MESSAGE = 60
VOCABULARY = 30_000
RARE = "xylophonist"


def make_text(randoms: random.Random, words: list[str], weights: list[float], is_chinese: bool) -> str:
    if is_chinese:
        return "".join(
            chr(0x4E00 + int(randoms.paretovariate(0.6)) % 3000) for _ in range(WORDS_PER_MESSAGE * 3)
        )
    return " ".join(randoms.choices(words, cum_weights=weights, k=WORDS_PER_MESSAGE))


def fill(history: History, chats: int, messages: int) -> int:
    """Import chats that hold so many messages in all; returns the id of the longest."""
    randoms = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(randoms.choices(letters, k=randoms.randint(2, 9))) for _ in range(VOCABULARY)]
    total, weights = 0.0, []
    for rank in range(VOCABULARY):
        total += 1 / (rank + 1)
        weights.append(total)
    longest = min(LONG_CHAT, messages)
    each, left_over = divmod(messages - longest, chats - 1)
    longest_id = 0
    for number in range(chats):
        length = longest if number == 0 else each + (number <= left_over)
        texts = [make_text(randoms, words, weights, number % 20 == 7) for _ in range(length)]
        if number % 100 == 50 and texts:
            texts[0] += f" {RARE}"
        chat_id = history.import_json(json.dumps(exported(f"Chat {number}", texts, 1.7e9 + number)))
        longest_id = longest_id or chat_id
    return longest_id


def exported(title: str, texts: list[str], at: float) -> dict[str, object]:
    messages = [
        {
            "id": number,
            "parent": number - 1 if number else None,
            "active": True,
            "role": "assistant" if number % 2 else "user",
            "text": text,
            "token_ids": list(range(100)) if number % 2 else [],
            "created_at": at,
        }
        for number, text in enumerate(texts)
    ]
    head = {"format": "nanochat chat", "version": 1, "title": title, "created_at": at, "updated_at": at}
    return {**head, "messages": messages}


def measure(action: Callable[[], object], runs: int = 9) -> dict[str, float]:
    """Median and slowest time of an action, in milliseconds."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1e3)
    return {"median_ms": statistics.median(times), "max_ms": max(times)}


def run_reads(path: Path, longest_id: int) -> dict[str, dict[str, float]]:
    results = {"open, restore tabs, close": measure(lambda: open_and_restore(path))}
    with History(path) as history:
        results["list the first 100 chats"] = measure(history.list_chats)
        last = history.list_chats(500)[-1]
        results["list 100 chats after 500"] = measure(lambda: history.list_chats(after=last))
        results["load the longest chat"] = measure(lambda: history.path(longest_id))
        common = most_common_words(path, 3)
        for label, query in (
            ("a rare word", RARE),
            ("the commonest word", common[0]),
            ("the three commonest words", " ".join(common)),
            ("one letter", "e"),
            ("three letters", "e t a"),
            ("two letters", "ta"),
            ("one Chinese character", "\u4e02"),
            ("three Chinese characters", "\u4e01\u4e01\u4e02"),
            ("an arrow (not indexed)", "->"),
            ("nothing found", "zzzzzzzzzzz"),
        ):
            results[f"search: {label}"] = measure(functools.partial(history.search, query))
        message_id = history.path(longest_id)[50].id
        results["siblings of a message"] = measure(lambda: history.siblings(message_id))
    return results


def open_and_restore(path: Path) -> None:
    with History(path) as history:
        history.restore_tabs()


def most_common_words(path: Path, count: int) -> list[str]:
    connection = sqlite3.connect(path)
    connection.execute("CREATE VIRTUAL TABLE temp.terms USING fts5vocab (main, message_index, row)")
    rows = connection.execute("SELECT term FROM terms WHERE term < 'zz' ORDER BY doc DESC LIMIT ?", (count,))
    words = [term for (term,) in rows]
    connection.close()
    return words


def run_writes(path: Path, longest_id: int) -> dict[str, dict[str, float]]:
    """What a change costs its caller, and eight answers streaming at once cost the process."""
    with History(path) as history:
        chat_id = history.create_chat("Benchmark")
        question = history.add_message(chat_id, None, "Hello")
        results = {
            "add a message (caller)": measure(lambda: history.add_message(chat_id, None, "Hello"), 200)
        }
        results["add a message and wait until saved"] = measure(lambda: add_and_wait(history, chat_id), 50)
        ids = [message.id for message in history.path(longest_id)]
        results["fork the longest chat (caller)"] = measure(
            lambda: history.fork_chat(longest_id, ids, "F"), 1
        )
        results["fork the longest chat (until saved)"] = measure(history.flush, 1)
        answers = [history.begin_answer(chat_id, question) for _ in range(8)]
        history.flush()
        times, start, cpu = [], time.perf_counter(), cpu_s()
        for _ in range(100):
            for answer in answers:
                before = time.perf_counter()
                history.grow_answer(answer, " some new words of text", [1, 2, 3, 4, 5])
                times.append((time.perf_counter() - before) * 1e3)
            time.sleep(0.04)
        share = (cpu_s() - cpu) / (time.perf_counter() - start)
        results["grow an answer (caller), 8 at 25 a second"] = {
            "median_ms": statistics.median(times),
            "max_ms": max(times),
            "share_of_a_core": share,
        }
        results["close while 8 answers stream"] = measure(history.close, 1)
    return results


def add_and_wait(history: History, chat_id: int) -> None:
    history.add_message(chat_id, None, "Hello")
    history.flush()


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chats", type=int, default=1_000)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where to make the database; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.chats < 501 or options.messages < options.chats + LONG_CHAT:
        parser.error(f"needs more than 500 chats, and {LONG_CHAT} messages more than chats")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "history.db"
        start = time.perf_counter()
        with History(path) as history:
            longest_id = fill(history, options.chats, options.messages)
        machine = {
            **describe_machine(device="cpu"),
            "sqlite": sqlite3.sqlite_version,
            "chats": options.chats,
            "messages": options.messages,
            "file_mb": round(path.stat().st_size / 1e6, 1),
            "import_s": round(time.perf_counter() - start, 1),
        }
        results = run_reads(path, longest_id) | run_writes(path, longest_id)
    print(" · ".join(f"{key} {value}" for key, value in machine.items()))
    for name, figures in results.items():
        share = f"   {figures['share_of_a_core']:.1%} of a core" if "share_of_a_core" in figures else ""
        print(f"{name:44}{figures['median_ms']:10.3f} ms   max {figures['max_ms']:10.3f} ms{share}")
    if options.json is not None:
        options.json.write_text(json.dumps({**machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
