"""Say where the settings file lies and whether it is well, or print an example with every option."""

from __future__ import annotations

import argparse
from pathlib import Path

from nanochat.settings import default_config_file, load_settings
from nanochat.settings_example import example


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options; the engine's would mean nothing here."""
    parser.add_argument(
        "--example", action="store_true", help="print a file with every option, its meaning and its default"
    )
    parser.set_defaults(engine_options={"config": "--config"})
    parser.add_argument(
        "--config", type=Path, metavar="FILE", default=argparse.SUPPRESS, help="settings file (TOML)"
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit status.

    Raises:
        InvalidOption: the file holds a mistake; the message names file and key.
    """
    from nanochat.ui.actions import ACTIONS, chosen_actions

    if args.example:
        print(example((action.id, action.keys, action.help) for action in ACTIONS if action.keys), end="")
        return 0
    settings = load_settings(getattr(args, "config", None))
    chosen_actions(settings)
    path = settings.path
    print(
        f"{path}: no mistakes."
        if path is not None
        else f"{default_config_file()}: not there; nothing is set."
    )
    return 0
