"""Ranks as processes: the same answers, their memory as computed, and what happens when one dies or hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nanochat.engine.config import EngineConfig, SamplingParams
from nanochat.engine.engine import Engine
from nanochat.engine.memory import kv_bytes_per_token
from nanochat.engine.packing import HostCopies
from nanochat.engine.ranks import Ranks
from nanochat.errors import EngineClosed, InvalidOption, NanochatError, NotEnoughMemory
from tests.engine.conftest import MakeEngine, assert_idle_and_consistent, wait_until
from tests.engine.test_pipeline import KINDS, answers

SETTINGS: dict[int, dict[str, Any]] = {
    2: {"max_num_batched_tokens": 24, "num_kv_blocks": 30, "block_size": 4},
    4: {"kv_dtype": "int8", "max_num_batched_tokens": 40, "num_kv_blocks": 64},
}
LONG = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)
WITHIN_S = 60.0


def config(model: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(model), device="cpu", dtype="float32", **options)


def pids(engine: Engine) -> list[int]:
    ranks = engine._model.ranks
    assert isinstance(ranks, Ranks)
    return [process._popen.pid for process in ranks._processes]


def are_gone(processes: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in processes)


@pytest.fixture(scope="module", params=SETTINGS, ids="{} ranks".format)
def divided(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Engine]:
    """One engine for all tests of so many ranks; the last one ends it."""
    size = request.param
    with Engine(config(tiny_llama, tensor_parallel_size=size, **SETTINGS[size]), debug=True) as engine:
        yield engine


class TestTogether:
    def test_the_answers_are_those_of_one_rank(self, divided: Engine, make_engine: MakeEngine) -> None:
        """Chunked prefill, preemption, prefix hits, every kind of sampling."""
        whole = make_engine(**SETTINGS[divided.config.tensor_parallel_size])
        kinds = [*KINDS, {"repetition_penalty": 1.3}]
        assert answers(divided, kinds) == answers(whole, kinds)
        assert divided.stats().preemptions == whole.stats().preemptions
        greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        for _ in range(2):
            outputs = [engine.submit([*range(40, 90)], greedy).result(60) for engine in (divided, whole)]
            assert outputs[0].token_ids == outputs[1].token_ids
        assert divided.stats().prefix_hit_tokens == whole.stats().prefix_hit_tokens > 0

    def test_memory_of_each_rank_is_as_computed(self, divided: Engine, make_engine: MakeEngine) -> None:
        size = divided.config.tensor_parallel_size
        (whole,) = make_engine(**SETTINGS[size]).rank_memory
        decoder = divided._model.runner.decoder
        replicated = (2 * 2 + 1) * 64 * 4  # norms of two layers and the last one
        # KV heads: two, which four ranks have twice, so that k and v take 16 rows of 64 of each, not 8.
        more = 0 if size == 2 else 2 * 2 * 8 * 64 * 4
        for memory in divided.rank_memory:
            assert memory.weights == (whole.weights - replicated) // size + replicated + more
            assert memory.cache * 2 == whole.cache
        tokens = divided.stats().blocks_total * divided.config.block_size
        assert memory.cache == tokens * kv_bytes_per_token(decoder.local, divided._model.kv_dtype)
        assert len(divided.rank_memory) == size

    def test_cancelled_requests_give_everything_back(self, divided: Engine) -> None:
        handles = [divided.submit([40 + index] * 9, LONG) for index in range(5)]
        next(iter(handles[0]))
        for handle in handles:
            handle.cancel()
        assert {handle.result(60).finish_reason for handle in handles} == {"cancelled"}
        assert_idle_and_consistent(divided)

    def test_a_rank_that_dies_or_hangs_ends_every_request_with_a_sentence(self, divided: Engine) -> None:
        """It must be this module's last test of the engine."""
        processes, size = pids(divided), divided.config.tensor_parallel_size
        handles = [divided.submit([40 + index] * 9, LONG) for index in range(3)]
        next(iter(handles[0]))
        os.kill(processes[-1], signal.SIGKILL if size == 2 else signal.SIGSTOP)
        outputs = [handle.result(WITHIN_S) for handle in handles]
        for output in outputs:
            assert output.finish_reason == "error"
            assert f"Process {size} of the {size}" in str(output.error)
            assert str(output.error).endswith("or restart nanochat.")
        wait_until(lambda: divided.closed_because is not None)
        with pytest.raises(EngineClosed, match=f"Process {size} of the {size}"):
            divided.submit([40], LONG)
        divided.close()
        assert are_gone(processes)
        assert_idle_and_consistent(divided)


class TestProcesses:
    def test_die_with_a_parent_that_is_killed_and_leave_nothing_behind(
        self, tiny_llama: Path, tmp_path: Path
    ) -> None:
        """The script has no main guard: ranks never run it. And Ctrl+C is none of their business."""
        script = tmp_path / "script.py"
        script.write_text(
            "from nanochat import Engine, EngineConfig\n"
            f"engine = Engine(EngineConfig(model={str(tiny_llama)!r}, device='cpu', dtype='float32',"
            " num_kv_blocks=8, tensor_parallel_size=2))\n"
            "print(*[process._popen.pid for process in engine._model.ranks._processes], flush=True)\n"
            "input()\n"
        )
        environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
        parent = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=tmp_path,
        )
        assert parent.stdout is not None
        assert parent.stdin is not None
        processes = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(processes) == 1
        os.kill(processes[0], signal.SIGINT)
        time.sleep(0.2)
        assert not are_gone(processes)
        parent.kill()
        parent.wait()
        wait_until(lambda: are_gone(processes), WITHIN_S)
        wait_until(lambda: not list(tmp_path.glob("nanochat-ranks-*")), WITHIN_S)
        parent.stdin.close()
        parent.stdout.close()

    def test_two_engines_do_not_meet_and_an_idle_one_notices_a_death(self, tiny_llama: Path) -> None:
        options = {"num_kv_blocks": 16, "tensor_parallel_size": 2}
        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        with Engine(config(tiny_llama, **options)) as first, Engine(config(tiny_llama, **options)) as second:
            outputs = [engine.submit([50, 51], greedy).result(60) for engine in (first, second)]
            assert outputs[0].token_ids == outputs[1].token_ids
            os.kill(pids(first)[0], signal.SIGKILL)
            wait_until(lambda: first.closed_because is not None, WITHIN_S)
            with pytest.raises(EngineClosed, match="has ended unexpectedly"):
                first.submit([50, 51], greedy)
            assert second.submit([50, 51], greedy).result(60).token_ids == outputs[1].token_ids
            processes = pids(second)
        assert are_gone(processes)

    def test_a_step_that_hangs_on_the_devices_ends_every_request(
        self, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("nanochat.engine.ranks.STEP_S", 1.0)
        with Engine(config(tiny_llama, num_kv_blocks=16, tensor_parallel_size=2)) as engine:
            processes = pids(engine)
            monkeypatch.setattr(HostCopies, "are_ready", False)
            output = engine.submit([40] * 9, LONG).result(WITHIN_S)
            assert "A step of the divided model hangs" in str(output.error)
            monkeypatch.undo()
        assert are_gone(processes)

    def test_what_a_rank_finds_wrong_while_loading_is_told(
        self, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(NotEnoughMemory, match="--kv-blocks"):
            Engine(config(tiny_llama, num_kv_blocks=2**31 - 1, tensor_parallel_size=2))
        monkeypatch.setattr("nanochat.engine.ranks._MAIN", "raise SystemExit(3)")
        with pytest.raises(NanochatError, match=r"Process 2 of the 2 .* has ended unexpectedly"):
            Engine(config(tiny_llama, num_kv_blocks=8, tensor_parallel_size=2))

    def test_a_number_that_does_not_fit_is_refused_before_anything_starts(self, tiny_llama: Path) -> None:
        with pytest.raises(InvalidOption, match="1, 2 or 4 would"):
            Engine(config(tiny_llama, tensor_parallel_size=3))
