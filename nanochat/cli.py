"""The ``nanochat`` command: parses, then hands over. Imports torch and textual only where they are used."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from nanochat.commands import ask, bench, completion, config, demo, perplexity, serve, simulate
from nanochat.commands.options import EARLY, add_connect_options, add_engine_options, backend_config
from nanochat.errors import NanochatError, WrongUsage
from nanochat.interrupts import STATUS, interruptible
from nanochat.sanitize import sanitize_line

MAX_SENTENCE = 2_000
"""Characters of an error that are shown."""


class _Help(argparse.HelpFormatter):
    """Leaves out the line that only says COMMAND, above the list of commands."""

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        return text.partition("\n")[2] if isinstance(action, argparse._SubParsersAction) else text


class _Parser(argparse.ArgumentParser):
    """Keeps what it repeats of a wrong value short, and doesn't say that it was done if its help got nowhere."""

    def error(self, message: str) -> NoReturn:
        super().error(sanitize_line(message, MAX_SENTENCE))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self._given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """What is taken for a command often is the value of an option that there isn't, or a question."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            raise argparse.ArgumentError(None, self._no_command(action, value))
        super()._check_value(action, value)

    def _no_command(self, action: argparse._SubParsersAction[Any], value: str) -> str:
        options = self._option_string_actions
        for given in self._given[: self._given.index(value)]:
            name = given.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in options):
                return f"unrecognized arguments: {name}{_suggestion(name, options)}"
        hint = _suggestion(value, action.choices) or f'; to ask something: nanochat ask "{value} …"'
        return f"there is no command {value!r}{hint}"

    def print_help(self, file: Any = None) -> None:
        super().print_help(file)
        if file is None and sys.stdout is not None:
            sys.stdout.flush()  # argparse ignores whatever goes wrong when it writes


def _suggestion(wrong: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(wrong, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


class _CommandParser(_Parser):
    """Says itself what it doesn't know: the parser above would show the wrong usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a "?" beats a traceback where the locale lacks a character
    try:
        args = _parse(argv)
        with interruptible():
            status = int(args.run(args))
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except NanochatError as error:
        print(f"nanochat: {sanitize_line(str(error), MAX_SENTENCE)}", file=sys.stderr)
        return 2 if isinstance(error, WrongUsage) else 1
    except KeyboardInterrupt:
        return STATUS
    except BrokenPipeError:
        _abandon_output()
        return 1
    except OSError as error:  # above all, a full disk under our output
        _abandon_output()
        print(f"nanochat: {error.strerror or error}.", file=sys.stderr)
        return 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Ends the process with status 2 and a sentence where the arguments are wrong."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.serve_web is not None and args.run is not _run_app:
        parser.error("--serve-web has no effect on a command")
    _take_early_options(parser, args)
    return args


def make_parser() -> argparse.ArgumentParser:
    """The whole command line, with one sub-parser a command."""
    parser = _Parser(
        prog="nanochat",
        formatter_class=_Help,
        description="Chat with language models on your own machine, many at once. Without a command: the app.",
    )
    add_engine_options(parser, prefix=EARLY)
    add_connect_options(parser, prefix=EARLY)
    parser.add_argument(
        "--serve-web",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help="serve the app to browsers instead, at localhost:8000 by default (needs the extra web)",
    )
    parser.set_defaults(run=_run_app, parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_CommandParser)
    for name, module, summary in (
        ("ask", ask, "one answer on standard output"),
        ("serve", serve, "the engine for other programs, through the OpenAI API"),
        ("bench", bench, "how quick this machine is with the model"),
        ("perplexity", perplexity, "how well the model predicts a text, and what INT8 KV changes"),
        ("simulate", simulate, "the scheduler alone, without a model"),
        ("demo", demo, "a picture of the app with many chats answering"),
        ("completion", completion, "complete commands and options in your shell"),
        ("config", config, "check the settings file, or print an example of it"),
    ):
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        command.set_defaults(engine_options={})
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _take_early_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Engine options written before a command count for it, unless it has them itself; or are wrong usage."""
    for early in [name for name in vars(args) if name.startswith(EARLY)]:
        name = early.removeprefix(EARLY)
        if name not in args.engine_options:
            parser.error(f"{parser.get_default('engine_options')[name]} has no effect on this command")
        if not hasattr(args, name):
            setattr(args, name, getattr(args, early))


def app_options(args: argparse.Namespace) -> list[str]:
    """The app's options as they were given, to start it again."""
    options = []
    for name, flag in args.engine_options.items():
        if hasattr(args, name):
            value = getattr(args, name)
            options += [flag] if value is False else [f"{flag}={value}"]
    return options


def _abandon_output() -> None:
    """Write what can still be written; of the rest, Python would complain again when it flushes at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_app(args: argparse.Namespace) -> int:
    from nanochat.ui.app import run_app

    settings, config = backend_config(args)
    if args.serve_web is not None:
        from nanochat.ui.web import DEFAULT_ADDRESS, serve

        return serve(args.serve_web or DEFAULT_ADDRESS, app_options(args))
    system = getattr(args, "system", settings.system)
    return run_app(config, system=system, settings=settings)
