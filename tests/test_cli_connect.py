"""The command line with a server instead of an engine of our own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.cli import main
from tests.backend.fake_server import Asked, Reply, break_off, fake_server


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads the settings of the person who runs it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_ask_prints_what_the_server_says(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        assert main(["ask", "--connect", server.url, "Hi", "--top-p", "0.5", "--system", "Be brief."]) == 0
        assert capsys.readouterr().out == "Hello there.\n"
        assert main(["--connect", f"{server.url}/v1/", "--model", "fake", "ask", "Hi", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        first = server.chats()[0]
    assert (answer["text"], answer["prompt_tokens"], answer["cached_tokens"]) == ("Hello there.", 20, 8)
    assert (answer["token_ids"], answer["preemptions"]) == (None, None)
    assert first["top_p"] == 0.5
    assert [message["role"] for message in first["messages"]] == ["system", "user"]


def test_what_is_not_told_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    def tell_nothing(asked: Asked, reply: Reply) -> None:
        reply.begin_stream()
        reply.piece("Hi", finish="stop")
        reply.event("[DONE]")

    with fake_server(tell_nothing) as server:
        assert main(["ask", "--connect", server.url, "Hi", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["prompt_tokens"], answer["cached_tokens"], answer["finish_reason"]) == (
        None,
        None,
        "stop",
    )


def test_settings_of_the_file_are_sent_under_the_command_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[sampling]\ntop_k = 5\ntemperature = 0.1\n[engine]\nblock_size = 8\n")
    with fake_server() as server:
        options = ["--config", str(file), "--temperature", "0.7"]
        assert main(["ask", "--connect", server.url, "Hi", *options]) == 0
        (body,) = server.chats()
    assert (body["top_k"], body["temperature"]) == (5, 0.7)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--connect", "http://localhost:1", "--kv", "int8"], "--kv has no effect with --connect"),
        (["--connect", "http://localhost:1", "--no-prefix-cache"], "--no-prefix-cache has no effect"),
        (["--connect", "localhost:1"], "Put http:// before it: http://localhost:1"),
        (["--connect", ""], "--connect is empty"),
        (["--connect", "http://localhost:1/v1/chat/completions"], "it ends in /v1 or in nothing"),
        (["--connect", "http://me:secret@localhost"], "--connect must not hold a name"),
        (["--api-key-env", "KEY"], "--api-key-env has no effect without --connect"),
        (["--connect", "http://localhost:1", "--api-key-env", "sk-secret"], "not the key itself"),
    ],
)
def test_wrong_usage(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["ask", "Hi", *options], options):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "secret" not in error


def test_failures_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("NANOCHAT_NO_KEY", raising=False)
    with fake_server(break_off("Half")) as server:
        for options, said in (
            (["--api-key-env", "NANOCHAT_NO_KEY"], "NANOCHAT_NO_KEY is empty or not set"),
            (["--model", "other"], "has no model other; it has: fake"),
            ([], "broke in mid-answer"),
        ):
            assert main(["ask", "Hi", "--connect", server.url, *options]) == 1
            error = capsys.readouterr().err
            assert said in error
            assert error.count("\n") == 1


def test_an_error_after_half_an_answer_has_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_terminal, shown in ((True, "Half\n"), (False, "Half")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        with fake_server(break_off("Half")) as server:
            assert main(["ask", "Hi", "--connect", server.url]) == 1
        assert capsys.readouterr().out == shown


def test_a_tool_that_is_called_is_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    def call(asked: Asked, reply: Reply) -> None:
        reply.begin_stream()
        function = {"name": "x", "arguments": "{}"}
        reply.piece(tool_calls=[{"index": 0, "function": function}], finish="tool_calls")
        reply.event("[DONE]")

    with fake_server(call) as server:
        assert main(["ask", "Hi", "--connect", server.url]) == 1
    assert "calls a tool instead of answering" in capsys.readouterr().err


def test_a_client_loads_no_engine() -> None:
    """Neither PyTorch nor a tokenizer's library is imported for what another machine computes."""
    program = (
        "import sys; from nanochat.cli import main; status = main(sys.argv[1:]);"
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'numpy') if name in sys.modules], status)"
    )
    with fake_server() as server:
        done = subprocess.run(
            [sys.executable, "-c", program, "ask", "--connect", server.url, "Hi"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout == "Hello there.\n[] 0\n"
    assert done.stderr == ""
