"""Native kernels that find no memory say so to whoever called them, and to nobody else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.native import require_native

PROGRAM = """
import resource, threading
import torch
from nanochat.kernels.native import library, linear
from nanochat.kernels.native.program import Arena, Counter, Program

torch.set_num_threads({threads})

def program(rows, inner=16384):
    \"\"\"A linear map that needs memory of its own, and results that need none.\"\"\"
    made, counter = Program(library.find(), Arena()), Counter(rows)
    counter.set(rows)
    x = made.input(torch.randn(rows, inner).to(torch.bfloat16), counter)
    kernel = linear.plain(torch.randn(64, inner).to(torch.bfloat16))
    with made.recording():
        y = kernel(x)
    return made, y

warm, warm_y = program(128)
cold, cold_y = program(64)
small, _ = program(64, 64)
for _ in range(300):  # a busy machine may let the pool's thread sleep through many runs
    warm.run()  # this thread and the pool's have their memory then
expected = warm_y.clone()
answers, begun, go_on, over = [""] * 100, threading.Event(), threading.Event(), threading.Event()
filler = [None] * 1_000_000

def run_cold():
    small.run()  # what every thread needs once
    begun.set()
    go_on.wait()
    for number in range(100):
        try:
            cold.run()
        except MemoryError:
            answers[number] = "short"
        else:
            answers[number] = "well"
    over.set()

torch.set_num_threads(1)  # holds for new threads: the cold one is helped by none that has memory
thread = threading.Thread(target=run_cold)
thread.start()
begun.wait()
torch.set_num_threads({threads})
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (1 << 20, limits[1]))
try:
    for number in range(len(filler)):  # what was freed before could serve, too
        filler[number] = bytearray(8_000)
except MemoryError:
    pass
go_on.set()
runs = 0
try:
    while not over.is_set():
        warm.run()
        runs += 1
finally:
    resource.setrlimit(resource.RLIMIT_AS, limits)
thread.join()
assert answers == ["short"] * 100, set(answers)
assert runs and torch.equal(warm_y, expected)
cold.run()  # there is memory again
assert bool(cold_y.isfinite().all())
print("ok")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are Linux's")
@pytest.mark.parametrize("threads", [1, 2])
def test_only_the_call_without_memory_fails(threads: int) -> None:
    require_native()
    command = [sys.executable, "-c", PROGRAM.format(threads=threads)]
    # Arenas of threads reserve address space ahead, and what is freed into one serves once more.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "16384"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr[-2000:]
