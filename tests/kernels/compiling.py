"""Compiles what a launcher launches for a GPU that isn't there, and reads what the code needs from the compiler."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from nanochat.kernels import (
    triton_utils,
)
from nanochat.kernels.triton_utils import DeviceInfo

SHARED_KB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory a program may use, by compute capability."""
MAX_STACK_BYTES = 512
"""Of a thread: room for registers that did not fit."""
NUM_SMS = 30
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
}


@dataclass
class Launch:
    """One recorded launch: what `triton.compile` needs."""

    source: ASTSource
    options: dict[str, Any]


class Recorder:
    """Stands in for a kernel: keeps each launch instead of running it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[Launch] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._record

    def _record(self, *args: Any, **kwargs: Any) -> None:
        names = self.kernel.arg_names
        options = {name: value for name, value in kwargs.items() if name not in names}
        values = dict(zip(names, args, strict=False)) | {n: v for n, v in kwargs.items() if n in names}
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], list[list[Any]]] = {}
        for index, parameter in enumerate(self.kernel.params):
            value = values[parameter.name]
            is_one = value == 1 if isinstance(value, int) else False
            if parameter.is_constexpr or value is None or (is_one and not parameter.do_not_specialize):
                signature[parameter.name] = "constexpr"
                constants[(index,)] = value
                continue
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + TYPE_NAMES[value.dtype]
                # As at run time: what is a view from somewhere in a tensor may lie anywhere.
                aligned = value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                aligned = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
            if aligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = GluonASTSource if self.kernel.is_gluon() else ASTSource
        self.launches.append(Launch(source(self.kernel, signature, constants, attributes), options))


def check_launches(
    monkeypatch: pytest.MonkeyPatch,
    capability: int,
    module: ModuleType,
    kernel_name: str,
    launch: Callable[[], object],
) -> list[Any]:
    """Record what ``launch`` launches on a GPU of this capability, compile it, and check what it needs.

    Returns what was compiled.
    """
    recorder = Recorder(getattr(module, kernel_name))
    with monkeypatch.context() as patch:
        for changed in (triton_utils, module):
            if hasattr(changed, "device_info"):
                patch.setattr(changed, "device_info", lambda device: DeviceInfo(capability, NUM_SMS))
        patch.setattr(module, kernel_name, recorder)
        launch()
    assert recorder.launches
    all_compiled = []
    for recorded in recorder.launches:
        compiled = triton.compile(
            recorded.source, target=GPUTarget("cuda", capability, 32), options=recorded.options
        )
        assert compiled.metadata.shared <= SHARED_KB[capability] * 1024
        assert resource(compiled, "STACK") <= MAX_STACK_BYTES
        all_compiled.append(compiled)
    return all_compiled


def programs_that_fit(compiled: Any) -> int:
    """How many programs a multiprocessor of compute capability 9.0 has registers and shared memory for."""
    warps = compiled.metadata.num_warps
    warp_registers = -(-resource(compiled, "REG") * 32 // 256) * 256
    by_registers = 4 * (16_384 // warp_registers) // warps
    return min(by_registers, (228 << 10) // (compiled.metadata.shared + 1024))


def resource(compiled: Any, name: str) -> int:
    """Of a thread, from the compiler's report: "REG", registers; "STACK", bytes in local memory."""
    path = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    report = subprocess.run(
        [CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True
    ).stdout
    match = re.search(rf"{name}:(\d+)", report)
    assert match, report
    return int(match[1])
