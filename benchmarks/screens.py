"""Renders the pictures of docs/screens, all or those named; see benchmarks/scenes.py for what they show.

python -m benchmarks.screens                 # all: about three minutes on two cores
python -m benchmarks.screens chat light --out /tmp/screens
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from benchmarks.scenes import SCENES, Scene
from nanochat.engine.config import EngineConfig
from nanochat.errors import NanochatError
from nanochat.ui.app import NanochatApp
from nanochat.ui.screenshots import save
from nanochat.ui.stage import Stage

FOLDER = Path(__file__).parent.parent / "docs" / "screens"


def render(scene: Scene, **engine: Any) -> str:
    """Play a scene in an app of its own; returns the picture as SVG. ``engine``: further options.

    Raises:
        NanochatError: it did not come about.
    """
    app = NanochatApp(EngineConfig(**{**scene.engine, **engine}), look=scene.look)
    if scene.is_loading:
        app._loader.start = lambda: None  # type: ignore[method-assign]
    outcome: list[str | BaseException] = []

    async def play(pilot: Pilot[Any]) -> None:
        stage = Stage(app, pilot)
        try:
            await stage.until(lambda: stage.main.archive.history is not None, 30, "Opening the history")
            if not scene.is_loading:
                await stage.until_loaded()
            await scene.play(stage)
            outcome.append(await stage.picture())
        except BaseException as error:
            outcome.append(error)
        app.exit()

    app.run(headless=True, size=scene.size, auto_pilot=play)
    while not app.close_engine():
        pass
    if not outcome or isinstance(outcome[0], BaseException):
        raise NanochatError("The scene could not be played.") from (outcome[0] if outcome else None)
    return normalised(outcome[0])


def normalised(svg: str) -> str:
    """The picture with ids that depend on its content alone, and no fonts from the network."""
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    found = re.search(r"terminal-\d+", svg)
    if found is None:
        return svg
    plain = svg.replace(found.group(), "terminal")
    return plain.replace("terminal-", f"nanochat-{zlib.crc32(plain.encode()):08x}-")


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCENES)}; none: all")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER")
    args = parser.parse_args()
    if unknown := set(args.names) - set(SCENES):
        parser.error(f"there is no scene {min(unknown)}; there are {', '.join(SCENES)}")
    os.environ.pop("NO_COLOR", None)
    os.environ["TZ"] = "UTC"
    time.tzset()
    for name in args.names or SCENES:
        started_s = time.monotonic()
        file = args.out / f"{name}.svg"
        try:
            problem = save(render(SCENES[name]), file)
        except NanochatError as error:
            problem = f"{name}: {error} {error.__cause__ or ''}"
        if problem is not None:
            print(problem, file=sys.stderr)
            return 1
        print(f"{file}  {time.monotonic() - started_s:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
