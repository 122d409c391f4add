"""A scripted session: some chats, one of them a fork, all answering at once. For pictures and a first look."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from textual.pilot import Pilot

from nanochat.engine.config import EngineConfig
from nanochat.errors import NanochatError
from nanochat.settings import AppSettings
from nanochat.ui.app import NanochatApp
from nanochat.ui.stage import Stage

FIRST = "Give me three tips for learning the guitar."
FOLLOW_UP = "And what should I look for when I buy a used guitar? List five points."
FORK_FOLLOW_UP = "Write a practice plan for the first month, week by week, with four exercises each."
PROMPTS = (
    "What should I look for when I buy a used bicycle? List five points.",
    "Why is the sky blue? Explain it to a child.",
    "Describe in a few steps how bread is made.",
    "Write a short email to a colleague: our meeting moves to Friday at ten.",
    "Explain how a suspension bridge carries its load, step by step.",
    "Write a short story about a lighthouse keeper and a storm.",
    "List five ideas for a science project about plants.",
)
SAMPLING: dict[str, Any] = {"temperature": 0.2, "top_p": 0.9, "seed": 7}


@dataclass(slots=True)
class Demo:
    """What to play, and the picture it gives."""

    tabs: int = 4
    tokens: int = 60
    """Length of the answers when the picture is taken."""
    picture: str = ""
    problem: NanochatError | None = field(default=None)
    """Why there is no picture."""

    async def play(self, pilot: Pilot[Any]) -> None:
        """Ask in every tab and take the picture while all of them answer; then end the app."""
        app = pilot.app
        if not isinstance(app, NanochatApp):
            raise TypeError(f"a {type(app).__name__} can't be demonstrated")
        try:
            stage = Stage(app, pilot)
            await self._ask_everywhere(stage)
            await stage.until_said(self.tokens)
            self.picture = await stage.picture()
        except NanochatError as error:
            self.problem = error
        app.exit()

    async def _ask_everywhere(self, stage: Stage) -> None:
        await stage.until_loaded()
        stage.main.chat.sampling = dict(SAMPLING)
        stage.ask(FIRST)
        if self.tabs > 1:
            await stage.until_idle()
            await stage.fork()
            stage.ask(FORK_FOLLOW_UP)
            for prompt in PROMPTS[: self.tabs - 2]:
                (await stage.new_tab()).sampling = dict(SAMPLING)
                stage.ask(prompt)
            await stage.show(1)
            stage.ask(FOLLOW_UP)


def take_picture(
    config: EngineConfig,
    demo: Demo,
    size: tuple[int, int],
    *,
    system: str | None = None,
    look: AppSettings | None = None,
) -> str:
    """Run the app without a terminal and play; returns the picture as SVG.

    Raises:
        NanochatError: the model could not be loaded, or did not answer.
    """
    app = NanochatApp(config, system=system, look=look)
    app.run(headless=True, size=size, auto_pilot=demo.play)
    while not app.close_engine():
        pass
    if demo.problem is not None:
        raise demo.problem
    if not demo.picture:
        raise NanochatError("The app has failed before the picture was taken; its log says where.")
    return demo.picture
