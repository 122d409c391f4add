"""What every Triton kernel's launcher needs: device facts and small shared device functions.

Knows nothing of attention, caches or models.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2_E = math.log2(math.e)

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run under Triton's interpreter, on CPU tensors. Fixed when triton is first imported."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The facts a launch depends on."""

    capability: int
    """Compute capability without the dot: 90 for Hopper."""
    num_sms: int


def dependent_launch(device: torch.device) -> bool:
    """Whether kernels may start while the one before them ends: on compute capability 9.0 and newer.

    CUDA's programmatic dependent launch.
    """
    return not INTERPRETED and device_info(device).capability >= 90


@functools.cache
def device_info(device: torch.device) -> DeviceInfo:
    """Looked up once a device: the query costs more than some kernels."""
    if device.type != "cuda":  # the interpreter; few "multiprocessors" keep its grids small
        return DeviceInfo(capability=90, num_sms=4)
    properties = torch.cuda.get_device_properties(device)
    return DeviceInfo(properties.major * 10 + properties.minor, properties.multi_processor_count)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """By one exponential: exact at both ends, since ``exp`` overflows to infinity and underflows to 0."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def enter(DEPENDENT: tl.constexpr) -> None:
    """First statement of a kernel under dependent launch: its set-up overlapped the kernel before it.

    Every program must pass here before it reads memory or returns: the kernel after this one relies on it.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
