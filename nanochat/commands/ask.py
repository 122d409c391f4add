"""Ask one question and print the answer as it comes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from nanochat.commands.options import add_engine_options, engine_config, from_command_line
from nanochat.engine.config import SamplingParams
from nanochat.errors import InvalidOption, NanochatError, WrongUsage
from nanochat.sanitize import Sanitizer
from nanochat.stray_output import diverted, log_file

if TYPE_CHECKING:
    from nanochat.engine.outputs import RequestOutput

SAMPLING_OPTIONS = ("max_tokens", "temperature", "top_p", "seed", "stop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, how to sample, how to print, and the engine's options."""
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


def run(args: argparse.Namespace) -> int:
    """Returns the exit status.

    Raises:
        NanochatError: with a sentence that says what to do.
    """
    settings, config = engine_config(args)
    overrides = {name: getattr(args, name) for name in SAMPLING_OPTIONS if hasattr(args, name)}
    with from_command_line({name: f"--{name.replace('_', '-')}" for name in overrides}):
        SamplingParams(**overrides)  # a wrong option should not cost the loading of a model
    messages = _messages(_read_prompt(args.prompt), getattr(args, "system", settings.system))

    from nanochat.engine.engine import Engine

    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    sanitizer = Sanitizer()
    log = log_file()
    with diverted(log):  # tokenizers print what a model's files say
        engine = Engine(config)
    with engine:
        params = settings.sampling_params(engine.default_sampling, overrides)
        with diverted(log):
            handle = engine.submit(messages, params)
        try:
            for event in handle:
                if not args.json:
                    print(sanitizer.feed(event.text) if is_terminal else event.text, end="", flush=True)
            output = handle.result()
        finally:
            handle.cancel()
    if output.error is not None:
        raise NanochatError(output.error)
    print(json.dumps(_report(output)) if args.json else "")
    return 0


def _read_prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        prompt = argument
    elif sys.stdin is None or (argument is None and sys.stdin.isatty()):
        raise WrongUsage('There is no question; write it after ask: nanochat ask "Why is the sky blue?"')
    else:
        prompt = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    if not prompt.strip():
        raise InvalidOption("The question is empty; give it as an argument or on standard input.")
    return prompt


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    user = {"role": "user", "content": prompt}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def _report(output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prompt_tokens": metrics.prompt_tokens,
        "cached_tokens": metrics.cached_tokens,
        "completion_tokens": metrics.completion_tokens,
        "ttft_ms": None if metrics.ttft_s is None else round(metrics.ttft_s * 1e3, 3),
        "decode_tok_s": None if metrics.decode_tok_s is None else round(metrics.decode_tok_s, 3),
        "preemptions": metrics.preemptions,
    }
