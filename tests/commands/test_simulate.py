"""``nanochat simulate``: what it prints, and what it says when something is wrong."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from nanochat.cli import main

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.9951690,396,9
2023-11-16 18:15:47.9951690,20,3
"""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE, encoding="utf-8")
    return str(path)


def test_the_table_shows_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 0
    printed = capsys.readouterr().out
    for name in ("mixed, ample cache", "mixed, cache pressure", "decode fairness", "preemption pressure"):
        assert name in printed
    assert "9 at most in the first case; reserved at admission: 16" in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_the_table_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--json"]) == 0
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert [(case["rounds"], case["preemptions"], case["leaked_blocks"]) for case in cases] == [
        (10, 0, 0),
        (12, 0, 0),
        (12, 0, 0),
        (12, 4, 0),
    ]


def test_a_trace(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", trace]) == 0
    printed = capsys.readouterr().out
    assert "790 prompt, 56 generated" in printed
    assert "preemptions  0" in printed


def test_a_trace_as_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--kv-blocks", "64", "--max-batched-tokens", "200", "--shared-prefix", "16", "--speed", "2"]
    assert main(["simulate", "--trace", trace, "--json", *options]) == 0
    result = json.loads(capsys.readouterr().out)["trace"]
    assert (result["requests"], result["refused"], result["preemptions"]) == (3, 0, 0)
    assert result["ttft_steps"]["max"] <= 3
    assert result["prefix_hit_rate"] > 0


def test_lengths_beyond_the_cache_cost_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"{TRACE}2023-11-16 18:15:48,{10**15},3\n", encoding="utf-8")
    assert main(["simulate", "--trace", str(path), "--json", "--shared-prefix", str(10**15)]) == 0
    result = json.loads(capsys.readouterr().out)["trace"]
    assert (result["requests"], result["refused"]) == (3, 1)


def test_an_output_without_the_micro_sign(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["simulate", "--trace", trace]) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--trace", "none.csv"], "can't be read"),
        (["--trace", "{trace}", "--kv-blocks", "0"], "--kv-blocks must be a whole number between 1"),
        (["--trace", "{trace}", "--kv-blocks", "10000001"], "--kv-blocks can be at most 10,000,000"),
        (["--trace", "{trace}", "--speed", "0"], "--speed must be between"),
        (["--trace", "{trace}", "--speed", "nan"], "--speed must be between"),
        (["--trace", "{trace}", "--step-ms", "inf"], "--step-ms between"),
        (["--trace", "{trace}", "--shared-prefix", "-1"], "--shared-prefix must be at least 0"),
        (["--max-seqs", "3"], "--max-seqs is for replaying a trace; add --trace"),
    ],
)
def test_one_line_says_what_is_wrong(
    trace: str, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = 1 if "can't be read" in sentence else 2
    assert main(["simulate", *(option.format(trace=trace) for option in options)]) == status
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
