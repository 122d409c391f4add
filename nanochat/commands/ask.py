"""Ask one question and print the answer as it comes."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Any, BinaryIO

from nanochat.backend.interface import Question, Turn
from nanochat.backend.opening import open_backend
from nanochat.commands.options import (
    add_connect_options,
    add_engine_options,
    backend_config,
    from_command_line,
)
from nanochat.engine.config import SamplingParams
from nanochat.errors import InvalidOption, NanochatError, WrongUsage
from nanochat.sanitize import Sanitizer
from nanochat.stray_output import diverted, log_file

if TYPE_CHECKING:
    from nanochat.engine.outputs import RequestOutput

MAX_INPUT_BYTES = 2**26
ASK_OPTIONS = ("max_tokens", "temperature", "top_p", "seed", "stop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, how to sample, how to print, and the engine's options or the server."""
    absent = argparse.SUPPRESS
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="left out or -: standard input")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", default=absent, help="longest answer, in tokens"
    )
    parser.add_argument("--temperature", type=float, metavar="X", default=absent, help="0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="X", default=absent)
    parser.add_argument("--seed", type=int, metavar="N", default=absent)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", default=absent, help="ends the answer; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object when the answer is complete")
    add_engine_options(parser)
    add_connect_options(parser)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status.

    Raises:
        NanochatError: with a sentence that says what to do.
    """
    settings, config = backend_config(args)
    overrides = {name: getattr(args, name) for name in ASK_OPTIONS if hasattr(args, name)}
    with from_command_line({name: f"--{name.replace('_', '-')}" for name in overrides}):
        SamplingParams(**overrides)  # a wrong option should not cost the loading of a model
    question = Question(_read_prompt(args.prompt))
    system = getattr(args, "system", settings.system)
    sampling = {**settings.sampling, **overrides}
    turn = Turn(0, system, datetime.now().astimezone(), (question,), sampling)
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    sanitizer = Sanitizer()
    log = log_file()
    with diverted(log):  # tokenizers print what a model's files say
        backend = open_backend(config)
    with closing(backend):
        with diverted(log):
            started = backend.start(turn)
        handle = started.handle
        opening = (
            f"{started.reasoning_tags[0]}\n" if started.opens_reasoning and started.reasoning_tags else ""
        )
        if not args.json:
            print(opening, end="", flush=True)
        last = ""
        try:
            for event in handle:
                if not args.json:
                    text = sanitizer.feed(event.text) if is_terminal else event.text
                    print(text, end="", flush=True)
                    last = text or last
            output = handle.result()
        finally:
            handle.cancel()
    if output.error is not None:
        if is_terminal and last and not last.endswith("\n"):
            print(flush=True)  # the error gets a line of its own
        raise NanochatError(output.error)
    if args.json:
        print(json.dumps(_report(output, opening, tells_tokens=backend.about.tells_tokens)))
    else:
        print()
    return 0


def _read_prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        prompt = argument
    elif sys.stdin is None or (argument is None and sys.stdin.isatty()):
        raise WrongUsage('There is no question; write it after ask: nanochat ask "Why is the sky blue?"')
    else:
        prompt = _read_input(sys.stdin.buffer)
    if not prompt.strip():
        raise InvalidOption("The question is empty; give it as an argument or on standard input.")
    return prompt


def _read_input(stream: BinaryIO) -> str:
    content = stream.read(MAX_INPUT_BYTES + 1)
    if len(content) > MAX_INPUT_BYTES:
        raise InvalidOption(
            f"Standard input has more than {MAX_INPUT_BYTES >> 20} MB, which no model can take; give it less."
        )
    if b"\0" in content:
        raise InvalidOption("Standard input holds binary data, not text; give the question as text.")
    return content.decode("utf-8", errors="replace")  # a diff may quote files in other encodings


def _report(output: RequestOutput, opening: str, *, tells_tokens: bool) -> dict[str, Any]:
    """What ``--json`` prints; null is what a server doesn't tell.

    ``opening``: the tag that the prompt had already written, so that the answer's closing one isn't alone.
    """
    metrics = output.metrics
    counts_prompts = tells_tokens or metrics.prompt_tokens > 0
    return {
        "text": opening + output.text,
        "token_ids": output.token_ids if tells_tokens else None,
        "finish_reason": output.finish_reason,
        "prompt_tokens": metrics.prompt_tokens if counts_prompts else None,
        "cached_tokens": metrics.cached_tokens if counts_prompts else None,
        "completion_tokens": metrics.completion_tokens,
        "ttft_ms": None if metrics.ttft_s is None else round(metrics.ttft_s * 1e3, 3),
        "decode_tok_s": None if metrics.decode_tok_s is None else round(metrics.decode_tok_s, 3),
        "preemptions": metrics.preemptions if tells_tokens else None,
    }
