"""``nanochat serve``: what it says, how it ends, and what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from nanochat.cli import main
from nanochat.commands.serve import _place

ENDLESS = {"max_tokens": 60_000, "extra_body": {"ignore_eos": True}}


@contextmanager
def running(model: Path, folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, once it listens, and the address that it names."""
    names = ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")
    environment = os.environ | dict.fromkeys(names, str(folder)) | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nanochat", "serve", "--model", str(model), "--device", "cpu"]
    with subprocess.Popen(
        [*command, "--port", "0", "--kv-blocks", "4096", *options],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("Loading the model")
            line = process.stdout.readline()
            assert line.startswith("Serving "), line
            yield process, line.split(" at ")[1].split()[0]
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(long_llama: Path, tmp_path: Path, number: signal.Signals) -> None:
    """An answer under way is told, and the status is 0."""
    with running(long_llama, tmp_path) as (process, address):
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hi"}], stream=True, **ENDLESS
        )
        next(iter(stream))
        process.send_signal(number)
        with pytest.raises(openai.APIError, match="shutting down"):
            for _ in stream:
                pass
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "The server has ended.\n"


@pytest.mark.slow
def test_the_key_may_come_from_the_environment(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOCHAT_API_KEY", "secret")
    with running(tiny_llama, tmp_path, "--host", "0.0.0.0", "--system", "Be brief.") as (process, address):
        assert address.startswith("http://127.0.0.1:")  # nobody can ask at 0.0.0.0
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=address, api_key="none").models.list()
        client = openai.OpenAI(base_url=address, api_key="secret")
        assert client.models.list().data[0].id == tiny_llama.name
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--host", "0.0.0.0"], "give it an --api-key"),
        (["--host", ""], "--host is empty"),
        (["--port", "70000"], "--port must lie between"),
        (["--max-requests", "0"], "--max-requests must lie between"),
        (["--api-key", ""], "The API key is empty"),
        (["--api-key", " \t"], "The API key is empty"),
    ],
)
def test_wrong_usage_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], sentence: str
) -> None:
    monkeypatch.delenv("NANOCHAT_API_KEY", raising=False)
    assert main(["serve", *options]) == 2
    assert sentence in capsys.readouterr().err


def test_where_a_server_can_be_asked() -> None:
    others = " and port 80 of this machine's other addresses"
    assert _place("localhost", "127.0.0.1", 80) == "http://localhost:80/v1"
    assert _place("fe80::1%eth0", "fe80::1%eth0", 80) == "http://[fe80::1%eth0]:80/v1"
    assert _place("0.0.0.0", "0.0.0.0", 80) == f"http://127.0.0.1:80/v1{others}"
    assert _place("::", "::", 80) == f"http://[::1]:80/v1{others}"


def test_without_the_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nanochat.server.run", None)  # what lets an import fail
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "nanochat.server.run")
    monkeypatch.delitem(sys.modules, "nanochat.server.connections", raising=False)
    assert main(["serve"]) == 1
    assert "pip install -e '.[serve]'" in capsys.readouterr().err


def test_a_model_that_isnt_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "/nowhere/at/all", "--port", "0"]) == 1
    assert "/nowhere/at/all" in capsys.readouterr().err
