"""``nanochat bench``: what it prints, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanochat.cli import main
from nanochat.commands.bench import LABELS, TITLES, UNITS, WORKLOADS

QUICK = ("--device", "cpu", "--dtype", "float32", "--kv-blocks", "256", "--max-model-len", "1024")


@pytest.mark.slow
def test_as_json(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json", "--model", str(tiny_llama), *QUICK]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["device"], report["dtype"], report["kv_tokens"]) == ("cpu", "float32", 4096)
    assert report["peak_memory_mib"] > report["weights_mib"] > 0
    assert list(report["workloads"]) == list(WORKLOADS)
    for name, figures in report["workloads"].items():
        assert all(value > 0 for value in figures.values()), name
        for key in figures:
            assert key in LABELS
            assert any(key.endswith(unit) for unit in UNITS)
    # 3 x 76 of its 288 tokens were there already, in whole blocks of 16.
    assert 70 < report["workloads"]["turns"]["cached_percent"] < 80
    assert set(TITLES) == set(WORKLOADS)


def test_for_people_and_only_what_is_asked_for(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "--workload", "long", "--workload", "turns", "--model", str(tiny_llama), *QUICK]) == 0
    )
    printed = capsys.readouterr().out
    assert "tiny-llama · cpu fp32 · float32" in printed
    assert [line.split()[0] for line in printed.splitlines() if line[0] != " "][1:] == [
        "long",
        "turns",
        "memory",
    ]
    assert " tok/s" in printed
    assert max(map(len, printed.splitlines())) <= 110


def test_a_context_too_short(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*QUICK[:-2], "--max-model-len", "256"]
    assert main(["bench", "--model", str(tiny_llama), *options]) == 1
    assert "needs a context of 512 tokens, and there are 256" in capsys.readouterr().err
