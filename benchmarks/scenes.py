"""The scenes of the pictures in docs/screens: what is asked, scripted or really answered, and at what size.

Scenes about speed, caches and limits run the default model: their figures are of that run. Scenes about how
text looks have scripted answers, so that a picture shows the same text each time; they bear no figures but the
numbers of tokens, which the model's tokenizer counts.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.app_engine import engine_of
from nanochat.engine.models.default_model import _WHEEL_BYTES
from nanochat.engine.outputs import RequestMetrics, RequestOutput
from nanochat.engine.progress import Progress
from nanochat.settings import AppSettings
from nanochat.ui.chat import Chat, Message
from nanochat.ui.chrome import LoadState
from nanochat.ui.demo import FIRST, FOLLOW_UP, FORK_FOLLOW_UP, PROMPTS, SAMPLING
from nanochat.ui.stage import Stage

TABLE = """\
A steel-string acoustic suits most beginners. Compare three common kinds:

| kind | strings | sound | effort |
|---|---|---|---|
| classical | nylon | soft, round | low |
| acoustic | steel | bright, loud | high |
| electric | steel | as you like | low |

1. Hold each one for five minutes.
2. Check that every fret rings clean.
3. Take the one you *want* to pick up again.
"""
CODE = """\
A generator keeps only one line in memory, however large the file is:

```python
def matches(path, word):
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if word in line:
                yield number, line.rstrip()
```

Call it as `for number, line in matches("log.txt", "error"): …`.
"""
OTHER_CODE = """\
Read the whole file at once; that is fine for small ones:

```python
text = Path("log.txt").read_text(encoding="utf-8")
found = [line for line in text.splitlines() if "error" in line]
```
"""
THINKING = """\
The train needs 2 h 40 min for 312 km. 2 h 40 min is 2⅔ h, that is 8/3 h.
312 km divided by 8/3 h is 312 · 3/8 = 117 km/h.
Check: 117 · 8/3 = 312. Right."""
ANSWER = "The train is **117 km/h** fast on average: 312 km in 2 h 40 min, which is 8⁄3 of an hour."


@dataclass(frozen=True, slots=True)
class Scene:
    """One picture."""

    play: Callable[[Stage], Awaitable[None]]
    size: tuple[int, int] = (120, 36)
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Options of EngineConfig."""
    look: AppSettings = field(default_factory=AppSettings)
    is_loading: bool = False
    """Whether the model stays unloaded."""


def say(stage: Stage, chat: Chat, question: str, text: str, reasoning: str = "") -> Message:
    """Add a turn with a scripted answer; its tokens are those that the model would have needed."""
    answer = chat.ask(question)
    answer.model = stage.main.archive.model
    return end(stage, chat, text, reasoning)


def end(stage: Stage, chat: Chat, text: str, reasoning: str = "") -> Message:
    """End the chat's live answer with a scripted text."""
    answer = chat.live
    if answer is None:
        raise RuntimeError("there is no answer under way")
    encode = engine_of(stage).tokenizer.encode
    if reasoning:
        answer.answer.tags = ("<think>", "</think>")
        answer.answer.reasoning_tokens = len(encode(reasoning))
        text = f"<think>\n{reasoning}\n</think>\n\n{text}"
    ids = list(encode(text))
    metrics = RequestMetrics(completion_tokens=len(ids))
    chat.end_answer(RequestOutput(text, ids, "stop", None, None, metrics))
    return answer


async def start(stage: Stage) -> None:
    stage.main.show_load(
        LoadState(
            progress=Progress(
                "Downloading SmolLM2-135M-Instruct", _WHEEL_BYTES * 44 // 100, _WHEEL_BYTES, "B"
            )
        )
    )
    stage.main.pane(stage.main.chat).take_prompt("What can I see in Lisbon in one day?")


async def forked(stage: Stage) -> None:
    """A chat with an answer, and a fork of it that is answering."""
    stage.main.chat.sampling = dict(SAMPLING)
    stage.ask(FIRST)
    await stage.until_idle()
    await stage.fork()
    stage.ask(FORK_FOLLOW_UP)


async def busy(stage: Stage, tabs: int = 4, tokens: int = 60) -> None:
    """The first chat answers a second time beside a fork of it and others, all at once."""
    await forked(stage)
    for prompt in PROMPTS[: tabs - 2]:
        (await stage.new_tab()).sampling = dict(SAMPLING)
        stage.ask(prompt)
    await stage.show(1)
    stage.ask(FOLLOW_UP)
    await stage.until_said(tokens)


async def readme(stage: Stage) -> None:
    await busy(stage, tabs=5, tokens=90)


async def eight(stage: Stage) -> None:
    await busy(stage, tabs=8, tokens=40)


async def preempted(stage: Stage) -> None:
    """A cache too small for five growing chats."""
    for number, prompt in enumerate(PROMPTS[:5]):
        chat = stage.main.chat if number == 0 else await stage.new_tab()
        chat.sampling = SAMPLING | {"ignore_eos": True}
        stage.ask(prompt)
    await stage.show(1)
    engine = engine_of(stage)

    def is_full() -> bool:
        return engine.stats().preemptions > 0

    await stage.until(is_full, 120, "Filling the cache")


async def fork(stage: Stage) -> None:
    await forked(stage)
    await stage.show(1)
    stage.ask(FOLLOW_UP)
    await stage.show(2)
    await stage.until_said(40)


async def branches(stage: Stage) -> None:
    chat = stage.main.chat
    question = say(
        stage, chat, "How do I find the lines of a large file that hold a word?", OTHER_CODE
    ).parent
    for text in (CODE, OTHER_CODE):
        chat.begin_answer(question)  # type: ignore[arg-type]
        end(stage, chat, text)
    chat.choose_branch(chat.path[-1], -1)
    say(stage, chat, "And in several files?", "Loop over `Path('logs').rglob('*.txt')` and call it for each.")
    stage.main.pane(chat).show_path()


async def reasoning(stage: Stage) -> None:
    chat = stage.main.chat
    say(stage, chat, "A train takes 2 h 40 min for 312 km. How fast is it?", ANSWER, THINKING)
    say(
        stage,
        chat,
        "And in miles per hour?",
        "About **73 mph**: 117 divided by 1.609.",
        "1 mile is 1.609 km. 117 / 1.609 = 72.7.",
    )
    stage.main.pane(chat).show_path()
    await stage.pilot.pause(0.1)
    stage.main.pane(chat).query("ReasoningView").first().toggle()  # type: ignore[attr-defined]


async def error(stage: Stage) -> None:
    """A context that is full: the real refusal with its offer."""
    chat = stage.main.chat
    chat.sampling = SAMPLING | {"max_tokens": 110}
    for prompt in (FIRST, PROMPTS[3]):
        stage.ask(prompt)
        await stage.until_idle()
    lines = [f"{number}. {prompt}" for number, prompt in enumerate((*PROMPTS, *PROMPTS[:5]), 1)]
    stage.ask("Please improve these questions:\n" + "\n".join(lines))
    await stage.until(lambda: len(stage.app.screen_stack) > 1, 60, "Refusing")


async def search(stage: Stage) -> None:
    topics = {
        "A weekend in Lisbon": (
            "What can I see in Lisbon in one day?",
            "Take **tram 28** in the morning, then walk up to the castle.",
        ),
        "Learning the guitar": ("Which guitar suits a beginner?", TABLE),
        "A walk in Milan": (
            "Is there a tram to the canals?",
            "Yes: tram 2 and tram 9 stop at Porta Genova, a few steps from the canals.",
        ),
        "Searching large files": ("How do I search a large file?", CODE),
        "How trams are driven": (
            "Why do trams need sand?",
            "A tram has steel wheels on steel rails; sand gives them grip when it brakes.",
        ),
        "Letters to the council": (
            "Help me write to the city council about the tram.",
            "Dear members of the council, the tram on our street is the best thing about it.",
        ),
    }
    for number, (title, (question, text)) in enumerate(topics.items()):
        await _import(stage, title, question, text, 1_767_000_000.0 + 86_400 * number)
    await stage.show(3)
    stage.main.action_search("tram")
    await stage.pilot.pause(0.5)


async def _import(stage: Stage, title: str, question: str, text: str, when: float) -> None:
    """A chat of a fixed day."""
    message = {"state": "complete", "created_at": when, "finished_at": when, "active": True}
    content: dict[str, Any] = {
        "format": "nanochat chat",
        "version": 1,
        "title": title,
        "created_at": when,
        "updated_at": when,
        "messages": [
            {"id": 1, "parent": None, "role": "user", "text": question, **message},
            {"id": 2, "parent": 1, "role": "assistant", "text": text, **message},
        ],
    }
    if stage.main.bridge is not None:
        content["messages"][1]["token_ids"] = list(engine_of(stage).tokenizer.encode(text))
    before = len(stage.main.workspace.chats)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "chat.json"
        file.write_text(json.dumps(content), encoding="utf-8")
        stage.main.action_import(str(file))
        await stage.until(lambda: len(stage.main.workspace.chats) > before, 10, "Importing")


async def light(stage: Stage) -> None:
    chat = stage.main.chat
    say(stage, chat, "Which guitar suits a beginner?", TABLE)
    stage.main.pane(chat).show_path()
    for prompt in PROMPTS[:2]:
        (await stage.new_tab()).sampling = dict(SAMPLING)
        stage.ask(prompt)
    await stage.show(1)
    await stage.until_said(40)


async def compare(stage: Stage) -> None:
    chat = stage.main.chat
    chat.sampling = dict(SAMPLING)
    stage.ask(FIRST)
    await stage.until_idle()
    await stage.main.action_compare("temperature=0 | temperature=0.9")
    await stage.until_idle()


async def long_context(stage: Stage) -> None:
    """A long prompt while it is being read, beside a chat that decodes."""
    chat = stage.main.chat
    chat.sampling = dict(SAMPLING)
    stage.ask(PROMPTS[1])
    await stage.until_said(30)
    chat = await stage.new_tab()
    chat.sampling = dict(SAMPLING)
    # Tables of figures may take a token for every two characters, and the model takes 8,192.
    text = (Path(__file__).parent.parent / "docs" / "kernels.md").read_text(encoding="utf-8")[:14_000]
    stage.ask(f"Summarise these notes:\n\n{text}")

    def is_half_read() -> bool:
        return chat.prefill_progress is not None and chat.prefill_progress > 0.4

    await stage.until(is_half_read, 120, "Reading the prompt")


SMALL_CACHE = {"num_kv_blocks": 216, "max_model_len": 2048}
"""A map on which single blocks can be seen."""

SCENES: dict[str, Scene] = {
    "start": Scene(start, is_loading=True),
    "chat": Scene(readme, engine=SMALL_CACHE),
    "panel-full": Scene(preempted, engine={"num_kv_blocks": 48, "max_model_len": 640}),
    "panel-narrow": Scene(busy, (100, 30), SMALL_CACHE, AppSettings(panel="narrow")),
    "panel-line": Scene(busy, (80, 24), SMALL_CACHE),
    "panel-wide": Scene(eight, (200, 60), {"num_kv_blocks": 1024, "max_model_len": 8192}),
    "fork": Scene(fork, engine=SMALL_CACHE),
    "compare": Scene(compare, (140, 36), SMALL_CACHE, AppSettings(panel="narrow")),
    "branches": Scene(branches, (100, 36), look=AppSettings(panel="off")),
    "reasoning": Scene(reasoning, (100, 30), look=AppSettings(panel="off")),
    "error": Scene(error, (100, 34), {"max_model_len": 384, "num_kv_blocks": 64}, AppSettings(panel="off")),
    "search": Scene(search, (110, 34), look=AppSettings(panel="off")),
    "light": Scene(light, engine=SMALL_CACHE, look=AppSettings(theme="light")),
    "int8": Scene(long_context, engine={"kv_dtype": "int8", "num_kv_blocks": 768, "max_model_len": 8192}),
}
