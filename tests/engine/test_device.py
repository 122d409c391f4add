"""Where a model runs, in which type, and what memory is left there."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from nanochat.engine import device
from nanochat.engine.config import EngineConfig
from nanochat.engine.device import choose_device, choose_dtype, free_cpu_bytes, is_out_of_memory
from nanochat.errors import InvalidOption

MIB = 2**20
CPU = torch.device("cpu")


class TestFreeMemoryOfTheCpu:
    @pytest.fixture
    def cgroup(self, tmp_path: Path) -> Path:
        """A container that may use 900 MiB, and uses 600: 200 of them only to keep files at hand."""
        (tmp_path / "memory.max").write_text(f"{900 * MIB}\n")
        (tmp_path / "memory.current").write_text(f"{600 * MIB}\n")
        (tmp_path / "memory.stat").write_text(f"anon {400 * MIB}\ninactive_file {200 * MIB}\n")
        return tmp_path

    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = psutil.virtual_memory()._replace(available=700 * MIB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    def test_a_container_may_have_less_than_the_machine(self, cgroup: Path) -> None:
        assert free_cpu_bytes(cgroup) == 500 * MIB

    def test_or_more(self, cgroup: Path) -> None:
        (cgroup / "memory.max").write_text(f"{9000 * MIB}\n")
        assert free_cpu_bytes(cgroup) == 700 * MIB

    def test_or_no_limit(self, cgroup: Path) -> None:
        (cgroup / "memory.max").write_text("max\n")
        assert free_cpu_bytes(cgroup) == 700 * MIB

    def test_over_its_limit_it_has_none(self, cgroup: Path) -> None:
        (cgroup / "memory.current").write_text(f"{5000 * MIB}\n")
        assert free_cpu_bytes(cgroup) == 0

    def test_no_container(self, tmp_path: Path) -> None:
        assert free_cpu_bytes(tmp_path) == 700 * MIB


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


class TestChoosing:
    def test_a_gpu_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(InvalidOption, match="leave out --device cuda"):
            choose_device(EngineConfig(device="cuda"))
        assert choose_device(EngineConfig()) == CPU

    def test_the_cpu_beside_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert choose_device(EngineConfig(device="cpu")) == CPU

    def test_a_type_as_asked_for(self) -> None:
        assert choose_dtype(EngineConfig(dtype="float16"), CPU) == torch.float16

    @pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
    def test_bf16_where_the_hardware_has_it(
        self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert choose_dtype(EngineConfig(), torch.device("cuda", 0)) == dtype


class TestBfloat16OnCpus:
    """Whether a processor multiplies BF16, asked of PyTorch or, where it doesn't know, of Linux."""

    @pytest.mark.parametrize(("flags", "dtype"), [("fpu amx_bf16", torch.bfloat16), ("fpu", torch.float32)])
    def test_a_torch_that_cannot_tell(
        self, monkeypatch: pytest.MonkeyPatch, flags: str, dtype: torch.dtype
    ) -> None:
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
        monkeypatch.setattr(device, "_cpu_flags", lambda: frozenset(flags.split()))
        assert choose_dtype(EngineConfig(), CPU) == dtype

    def test_flags_of_linux(self, tmp_path: Path) -> None:
        info = tmp_path / "cpuinfo"
        assert device._cpu_flags(info) == frozenset()
        info.write_text("processor : 0\nflags\t\t: fpu avx512_bf16\n\nprocessor : 1\nflags\t\t: fpu\n")
        assert device._cpu_flags(info) == {"fpu", "avx512_bf16"}
