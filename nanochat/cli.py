"""The ``nanochat`` command: parses, then hands over. Imports torch and textual only where they are used."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from nanochat.commands import ask, perplexity, simulate
from nanochat.commands.options import add_engine_options, engine_config
from nanochat.errors import NanochatError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except NanochatError as error:
        print(f"nanochat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def make_parser() -> argparse.ArgumentParser:
    """The whole command line, with one sub-parser a command."""
    parser = argparse.ArgumentParser(
        prog="nanochat",
        description="Chat with language models on your own machine, many at once. Without a command: the app.",
    )
    add_engine_options(parser)
    parser.set_defaults(run=_run_app)
    commands = parser.add_subparsers(title="commands", metavar="")
    for name, module, summary in (
        ("ask", ask, "one answer on standard output"),
        ("perplexity", perplexity, "how well the model predicts a text, and what INT8 KV changes"),
        ("simulate", simulate, "the scheduler alone, without a model"),
    ):
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _run_app(args: argparse.Namespace) -> int:
    from nanochat.ui.app import run_app

    settings, config = engine_config(args)
    system = getattr(args, "system", settings.system)
    return run_app(config, system=system, sampling=settings.sampling)
