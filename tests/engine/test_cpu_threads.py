"""The number of threads follows what the machine has to spare."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from nanochat.engine.cpu_threads import BUSY_SHARE, FIRST_RETRY_S, ThreadGovernor, choose_threads


class TestChoice:
    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Eight cores of two threads each."""
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)

    def test_the_physical_cores_but_one(self, tmp_path: Path) -> None:
        assert choose_threads(None, tmp_path) == 7

    def test_what_the_user_says(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        assert choose_threads(3, tmp_path) == 3
        assert choose_threads(None, tmp_path) == 5

    @pytest.mark.parametrize(("allowed", "threads"), [(1, 1), (2, 2), (3, 3), (4, 3)])
    def test_no_more_than_the_process_may_use(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int, threads: int
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)), raising=False)
        assert choose_threads(None, tmp_path) == threads

    @pytest.mark.parametrize(
        ("limit", "threads"), [("max 100000", 7), ("200000 100000", 2), ("50000 100000", 1)]
    )
    def test_no_more_than_the_container_may_use(self, tmp_path: Path, limit: str, threads: int) -> None:
        (tmp_path / "cpu.max").write_text(limit + "\n")
        assert choose_threads(None, tmp_path) == threads


class Machine:
    """Two clocks: every step takes 0.1 s, and gives the process ``free_cores`` of processor time."""

    def __init__(self, cores: int) -> None:
        self.wall_s = self.process_s = 0.0
        self.free_cores = float(cores)
        self.used: list[int] = []
        self.governor = ThreadGovernor(cores, self.used.append, lambda: self.wall_s, lambda: self.process_s)

    def run(self, seconds: float) -> int:
        """Steps for so long; returns the threads then in use."""
        end_s = self.wall_s + seconds
        while self.wall_s < end_s:
            self.governor.step_begins()
            self.wall_s += 0.1
            self.process_s += 0.1 * min(self.free_cores, self.governor.threads)
            self.governor.step_ends()
        return self.governor.threads


def test_a_quiet_machine_keeps_all_threads() -> None:
    machine = Machine(cores=4)
    assert machine.run(60) == 4
    assert machine.used == [4]


def test_a_core_that_is_taken_is_given_up_within_a_second() -> None:
    machine = Machine(cores=2)
    machine.free_cores = 1.2
    assert machine.run(1) == 1


def test_threads_come_back_when_the_machine_is_quiet_again() -> None:
    machine = Machine(cores=2)
    machine.free_cores = 1.0
    machine.run(1)
    machine.free_cores = 2.0
    assert machine.run(FIRST_RETRY_S + 1) == 2


@pytest.mark.parametrize("cores", [2, 4, 16])
def test_on_a_machine_that_stays_busy_tries_become_rare(cores: int) -> None:
    machine = Machine(cores)
    machine.free_cores = BUSY_SHARE * cores - 0.1
    fewer = machine.run(1)
    assert fewer < cores
    assert machine.run(300) == fewer
    assert machine.used.count(fewer + 1) <= 7  # on the way down, then after 5, 10, 20, 40, 80 and 80 s


def test_a_short_load_on_many_cores_is_soon_forgotten() -> None:
    machine = Machine(cores=8)
    machine.free_cores = 0.5
    assert machine.run(4) == 1
    machine.free_cores = 8.0
    assert machine.run(FIRST_RETRY_S + 4) == 8


def test_it_goes_down_step_by_step_but_never_to_none() -> None:
    machine = Machine(cores=8)
    machine.free_cores = 0.3
    assert machine.run(4) == 1
    assert min(machine.used) == 1


def test_time_between_steps_does_not_count() -> None:
    machine = Machine(cores=2)
    for _ in range(50):
        machine.run(0.1)
        machine.wall_s += 10
    assert machine.governor.threads == 2
