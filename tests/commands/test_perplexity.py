"""``nanochat perplexity``: what it prints, where its progress goes, and what it says of files it can't use."""

from __future__ import annotations

import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from nanochat.cli import main
from nanochat.commands.perplexity import ProgressLine
from nanochat.engine.progress import Progress

LETTERS = "abcdefghij klmnop\n"


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads the settings of the person who runs it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("".join(random.Random(0).choices(LETTERS, k=300)), encoding="utf-8")
    return file


def perplexity(file: Path, model: Path, *arguments: str) -> int:
    fixed = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--ctx", "64"]
    if "--decode-tokens" not in arguments:
        fixed += ["--decode-tokens", "64"]
    return main(["perplexity", str(file), *fixed, *arguments])


def printed_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    captured = capsys.readouterr()
    assert captured.err == ""
    result: dict[str, Any] = json.loads(captured.out)
    return result


class TestOutput:
    def test_one_cache(self, text: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert perplexity(text, tiny_llama, "--kv", "int8", "--json") == 0
        report = printed_json(capsys)
        assert [cache["kv_dtype"] for cache in report["prefill"]["caches"]] == ["int8"]
        assert report["rollout"] is None
        assert report["tokens"] == 300

    def test_both_caches(self, text: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert perplexity(text, tiny_llama, "--compare", "--json") == 0
        report = printed_json(capsys)
        for path in ("prefill", "decode", "prefill_of_decoded"):
            full, int8 = report[path]["caches"]
            assert int8["perplexity"] == pytest.approx(full["perplexity"] * (1 + int8["perplexity_change"]))
            assert full["kl_mean"] is None
            assert int8["kl_mean"] > 0
        assert 0 <= report["rollout"]["agreement"] <= 1

    def test_windows_as_asked_for(
        self, text: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = ["--stride", "16", "--limit-tokens", "200", "--decode-tokens", "0", "--json"]
        assert perplexity(text, tiny_llama, *options) == 0
        report = printed_json(capsys)
        assert (report["ctx"], report["stride"], report["tokens"]) == (64, 16, 200)
        assert report["prefill"]["tokens"] == 199
        assert report["decode"] is None

    def test_the_tables_hold_the_same_figures(
        self, text: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert perplexity(text, tiny_llama, "--compare", "--json") == 0
        report = printed_json(capsys)
        assert perplexity(text, tiny_llama, "--compare") == 0
        printed = capsys.readouterr().out
        assert "300 tokens in windows of 64, one every 32" in printed
        for path in ("prefill", "decode", "prefill_of_decoded"):
            for cache in report[path]["caches"]:
                assert f"{cache['perplexity']:.6g}" in printed
        int8 = report["prefill"]["caches"][1]
        assert f"{int8['perplexity_change']:+.3%}" in printed
        assert f"{int8['kl_mean']:.1e}" in printed
        assert f"{int8['top1_agreement']:.2%}" in printed
        assert f"{report['rollout']['agreement']:.1%} of all places agree" in printed

    def test_the_table_of_one_cache_compares_nothing(
        self, text: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert perplexity(text, tiny_llama) == 0
        printed = capsys.readouterr().out
        assert "perplexity" in printed
        assert "KL" not in printed
        assert "Greedy" not in printed

    def test_a_short_text_is_one_window(
        self, text: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text.write_text("a text of some 24 tokens", encoding="utf-8")
        model = ["--model", str(tiny_llama), "--device", "cpu", "--dtype", "float32"]
        assert main(["perplexity", str(text), *model, "--json", "--compare"]) == 0
        report = printed_json(capsys)
        assert (report["ctx"], report["stride"], report["tokens"]) == (24, 12, 24)
        assert report["prefill"]["tokens"] == 23
        assert main(["perplexity", str(text), *model, "--limit-tokens", "2"]) == 0

    def test_settings_count(
        self, text: Path, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        settings = tmp_path / "settings.toml"
        settings.write_text('[engine]\nkv_dtype = "int8"\n')
        assert perplexity(text, tiny_llama, "--config", str(settings), "--json") == 0
        assert printed_json(capsys)["prefill"]["caches"][0]["kv_dtype"] == "int8"

    def test_newlines_are_taken_as_they_are(
        self, text: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text.write_bytes(b"one\r\ntwo\r\n" * 10)
        assert perplexity(text, tiny_llama, "--json") == 0
        assert printed_json(capsys)["tokens"] == 100


class TestMistakes:
    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            (None, "There is no file"),
            (b"", "is empty"),
            (b" \n\t ", "is empty"),
            (b"\x89PNG\r\n\x1a\n\x00\x00", "isn't text in UTF-8 (byte 0 can't be read)"),
            ("Größe".encode("latin-1"), "isn't text in UTF-8 (byte 2 can't be read)"),
            (b"text\0and more", "holds binary data"),
            (b"too short", "9 tokens, fewer than one window of 64"),
        ],
    )
    def test_files(
        self,
        tmp_path: Path,
        tiny_llama: Path,
        capsys: pytest.CaptureFixture[str],
        content: bytes | None,
        sentence: str,
    ) -> None:
        file = tmp_path / "odd.txt"
        if content is not None:
            file.write_bytes(content)
        assert perplexity(file, tiny_llama) == 1
        self.check_message(capsys, sentence)

    def test_a_folder(self, tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert perplexity(tmp_path, tiny_llama) == 1
        self.check_message(capsys, "can't be read: Is a directory")

    @pytest.mark.parametrize(
        ("arguments", "status", "sentence"),
        [
            (["--stride", "0"], 2, "--stride must be at least 1"),
            (["--stride", "65"], 2, "--stride must be between 1 and"),
            (["--ctx", "3000"], 1, "over this model's limit of 2,048"),
            (["--decode-tokens", "5000"], 1, "--decode-tokens must be between 1 and"),
            (["--kv-blocks", "3"], 1, "takes 4 KV blocks and there are 3"),
            (["--max-model-len", "20"], 2, "--ctx 64 is over --max-model-len 20"),
        ],
    )
    def test_options(
        self,
        text: Path,
        tiny_llama: Path,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        status: int,
        sentence: str,
    ) -> None:
        assert perplexity(text, tiny_llama, *arguments) == status
        self.check_message(capsys, sentence)

    @pytest.mark.parametrize("option", ["--system=x", "--no-prefix-cache", "--no-cuda-graphs"])
    def test_options_without_effect_are_wrong_usage(
        self, text: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str], option: str
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            perplexity(text, tiny_llama, option)
        assert caught.value.code == 2
        assert "unrecognized arguments" in capsys.readouterr().err

    @staticmethod
    def check_message(capsys: pytest.CaptureFixture[str], sentence: str) -> None:
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("nanochat: ")
        assert captured.err.count("\n") == 1
        assert sentence in captured.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("nanochat.commands.perplexity.time.monotonic", lambda: self.now)


class TestProgressLine:
    def test_a_terminals_line_is_rewritten_and_wiped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal, clock = Terminal(), Clock(monkeypatch)
        monkeypatch.setattr(sys, "stderr", terminal)
        with ProgressLine() as progress:
            progress(Progress("Loading", 1, 2))
            assert terminal.getvalue() == ""
            clock.now += 0.2
            progress(Progress("Loading weights", 1, 2))
            clock.now += 0.05
            progress(Progress("Too soon", 1, 2))
            clock.now += 0.3
            progress(Progress("Scoring"))
        written = terminal.getvalue()
        assert "\n" not in written
        long, short, blank, end = written.split("\r")[1:]
        assert long == "Loading weights 50% (1 of 2), 0 s"
        assert short.rstrip() == "Scoring, 1 s"
        assert len(short) == len(long)
        assert blank.strip() == end == ""
        assert len(blank) >= len(short.rstrip())

    def test_a_file_gets_a_line_now_and_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        file, clock = io.StringIO(), Clock(monkeypatch)
        monkeypatch.setattr(sys, "stderr", file)
        with ProgressLine() as progress:
            for done in range(60):
                progress(Progress("Downloading", done * 1000, 60_000, "B"))
                clock.now += 1
        assert file.getvalue().splitlines() == [
            f"Downloading {second / 60:.0%}, {second} s" for second in (10, 20, 30, 40, 50)
        ]
