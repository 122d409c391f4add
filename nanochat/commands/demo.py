"""Let some chats answer at once, without anybody at the keyboard, and save a picture of the app."""

from __future__ import annotations

import argparse
from pathlib import Path

from nanochat.commands.options import add_engine_options, engine_config
from nanochat.errors import NanochatError, WrongUsage

MAX_COLUMNS, MAX_ROWS = 400, 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many tabs, how large the screen, where the picture goes, and the engine's options."""
    parser.add_argument("--tabs", type=int, default=4, metavar="N", help="chats that answer at once, 1 to 9")
    parser.add_argument("--screenshot", type=Path, required=True, metavar="FILE.svg", help="where to save it")
    parser.add_argument("--size", default="120x36", metavar="WxH", help="columns and rows of the screen")
    parser.add_argument(
        "--tokens", type=int, default=60, metavar="N", help="length of the answers when the picture is taken"
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status.

    Raises:
        NanochatError: with a sentence that says what to do.
    """
    settings, config = engine_config(args)
    size = _parse_size(args.size)
    if not 1 <= args.tabs <= 9:
        raise WrongUsage(f"--tabs must be between 1 and 9, not {args.tabs}.")
    if args.tokens < 1:
        raise WrongUsage(f"--tokens must be at least 1, not {args.tokens}.")

    from nanochat.ui.demo import Demo, take_picture
    from nanochat.ui.screenshots import save

    system = getattr(args, "system", settings.system)
    svg = take_picture(config, Demo(args.tabs, args.tokens), size, system=system, look=settings.app)
    if (problem := save(svg, args.screenshot)) is not None:
        raise NanochatError(problem)
    print(args.screenshot)
    return 0


def _parse_size(text: str) -> tuple[int, int]:
    columns, _, rows = text.lower().partition("x")
    if not (columns.isdecimal() and rows.isdecimal() and len(text) < 12):
        raise WrongUsage(f"--size must be columns x rows, such as 120x36, not {text[:30]!r}.")
    size = int(columns), int(rows)
    if not (40 <= size[0] <= MAX_COLUMNS and 10 <= size[1] <= MAX_ROWS):
        raise WrongUsage(f"--size must be between 40x10 and {MAX_COLUMNS}x{MAX_ROWS}, not {text[:30]}.")
    return size
