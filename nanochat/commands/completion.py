"""Print what a shell needs to complete nanochat's commands, options and files."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "tcsh")
HELP = """\
bash:  nanochat completion bash > ~/.local/share/bash-completion/completions/nanochat
zsh:   nanochat completion zsh > a folder of $fpath, as _nanochat
tcsh:  nanochat completion tcsh > a file that ~/.tcshrc sources
"""
PATHS = frozenset({"FILE", "FILE.svg", "FILE.csv", "MODEL"})
"""How the help calls what is a path."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which shell."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = HELP
    parser.add_argument("shell", choices=SHELLS, help="which shell")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    import shtab

    parser: argparse.ArgumentParser = args.parser
    _complete_paths(parser)
    print(shtab.complete(parser, args.shell))
    return 0


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    import shtab

    for action in parser._actions:
        if action.metavar in PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command)
