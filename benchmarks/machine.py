"""What a figure needs beside it to mean anything: the machine, the versions, the date."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")


def describe_machine(*packages: str, device: str = "auto") -> dict[str, str]:
    """Today's date (UTC), what computed, and the versions of Python, PyTorch and ``packages``.

    ``device`` is the one that was measured: "cpu" is described as such on a machine with a GPU too, "auto" and
    "cuda" as the GPU if there is one, and then the processor of its host comes beside it.
    """
    gpu = None if device == "cpu" else describe_gpu()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": gpu or describe_cpu(),
        **({"host": describe_cpu()} if gpu else {}),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", *packages)},
    }


def describe_gpu() -> str | None:
    """The first GPU's name, and how many there are if there are more."""
    import torch  # benchmarks of the scheduler and the history have no other use for it

    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    return torch.cuda.get_device_name() + (f", {count} of them" if count > 1 else "")


def describe_cpu() -> str:
    """Cores, architecture, and the name as far as the system tells it."""
    name = platform.processor() or platform.machine()
    if _CPU_INFO.exists():
        info = _CPU_INFO.read_text()
        names = [line.split(":")[1].strip() for line in info.splitlines() if "model name" in line]
        name = (names[0] if names else name) + (" with AMX" if "amx_bf16" in info else "")
    return f"{os.cpu_count()}-core {platform.machine()} CPU ({name})"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
