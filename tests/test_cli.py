"""The command line: what it costs to start, and what it says when something is wrong."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanochat.cli import MAX_SENTENCE, main
from nanochat.sanitize import sanitize
from tests.tiny_model import write_thinker


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads the settings of the person who runs it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def ask(model: Path, *arguments: str) -> int:
    return main(["ask", "--model", str(model), "--device", "cpu", "--kv-blocks", "64", *arguments])


class Output(io.TextIOWrapper):
    """Standard output as a test wants it."""

    def __init__(self, encoding: str = "utf-8", *, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
        self._is_terminal = terminal

    def isatty(self) -> bool:
        return self._is_terminal

    @property
    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


class TestAsk:
    def test_json_has_the_promised_fields(self, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert ask(tiny_llama, "Hi", "--temperature", "0", "--max-tokens", "5", "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        assert list(answer) == [
            "text",
            "token_ids",
            "finish_reason",
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
            "ttft_ms",
            "decode_tok_s",
            "preemptions",
        ]
        assert answer["completion_tokens"] == len(answer["token_ids"]) <= 5

    def test_streams_the_same_text(self, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
        options = ("Hi", "--seed", "3", "--max-tokens", "12")
        assert ask(tiny_llama, *options, "--json") == 0
        text = json.loads(capsys.readouterr().out)["text"]
        assert ask(tiny_llama, *options) == 0
        assert capsys.readouterr().out == text + "\n"

    def test_a_terminal_is_sent_nothing_that_it_would_obey(
        self, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What goes into a file or another program stays as the model wrote it."""
        texts = []
        for terminal in (False, True):
            output = Output(terminal=terminal)
            monkeypatch.setattr(sys, "stdout", output)
            options = ("Hi", "--seed", "1", "--temperature", "2", "--max-tokens", "600")
            assert ask(tiny_llama, *options) == 0
            texts.append(output.text)
        assert texts[1] == sanitize(texts[0])
        assert not {"\x1b", "\x07", "\x9b"}.isdisjoint(texts[0])
        assert {"\x1b", "\x07", "\x9b"}.isdisjoint(texts[1])

    @pytest.mark.parametrize("json_option", [[], ["--json"]])
    def test_an_output_without_all_characters(
        self, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, json_option: list[str]
    ) -> None:
        output = Output("ascii")
        monkeypatch.setattr(sys, "stdout", output)
        assert ask(tiny_llama, "Hi", "--seed", "3", "--max-tokens", "12", *json_option) == 0
        if json_option:
            assert "\N{REPLACEMENT CHARACTER}" in json.loads(output.text)["text"]
        else:
            assert "?" in output.text

    def test_no_standard_input_at_all(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "stdin", None)
        assert main(["ask"]) == 2
        assert "There is no question" in capsys.readouterr().err

    def test_reasoning_that_the_prompt_opens_has_both_its_tags(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write_thinker(tmp_path / "thinker")
        options = ("Hi", "--temperature", "0", "--max-tokens", "6")
        assert ask(folder, *options, "--json") == 0
        text = json.loads(capsys.readouterr().out)["text"]
        assert text.startswith("<think>\n")
        assert ask(folder, *options) == 0
        assert capsys.readouterr().out == text + "\n"

    @pytest.mark.parametrize("argument", [[], ["-"]])
    def test_reads_standard_input(
        self,
        tiny_llama: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        argument: list[str],
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Hé".encode())))
        assert ask(tiny_llama, *argument, "--temperature", "0", "--max-tokens", "3", "--json") == 0
        piped = json.loads(capsys.readouterr().out)
        assert ask(tiny_llama, "Hé", "--temperature", "0", "--max-tokens", "3", "--json") == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == piped["token_ids"]

    def test_standard_input_without_end_or_text_is_refused(
        self, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("nanochat.commands.ask.MAX_INPUT_BYTES", 1 << 20)
        for content, told in ((b"x" * ((1 << 20) + 1), "more than 1 MB"), (b"a\0b", "binary data")):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
            assert ask(tiny_llama) == 1
            assert told in capsys.readouterr().err

    def test_system_and_stop_reach_the_engine(
        self, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = ("Hi", "--temperature", "0", "--max-tokens", "20", "--json", "--system", "S")
        assert ask(tiny_llama, *options[:-2]) == 0
        without_system = json.loads(capsys.readouterr().out)
        assert ask(tiny_llama, *options) == 0
        plain = json.loads(capsys.readouterr().out)
        assert plain["prompt_tokens"] > without_system["prompt_tokens"]
        stop = plain["text"][5:7]
        assert ask(tiny_llama, *options, "--stop", "never", "--stop", stop) == 0
        stopped = json.loads(capsys.readouterr().out)
        assert (plain["finish_reason"], stopped["finish_reason"]) == ("length", "stop")
        assert stopped["text"] == plain["text"][: plain["text"].index(stop)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ask", "hi", "--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["ask", "  "], "The question is empty"),
        (["ask", "hi", "--config", "/no/such.toml"], "check the path given to --config"),
        (["ask", "hi", "--model", "a\x1b]0;b\x07\nc"], "a␛]0;b␇ c"),
    ],
)
def test_mistakes_are_one_sentence_and_status_1(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.startswith("nanochat: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("ask hi --temperature -1", "--temperature must be"),
        ("ask hi --max-tokens 0", "--max-tokens must be"),
        ("ask hi --kv-blocks 0", "--kv-blocks must be"),
        ("--threads 0", "--threads must be"),
        ("ask hi --tp 0", "--tp must be"),
        ("demo --screenshot a.svg --tabs 0", "--tabs must be"),
        ("simulate --trace a.csv --max-seqs 0", "--max-seqs must be"),
        ("simulate --speed 2", "--speed is for"),
        ("--serve-web localhost:0", "--serve-web takes"),
        ("perplexity {here} --ctx 1", "--ctx must be"),
    ],
)
def test_an_option_that_cannot_work_is_one_sentence_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: str, sentence: str
) -> None:
    assert main(arguments.format(here=__file__).split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"nanochat: {sentence}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["ask", "--bogus", "hi"], ["ask", "hi", "there"]])
def test_a_command_shows_its_own_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: nanochat ask ")
    assert "nanochat ask: error: unrecognized arguments: " in error


def test_a_wrong_value_is_repeated_in_part_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["ask", "hi", "--max-tokens", "9" * 5000])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "argument --max-tokens: invalid int value: '999" in error
    assert error.count("9") <= MAX_SENTENCE


def test_commands_have_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bogus"])
    assert "error: there is no command 'bogus'; to ask something: nanochat ask" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "\ncommands:\n    ask " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--modle", "some/model"], "unrecognized arguments: --modle; did you mean --model?"),
        (["--modle=x", "ask", "hi"], "unrecognized arguments: --modle=x"),
        (["--kv", "int8", "aks"], "there is no command 'aks'; did you mean ask?"),
        (["Why", "is", "--this"], "there is no command 'Why'; to ask something: nanochat ask"),
    ],
)
def test_what_was_misspelt_is_named(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert ending.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_prompt_over_the_limit_states_both_numbers(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", "x" * 500, "--model", str(tiny_llama), "--device", "cpu", "--kv-blocks", "8"]) == 1
    message = capsys.readouterr().err
    assert "127" in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such-option"],
        ["ask", "--kv", "int3", "hi"],
        ["frobnicate"],
        ["--model", "x", "simulate"],
        ["--block-size", "8", "simulate"],
        ["--no-prefix-cache", "perplexity", "text.txt"],
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: nanochat" in capsys.readouterr().err


def test_options_before_a_command_count_unless_it_has_them_itself(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    early = ["--model", str(tiny_llama), "--device", "cpu", "--kv-blocks", "8", "--system", "S"]
    assert main([*early, "ask", "x" * 500]) == 1
    assert "127" in capsys.readouterr().err
    assert main([*early, "ask", "x" * 500, "--kv-blocks", "16"]) == 1
    assert "255" in capsys.readouterr().err


def test_a_full_disk_is_one_sentence(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["simulate"], ["simulate", "--json"]):
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            assert main(arguments) == 1
        assert capsys.readouterr().err == "nanochat: No space left on device.\n"


def test_an_interrupt_is_status_130(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("nanochat.commands.ask._read_prompt", interrupt)
    assert ask(tiny_llama, "hi") == 130


@pytest.mark.parametrize("then", ["raise ModelNotFound('damaged')", "raise SystemError", "return '?'"])
def test_an_interrupt_that_comes_out_as_something_else_is_status_130(then: str) -> None:
    """As it may where native code calls Python."""
    program = f"""
import os, signal, sys
from nanochat import cli
from nanochat.commands import ask
from nanochat.errors import ModelNotFound
def interrupted(*_):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        {then}
ask.run = interrupted
sys.exit(cli.main(["ask", "hi"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    "arguments",
    ["simulate", pytest.param("ask hi --model {model} --device cpu --kv-blocks 64", marks=pytest.mark.slow)],
)
def test_a_reader_that_leaves_causes_no_traceback(tiny_llama: Path, arguments: str) -> None:
    command = f"{sys.executable} -m nanochat {arguments.format(model=tiny_llama)} | true"
    finished = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.stderr == ""


@pytest.mark.parametrize(
    "module", ["nanochat", "nanochat.cli", "nanochat.engine.scheduler", "nanochat.conversation"]
)
def test_starting_imports_nothing_heavy(module: str) -> None:
    code = f"import {module}, sys; print(sorted({{'torch', 'transformers', 'textual', 'gguf'}} & set(sys.modules)))"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_engine_imports_without_what_only_the_app_needs() -> None:
    code = """
import importlib.abc, pkgutil, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("textual", "rich", "gguf", "platformdirs"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import nanochat.engine, nanochat.kernels
for package in (nanochat.engine, nanochat.kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
