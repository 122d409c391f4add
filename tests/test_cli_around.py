"""What stands around the app on the command line: the settings file, completion in the shell, the browser."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from nanochat.cli import main
from nanochat.commands.completion import SHELLS
from nanochat.errors import InvalidOption
from nanochat.ui.web import parse_address


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads the settings of the person who runs it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


class TestConfig:
    def test_the_example_is_a_file_without_mistakes(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["config", "--example"]) == 0
        text = capsys.readouterr().out
        file = tmp_path / "config.toml"
        lines = [
            line[2:] if line.startswith("# ") and (" = " in line or "[presets" in line) else line
            for line in text.split("\n")
        ]
        for content in (text, "\n".join(lines)):
            file.write_text(content)
            assert main(["config", "--config", str(file)]) == 0
            assert capsys.readouterr().out == f"{file}: no mistakes.\n"

    def test_a_mistake_is_one_sentence_with_file_and_key(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "config.toml"
        for content, key in (('[keys]\nquit = "q"\n', "quit"), ("[app]\nthem = 1\n", "them")):
            file.write_text(content)
            for command in (["--config", str(file), "config"], ["--config", str(file)]):
                assert main(command) == 1
                error = capsys.readouterr().err
                assert error.count("\n") == 1
                assert str(file) in error
                assert key in error

    def test_without_a_file_it_says_where_one_would_lie(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        assert main(["config"]) == 0
        assert str(tmp_path) in capsys.readouterr().out


class TestCompletion:
    @pytest.mark.parametrize("shell", SHELLS)
    def test_the_script_knows_commands_and_options(
        self, shell: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        for word in ("perplexity", "simulate", "completion", "--kv-blocks", "--serve-web"):
            assert word.lstrip("-") in script

    def test_bash_takes_the_script_and_completes(self, tmp_path: Path) -> None:
        program = f"{sys.executable} -m nanochat completion bash > {tmp_path}/c && . {tmp_path}/c && complete -p nanochat"
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
        assert "nanochat" in done.stdout


COMMANDS = ["", "ask", "bench", "perplexity", "simulate", "demo", "serve", "config", "completion"]


class TestWhereOutputGoesNowhere:
    """A status of 0 would say that it was written."""

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
    def test_to_a_full_disk(self) -> None:
        for words in (*([*name.split(), "--help"] for name in COMMANDS), ["config"], ["completion", "bash"]):
            assert self.run(words, "/dev/full") == (1, "nanochat: No space left on device.\n")

    def test_to_a_reader_that_has_gone(self) -> None:
        for words in (*([*name.split(), "--help"] for name in COMMANDS), ["config"], ["completion", "bash"]):
            reading, writing = os.pipe()
            os.close(reading)
            try:
                assert self.run(words, writing) == (1, "")
            finally:
                os.close(writing)

    @staticmethod
    def run(words: list[str], output: str | int) -> tuple[int, str]:
        """In this process, which is quicker, with a standard output as Python would have made it."""
        code, errors = 0, io.StringIO()
        with pytest.MonkeyPatch.context() as patches, contextlib.redirect_stderr(errors):
            file = open(output, "w", closefd=isinstance(output, str))  # noqa: SIM115
            patches.setattr(sys, "stdout", file)
            try:
                code = main(words)
            except SystemExit as error:
                code = int(str(error.code or 0))
            file.close()  # must have nothing left that can't be written
        return code, errors.getvalue()


class TestServeWeb:
    def test_without_the_extra_one_sentence_says_how_to_get_it(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "textual_serve", None)
        assert main(["--serve-web"]) == 1
        error = capsys.readouterr().err
        assert "pip install -e '.[web]'" in error
        assert error.count("\n") == 1

    def test_each_visitor_gets_the_app_with_the_same_options(self, monkeypatch: pytest.MonkeyPatch) -> None:
        served: list[object] = []

        class Server:
            def __init__(self, command: str, **address: object) -> None:
                served.append((command, address))

            def serve(self) -> None:
                served.append("served")

        package, module = types.ModuleType("textual_serve"), types.ModuleType("textual_serve.server")
        package.server = module  # type: ignore[attr-defined]
        module.Server = Server  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "textual_serve", package)
        monkeypatch.setitem(sys.modules, "textual_serve.server", module)
        assert main(["--serve-web", "0.0.0.0:9000", "--no-prefix-cache", "--system", "Be brief; $HOME"]) == 0
        (command, address), then = served
        assert then == "served"
        assert address == {"host": "0.0.0.0", "port": 9000, "title": "nanochat"}
        words = shlex.split(command)
        assert words[1:] == ["-m", "nanochat", "--no-prefix-cache", "--system=Be brief; $HOME"]

    @pytest.mark.parametrize(
        ("text", "address"),
        [
            ("localhost:8000", ("localhost", 8000)),
            ("9000", ("localhost", 9000)),
            ("box", ("box", 8000)),
            (":81", ("localhost", 81)),
            ("[::1]:81", ("::1", 81)),
        ],
    )
    def test_addresses(self, text: str, address: tuple[str, int]) -> None:
        assert parse_address(text) == address

    @pytest.mark.parametrize("text", ["localhost:port", "a b:1", "localhost:0", "localhost:99999"])
    def test_what_is_no_address(self, text: str) -> None:
        with pytest.raises(InvalidOption):
            parse_address(text)

    def test_it_means_nothing_to_a_command(self) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["--serve-web", "8000", "simulate"])
        assert caught.value.code == 2
