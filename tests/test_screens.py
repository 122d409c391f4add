"""The pictures of docs/screens: scripted scenes come out the same each time, and every scene has its picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks.scenes import SCENES
from benchmarks.screens import FOLDER, normalised, render

TINY = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 256, "max_model_len": 2048}


def text(svg: str) -> str:
    return " ".join("".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ").split())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("start", ["Downloading", "40.9 MB of 92.9 MB", "Lisbon"]),
        ("branches", ["‹ 2/3 ›", "matches(path, word)", "python"]),
        ("reasoning", ["▾ Thought", "▸ Thought", "117 km/h"]),
    ],
)
def test_a_scripted_scene_is_the_same_each_time(tiny_llama: Path, name: str, words: list[str]) -> None:
    first, second = (render(SCENES[name], model=str(tiny_llama), **TINY) for _ in range(2))
    assert first == second
    for word in words:
        assert word in text(first)


def test_pictures_name_their_parts_by_what_they_show_and_need_no_network() -> None:
    svg = '<svg><style>@font-face { src: url("https://x") }\n.terminal-123-r1 {}</style><g class="terminal-123-r1"/></svg>'
    other = svg.replace("123", "987")
    assert normalised(svg) == normalised(other)
    assert "https" not in normalised(svg)


def test_every_scene_has_its_picture_and_no_picture_is_left_over() -> None:
    assert {file.stem for file in FOLDER.glob("*.svg")} == set(SCENES)
    for file in FOLDER.glob("*.svg"):
        assert text(file.read_text(encoding="utf-8"))
