"""The native library is optional, comes from the package alone, and is never of other sources than those beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nanochat import EngineConfig
from nanochat.engine.loading import load_model
from nanochat.kernels.native import build, library
from nanochat.kernels.native.program import Arena, Counter, NotNative, Program
from tests.native import require_native


@pytest.fixture
def forget() -> Iterator[Callable[[], None]]:
    """What has been found is looked for again, in the test and after it."""

    def forget_all() -> None:
        library.find.cache_clear()
        library._load.cache_clear()

    forget_all()
    yield forget_all
    forget_all()


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no C compiler"):
        build.build()


def test_a_compiler_that_fails_is_quoted_and_leaves_the_library_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    before = build.LIBRARY.read_bytes() if build.LIBRARY.exists() else None
    with pytest.raises(RuntimeError, match="broken"):
        build.build()
    assert (build.LIBRARY.read_bytes() if build.LIBRARY.exists() else None) == before
    assert not list(build.FOLDER.glob("build-*"))


def test_a_library_of_other_sources_is_not_used(
    forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_native()
    forget()
    monkeypatch.setattr(library, "sources_hash", lambda: "0" * 32)
    assert library.find() is None


def test_other_options_or_another_compiler_make_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_native()
    assert build.is_current()
    with monkeypatch.context() as patch:
        patch.setattr(build, "_FLAGS", [*build._FLAGS, "-DSOMETHING"])
        assert not build.is_current()
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\necho "cc (of another make) 99.1"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert not build.is_current()
    monkeypatch.setenv("CC", str(tmp_path / "none"))  # what is there can be used without a compiler
    assert build.is_current()


@pytest.mark.usefixtures("forget")
def test_without_a_library_all_is_computed_by_pytorch(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "none.so")
    config = EngineConfig(model=str(tiny_llama), device="cpu", dtype="bfloat16", num_kv_blocks=16)
    assert load_model(config, lambda progress: None).compute_name == "cpu bf16"


@pytest.mark.usefixtures("forget")
def test_what_is_no_library_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "kernels.so"
    damaged.write_bytes(b"\x7fELF damaged")
    monkeypatch.setattr(library, "LIBRARY", damaged)
    assert library.find() is None


class TestMemory:
    def test_is_given_to_another_once_nothing_refers_to_it(self) -> None:
        arena = Arena()
        first = arena.take((4, 16), torch.float32)
        address, view = first.data_ptr(), first[1:].view(-1)
        del first
        other = arena.take((4, 16), torch.float32)
        assert other.data_ptr() != address  # a view still uses it
        del view
        assert arena.take((8, 16), torch.bfloat16).data_ptr() == address
        assert arena.num_bytes == 512
        assert address % 64 == 0

    def test_rows_beyond_the_room_are_refused(self) -> None:
        counter = Counter(3)
        counter.set(3)
        for number in (4, -1):
            with pytest.raises(ValueError, match="room for 3"):
                counter.set(number)

    def test_tensors_of_elsewhere_are_not_recorded(self) -> None:
        require_native()
        found = library.find()
        assert found is not None
        program = Program(found, Arena())
        known = program.input(torch.zeros(2, 16), Counter(2))
        program.input(other := torch.zeros(3, 16), Counter(3))
        with pytest.raises(NotNative, match="not computed by the program"):
            program.counter(known, torch.zeros(2, 16))
        with pytest.raises(NotNative, match="not computed by the program"):
            program.counter(known, other)  # rows of another kind
        with pytest.raises(RuntimeError, match="nothing has been recorded"):
            program.run()
        with (
            program.recording(),
            pytest.raises(RuntimeError, match="already"),
            Program(found, Arena()).recording(),
        ):
            pass
