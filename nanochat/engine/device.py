"""Where a model runs and in which type: turns "auto" into a choice that is fast on this machine.

Also tells how much memory a machine has left, and a lack of it from other errors.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from nanochat.engine.config import DType, EngineConfig
from nanochat.errors import DeviceLost, InvalidOption, reason_of

_DTYPES: dict[DType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


_WEIGHT_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def choose_device(config: EngineConfig) -> torch.device:
    """``auto`` is the GPU where there is one.

    Raises:
        InvalidOption: a GPU was asked for and torch sees none.
    """
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise InvalidOption(
            "No CUDA GPU can be used here; leave out --device cuda to run on the CPU, "
            "or install the GPU driver and a CUDA build of torch."
        )
    if config.device == "cpu" or not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """``auto`` is BF16 where the hardware multiplies it, else FP16 on a GPU and FP32 on a CPU.

    Raises:
        InvalidOption: the weights asked for are of another type, or not for this device.
    """
    _check_weights(config, device)
    if config.weights in _WEIGHT_DTYPES:
        return _WEIGHT_DTYPES[config.weights]
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    return torch.bfloat16 if _cpu_multiplies_bf16() else torch.float32


def _check_weights(config: EngineConfig, device: torch.device) -> None:
    if config.weights in ("int8", "int4") and device.type != "cpu":
        raise InvalidOption(
            f"--weights {config.weights} is for CPUs only; leave it out, or use --device cpu."
        )
    wanted = _WEIGHT_DTYPES.get(config.weights)
    if wanted is not None and config.dtype != "auto" and _DTYPES[config.dtype] != wanted:
        raise InvalidOption(
            f"--weights {config.weights} and --dtype {config.dtype} contradict each other; leave one out."
        )


def _cpu_multiplies_bf16() -> bool:
    # Without such instructions BF16 products are emulated and several times slower than FP32.
    names = ("amx_bf16", "avx512_bf16")
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name, False) for name in names)
    return any(name in _cpu_flags() for name in names)  # torch before 2.12


def _cpu_flags(info: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What Linux says the first processor can do; nothing elsewhere."""
    try:
        lines = info.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), ":")
    return frozenset(flags.split(":", 1)[1].split())


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def free_cpu_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process can still take without swapping: the machine's, or its container's if less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        if limit == "max":
            return free
        idle_cache = int(statistics.get("inactive_file", 0))  # given back as soon as it is needed
        return max(0, min(free, int(limit) - used + idle_cache))
    except (OSError, ValueError):  # no such system, or no container
        return free


def give_back_freed_memory() -> None:
    """Let the system have what the C library keeps of freed memory for later, where it can be told to."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, TypeError, AttributeError):  # not glibc
        return


def check_device(device: torch.device) -> None:
    """After a step has failed: whether others can follow. Waits for what the device has been given.

    Raises:
        DeviceLost: an illegal access, say, after which every later call of this process fails.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLost(f"The GPU has failed ({reason_of(error)}); restart nanochat.") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine has run out of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # The CPU's allocator and the CUDA driver have no type of their own for it.
    words = ("allocate memory", "out of memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in words)
