"""What the engine does when something breaks, or when it is closed: every handle gets its end."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.engine import engine as engine_module
from nanochat.engine import pipeline
from nanochat.engine import runner as runner_module
from nanochat.engine.config import EngineConfig, SamplingParams
from nanochat.engine.detokenizer import Detokenizer
from nanochat.engine.device import check_device
from nanochat.engine.engine import Engine
from nanochat.engine.live_request import LiveRequest
from nanochat.engine.models.decoder import Decoder
from nanochat.engine.runner import LaunchedStep
from nanochat.engine.step_programs import StepPrograms
from nanochat.errors import DeviceLost, EngineClosed
from tests.engine.conftest import MakeEngine, assert_idle_and_consistent, wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
LONG = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True)


class TestFailing:
    def test_a_step_that_fails_ends_its_requests_and_nothing_else(
        self, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make_engine()
        runner = type(engine._model.runner)
        run = runner.launch

        def fail(self: Any, plan: Any) -> Any:
            raise RuntimeError("the lights went out")

        monkeypatch.setattr(runner, "launch", fail)
        output = engine.submit("Hello", GREEDY).result(60)
        assert output.finish_reason == "error"
        assert output.error is not None
        assert "the lights went out" in output.error
        monkeypatch.setattr(runner, "launch", run)
        assert engine.submit("Hello", GREEDY).result(60).finish_reason in ("length", "stop")

    @pytest.mark.parametrize(
        ("where", "name", "way"),
        [
            (Decoder, "forward", "plain"),
            (Decoder, "compute_logits", "plain"),
            (StepPrograms, "run", "native"),
            (runner_module, "sample", "native"),
            (runner_module, "sample_together", "plain"),
            (runner_module, "pack_batch", "both"),
            (runner_module, "upload_batch", "plain"),
            (LaunchedStep, "collect", "both"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_fault_between_packing_and_sampling_ends_those_in_the_step_only(
        self,
        make_engine: MakeEngine,
        monkeypatch: pytest.MonkeyPatch,
        where: Any,
        name: str,
        way: str,
        dtype: str,
    ) -> None:
        """On either way to compute a step: those who come afterwards get what they get on a sound engine."""
        engine = make_engine(dtype=dtype)
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True)
        expected = engine.submit([40, 41, 42], params).result(60).token_ids
        real, faults = getattr(where, name), []

        def fail_once(*arguments: Any, **options: Any) -> Any:
            if not faults:
                faults.append(name)
                raise RuntimeError(f"the {name} is broken")
            return real(*arguments, **options)

        monkeypatch.setattr(where, name, fail_once)
        first = engine.submit([40, 41, 42], params)
        output = first.result(60)
        second = engine.submit([40, 41, 42], params).result(60)
        assert second.token_ids == expected
        is_met = way == "both" or engine._model.runner.is_native == (way == "native")
        assert bool(faults) == is_met
        if is_met:
            assert output.finish_reason == "error"
            assert output.error == f"This step failed: the {name} is broken. Try again."
        else:
            assert output.token_ids == expected
        assert_idle_and_consistent(engine)

    def test_text_that_cannot_be_made_fails_that_request_only(
        self, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        accept = LiveRequest.accept

        def fail_for_one_prompt(live: LiveRequest, *args: Any) -> bool:
            if live.request.token_ids[0] == 40:
                raise ValueError("no such token")
            return accept(live, *args)

        monkeypatch.setattr(LiveRequest, "accept", fail_for_one_prompt)
        engine = make_engine()
        healthy, broken = engine.submit([50, 51], GREEDY), engine.submit([40], GREEDY)
        assert healthy.result(60).error is None
        assert broken.result(60).finish_reason == "error"
        assert "no such token" in str(broken.result().error)

    def test_text_that_cannot_even_be_flushed_leaves_no_handle_waiting(
        self, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(detokenizer: Detokenizer, token_ids: Any = ()) -> str:
            raise ValueError("no such token")

        engine = make_engine()
        with monkeypatch.context() as patches:
            patches.setattr(Detokenizer, "push", fail)
            patches.setattr(Detokenizer, "flush", fail)
            output = engine.submit([40], GREEDY).result(60)
        assert output.finish_reason == "error"
        assert len(output.token_ids) == 1
        assert engine.submit([40], GREEDY).result(60).error is None

    def test_a_panic_in_native_code_ends_every_handle(
        self, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rust's panics reach Python as exceptions that aren't ``Exception``."""

        class PanicException(BaseException):
            pass

        def panic(*_: Any) -> Any:
            raise PanicException("index out of bounds")

        engine = Engine(EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", num_kv_blocks=16))
        monkeypatch.setattr(engine._model.runner, "launch", panic, raising=True)
        output = engine.submit([40], GREEDY).result(60)
        assert output.finish_reason == "error"
        assert "index out of bounds" in str(output.error)
        with pytest.raises(EngineClosed, match="index out of bounds"):
            engine.submit([40])
        engine.close()

    def test_a_lost_device_ends_the_engine_with_a_sentence(
        self, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After an illegal access on a GPU nothing more can be computed, so trying again helps nobody."""

        def fail(*_: Any) -> Any:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def find_lost(device: torch.device) -> None:
            raise DeviceLost("The GPU has failed (illegal access); restart nanochat.")

        engine = Engine(EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", num_kv_blocks=16))
        monkeypatch.setattr(engine._model.runner, "launch", fail, raising=True)
        monkeypatch.setattr(pipeline, "check_device", find_lost)
        outputs = [engine.submit([40 + number], GREEDY).result(60) for number in range(1)]
        assert [(output.finish_reason, output.error) for output in outputs] == [
            ("error", "The GPU has failed (illegal access); restart nanochat.")
        ]
        with pytest.raises(EngineClosed, match="The GPU has failed"):
            engine.submit([40])
        engine.close()

    def test_what_check_device_says_of_a_gpu_that_answers_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(device: torch.device) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be late")

        monkeypatch.setattr(torch.cuda, "synchronize", fail)
        check_device(torch.device("cpu"))
        with pytest.raises(
            DeviceLost, match=r"^The GPU has failed \(CUDA error: device-side assert.*restart nanochat.$"
        ):
            check_device(torch.device("cuda"))

    def test_a_request_that_cannot_be_queued_leaves_no_handle_waiting(
        self, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever came in the same moment must not be lost on the way from the inbox to the scheduler."""

        def fail(request: Any) -> None:
            raise RuntimeError("lost count")

        engine = Engine(EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", num_kv_blocks=16))
        monkeypatch.setattr(engine._scheduler, "add", fail)
        with engine._inbox_condition:  # keeps the step thread waiting until all are there
            handles = [engine.submit([40 + number], GREEDY) for number in range(3)]
        assert [handle.result(60).finish_reason for handle in handles] == ["error"] * 3
        engine.close()

    @pytest.mark.parametrize(
        "error",
        [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee docs"), MemoryError()],
    )
    def test_a_step_without_memory_says_so_in_one_line_and_logs_no_traceback(
        self,
        make_engine: MakeEngine,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        error: Exception,
    ) -> None:
        def fail(*_: Any) -> Any:
            raise error

        engine = make_engine()
        with monkeypatch.context() as patches:
            patches.setattr(type(engine._model.runner), "launch", fail)
            output = engine.submit("Hello", GREEDY).result(60)
        assert output.finish_reason == "error"
        assert "memory" in str(output.error)
        assert "--max-batched-tokens" in str(output.error)
        assert "\n" not in str(output.error)
        assert not [record for record in caplog.records if record.exc_info]
        assert engine.submit("Hello", GREEDY).result(60).error is None

    def test_a_scheduler_that_breaks_ends_every_handle(
        self, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = Engine(EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", num_kv_blocks=16))

        def fail(now: float) -> Any:
            raise RuntimeError("lost count")

        monkeypatch.setattr(engine._scheduler, "plan", fail)
        output = engine.submit("Hello", GREEDY).result(60)
        assert output.finish_reason == "error"
        wait_until(lambda: not engine._thread.is_alive())
        with pytest.raises(EngineClosed, match="lost count"):
            engine.submit("Hello")
        engine.close()


class TestClosing:
    def test_a_step_that_hangs_keeps_nobody_waiting(
        self, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Closed in good time, every request has its end with the text so far; the step may take for ever."""
        assert engine_module.CLOSE_TIMEOUT_S < 5
        monkeypatch.setattr(engine_module, "CLOSE_TIMEOUT_S", 0.2)
        engine = make_engine(num_kv_blocks=120)
        launch, hangs, go_on = type(engine._model.runner).launch, threading.Event(), threading.Event()

        def hang(runner: Any, plan: Any) -> Any:
            if plan.step > 5:
                hangs.set()
                go_on.wait(60)
            return launch(runner, plan)

        monkeypatch.setattr(type(engine._model.runner), "launch", hang)
        running = [engine.submit([40 + number], LONG) for number in range(2)]
        assert hangs.wait(60)
        waiting = engine.submit([50], LONG)
        engine.close()
        assert engine._thread.is_alive()  # the step still hangs
        outputs = [handle.result(0) for handle in (*running, waiting)]
        assert [output.finish_reason for output in outputs] == ["cancelled"] * 3
        assert all(output.token_ids for output in outputs[:2])
        events = running[0].poll()
        assert "".join(event.text for event in events) == outputs[0].text
        assert [token for event in events for token in event.token_ids] == outputs[0].token_ids
        engine.close(0.1)  # whoever needs its memory waits longer
        assert engine._thread.is_alive()
        threading.Timer(0.1, go_on.set).start()
        engine.close(60)
        assert not engine._thread.is_alive()
        assert running[0].poll() == []  # nothing comes after the end
        assert engine.stats().blocks_used == 0

    def test_ends_what_runs_and_refuses_what_comes(self, make_engine: MakeEngine) -> None:
        engine = make_engine(num_kv_blocks=120)
        handles = [engine.submit([40], LONG) for _ in range(3)]
        engine.close()
        engine.close()
        assert {handle.result(60).finish_reason for handle in handles} == {"cancelled"}
        with pytest.raises(EngineClosed):
            engine.submit([40])

    @pytest.mark.slow
    def test_a_process_that_forgets_it_ends_well(self, tiny_llama: Path) -> None:
        code = f"""
from nanochat import Engine, EngineConfig, SamplingParams
engine = Engine(EngineConfig(model={str(tiny_llama)!r}, device="cpu", num_kv_blocks=120))
handle = engine.submit([40], SamplingParams(max_tokens=1900, ignore_eos=True))
next(iter(handle))
"""
        command = [sys.executable, "-c", code]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (finished.returncode, finished.stderr) == (0, "")

    def test_as_a_context_manager(self, tiny_llama: Path) -> None:
        with Engine(EngineConfig(model=str(tiny_llama), device="cpu", num_kv_blocks=16)) as engine:
            engine.submit([40], GREEDY).result(60)
        assert not engine._thread.is_alive()
        assert_idle_and_consistent(engine)
