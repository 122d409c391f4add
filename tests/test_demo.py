"""The unattended demonstration: a picture of the running app, or one sentence."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from nanochat.cli import main


def run(model: Path, file: Path, *options: str) -> int:
    engine = ["--device", "cpu", "--dtype", "float32", "--kv-blocks", "256"]
    return main(["demo", "--model", str(model), *engine, "--screenshot", str(file), *options])


@pytest.mark.parametrize("tabs", ["1", "3"])
def test_the_picture_shows_the_running_app(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tabs: str
) -> None:
    file = tmp_path / "new" / "demo.svg"
    assert run(tiny_llama, file, "--tabs", tabs, "--tokens", "8", "--size", "130x40") == 0
    assert capsys.readouterr().out == f"{file}\n"
    shown = "".join(ElementTree.fromstring(file.read_text(encoding="utf-8")).itertext()).replace("\xa0", " ")
    for text in ("tiny-llama", "guitar", "KV blocks", "Prefix hits", "tok/s"):
        assert text in shown
    assert ("Fork of" in shown) == (tabs == "3")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--tabs", "0"), "--tabs must be between 1 and 9"),
        (("--size", "big"), "--size must be columns x rows"),
        (("--size", "10x10"), "--size must be between"),
        (("--tokens", "0"), "--tokens must be at least 1"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], sentence: str
) -> None:
    assert run(tmp_path, tmp_path / "x.svg", *options) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_model_that_cannot_be_loaded_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "none", tmp_path / "x.svg") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "none" in error
    assert not (tmp_path / "x.svg").exists()


def test_a_picture_that_cannot_be_saved_is_one_sentence(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run(tiny_llama, tmp_path / "file" / "x.svg", "--tabs", "1", "--tokens", "2") == 1
    assert "can't be saved" in capsys.readouterr().err
