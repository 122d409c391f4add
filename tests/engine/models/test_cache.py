"""The model cache: whole folders or none, whoever dies or meddles."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nanochat.engine.models.cache import CACHE_DIR_VARIABLE, build_once, cache_root
from nanochat.engine.progress import Progress, ignore_progress
from nanochat.errors import ModelNotFound


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(folder))
    return folder


class Builder:
    """Fills a folder and counts how often it was asked to."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")


def build(builder: Builder) -> Path:
    return build_once("a-model", builder, ignore_progress)


def test_is_built_once() -> None:
    builder = Builder()
    assert build(builder) == build(builder)
    assert builder.calls == 1


def test_only_its_user_may_look_in(root: Path) -> None:
    folder = build(Builder())
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_default_place_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_DIR_VARIABLE)
    assert cache_root().name == "nanochat"
    assert cache_root().is_absolute()


def test_a_home_that_is_nobodys_is_taken_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, "~nobody-of-that-name/models")
    assert cache_root() == Path("~nobody-of-that-name/models")


def test_a_failed_build_leaves_nothing(root: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half of it")
        raise ModelNotFound("cut off")

    with pytest.raises(ModelNotFound, match="cut off"):
        build_once("a-model", fail, ignore_progress)
    assert [path.name for path in root.iterdir()] == [".lock"]


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest gone", "manifest no JSON", "a file"])
def test_a_damaged_folder_is_built_again(damage: str) -> None:
    builder = Builder()
    folder = build(builder)
    manifest = folder / "nanochat-manifest.json"
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(b"weig")
    elif damage == "missing":
        (folder / "model.safetensors").unlink()
    elif damage == "manifest gone":
        manifest.unlink()
    elif damage == "manifest no JSON":
        manifest.write_text("[")
    else:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        folder.write_text("not a folder")
    assert build(builder) == folder
    assert builder.calls == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert json.loads(manifest.read_text())["config.json"] == 2


def test_leftovers_of_a_killed_process_are_cleared(root: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from nanochat.engine.models.cache import build_once\n"
        "def build(folder):\n"
        "    (folder / 'model.safetensors').write_bytes(b'half'); os._exit(9)\n"
        "build_once('a-model', build, lambda progress: None)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert any(path.name.startswith(".work-") for path in root.iterdir())
    folder = build(Builder())
    assert sorted(path.name for path in root.iterdir()) == [".lock", "a-model"]
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_second_builder_waits_and_takes_what_the_first_made() -> None:
    started, finish = threading.Event(), threading.Event()
    waiting: list[Progress] = []

    def slow(folder: Path) -> None:
        started.set()
        finish.wait(10)
        Builder()(folder)

    first = threading.Thread(target=build_once, args=("a-model", slow, ignore_progress))
    first.start()
    started.wait(10)
    second_builder = Builder()

    def note(progress: Progress) -> None:
        waiting.append(progress)
        finish.set()

    folder = build_once("a-model", second_builder, note)
    first.join()
    assert second_builder.calls == 0
    assert waiting[0].stage.startswith("Waiting for another nanochat")
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_two_processes_at_once() -> None:
    script = (
        "import time; from nanochat.engine.models.cache import build_once\n"
        "def build(folder):\n"
        "    print('built'); time.sleep(0.3); (folder / 'config.json').write_text('{}')\n"
        "print(build_once('a-model', build, lambda progress: None))"
    )
    command = [sys.executable, "-c", script]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum(output.count("built") for output in outputs) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_that_cannot_be_written(root: Path) -> None:
    root.mkdir(mode=0o500)
    with pytest.raises(ModelNotFound, match=rf"can't be kept in .*set {CACHE_DIR_VARIABLE}"):
        build(Builder())


def test_a_place_that_is_no_folder(root: Path) -> None:
    root.write_text("")
    with pytest.raises(ModelNotFound, match=rf"can't be kept in .*set {CACHE_DIR_VARIABLE}"):
        build(Builder())


def test_a_full_disk(root: Path) -> None:
    def fill(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelNotFound, match=r"No space left on device\. Make room"):
        build_once("a-model", fill, ignore_progress)


def test_a_file_in_the_place_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / place))
        with pytest.raises(ModelNotFound, match="is a file and no folder"):
            build_once("model", lambda _: None, lambda _: None)
