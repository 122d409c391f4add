"""The processes of a divided model's other ranks, as the first rank sees them: started, watched, ended.

They are fresh interpreters in sessions of their own, which Ctrl+C doesn't reach. Each has two pipes to us: one
ends when we do, and so does the rank; on the other one it reports, twice a second, that it lives. A rank that
dies or falls silent takes all others with it, because no step can be computed any more; whoever waits for one
is told within ten seconds.

Knows nothing of steps or scheduling.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from nanochat import errors
from nanochat.engine.config import EngineConfig
from nanochat.engine.models.shard import Shard
from nanochat.engine.parallel import Group
from nanochat.engine.progress import Progress, ProgressCallback
from nanochat.engine.step_message import PackedStep, RecordedStep, encode
from nanochat.errors import NanochatError, RankLost, reason_of
from nanochat.stray_output import log_file, open_log

logger = logging.getLogger(__name__)

BEAT_S = 0.5
"""How often a rank reports."""
SILENCE_S = 6.0
"""A rank that computes is taken for dead after this; one that starts may be busy for longer."""
STEP_S = 8.0
"""A step that every rank has launched is taken to hang after this; longer if it has more tokens than ..."""
STEP_TOKENS = 2048
"""... these."""
_CLOSE_S = 2.0
_POLL_S = 0.05
_REMEDY = "Load the model again, or restart nanochat."
_MAIN = "from nanochat.engine.follower import main; main()"


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a rank's process is told in the beginning."""

    config: EngineConfig
    model: Path
    """The model's folder."""
    shard: Shard
    device: str
    meeting: Path
    """A folder for :meth:`Group.connect`."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank holds on its device, in bytes."""

    weights: int
    cache: int
    allocated: int
    """By PyTorch, on a GPU, with what steps compute in; 0 on a CPU."""

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class _Process:
    """One rank's process and what it has reported."""

    def __init__(self, setup: RankSetup, on_end: Callable[[_Process], None]) -> None:
        self.shard = setup.shard
        self.is_here = False
        self.memory: RankMemory | None = None
        """None until it is ready to compute."""
        self.error: NanochatError | None = None
        self.heard_s = time.monotonic()
        self.steps = 0
        """That it has launched, when it last said so."""
        log = open_log(log_file())
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,
            )
        finally:
            os.close(log)
        assert self._popen.stdin is not None
        with suppress(OSError):  # it has ended already, which its reader will see
            pickle.dump(setup, self._popen.stdin)
            self._popen.stdin.flush()
        self._on_end = on_end
        name = f"nanochat-rank-{setup.shard.rank}"
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

    @property
    def name(self) -> str:
        return f"Process {self.shard.rank + 1} of the {self.shard.size} that the model is divided among"

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self.heard_s = time.monotonic()
            report = json.loads(line)
            if report["event"] == "beat":
                self.steps = report["steps"]
            elif report["event"] == "here":
                self.is_here = True
            elif report["event"] == "ready":
                self.memory = RankMemory(**report["memory"])
            elif report["event"] == "error":
                kind = getattr(errors, report["kind"], NanochatError)
                self.error = kind(report["message"])
        self._popen.wait()
        self._on_end(self)

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        """End it, and wait for that."""
        assert self._popen.stdin is not None
        with suppress(OSError):
            self._popen.stdin.close()
        try:
            self._popen.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._reader.join(_CLOSE_S)


def _other_devices(device: torch.device, count: int) -> list[str]:
    if device.type == "cpu":
        return ["cpu"] * count
    return [f"cuda:{index}" for index in range(count + 1) if index != device.index][:count]


class Ranks:
    """All ranks but the first of a model that is divided."""

    def __init__(self, config: EngineConfig, model: Path, device: torch.device) -> None:
        """Start their processes, ``config.tensor_parallel_size`` less one; the first rank is on ``device``."""
        size = config.tensor_parallel_size
        self.group = Group(Shard(0, size), device)
        self.lost: str | None = None
        """Why nothing can be computed any more, as a sentence."""
        self.on_lost: Callable[[], object] = lambda: None
        """Called on another thread once ``lost`` is set."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._steps_told = 0
        self._meeting = Path(tempfile.mkdtemp(prefix="nanochat-ranks-"))
        self._processes: list[_Process] = []
        try:
            for rank, other in zip(range(1, size), _other_devices(device, size - 1), strict=True):
                setup = RankSetup(config, model, Shard(rank, size), other, self._meeting)
                self._processes.append(_Process(setup, self._ended))
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, name="nanochat-ranks", daemon=True).start()

    def connect(self, progress: ProgressCallback) -> None:
        """Wait until they run, and form the group.

        Raises:
            RankLost: one of them has died.
            NanochatError: what one of them has found wrong.
        """
        self._wait(lambda process: process.is_here, "Starting the other processes", progress)
        failed: list[Exception] = []

        def connect() -> None:
            try:
                self.group.connect(self._meeting)
            except Exception as error:
                failed.append(error)

        # Meeting can't be interrupted, and a rank that dies now would be waited for.
        thread = threading.Thread(target=connect, name="nanochat-connect", daemon=True)
        thread.start()
        while thread.is_alive():
            self.check()
            thread.join(_POLL_S)
        if failed:
            raise self.give_up(failed[0]) from failed[0]

    def wait_until_ready(self, progress: ProgressCallback) -> list[RankMemory]:
        """Wait until all have loaded their part; what each holds. Raises as :meth:`connect` does."""
        self._wait(lambda process: process.memory is not None, "Waiting for the other processes", progress)
        return [process.memory for process in self._processes if process.memory is not None]

    def tell(self, step: PackedStep | RecordedStep) -> None:
        """Let all ranks run a step.

        Raises:
            RankLost: they can't.
        """
        self.check()
        self._steps_told += 1
        try:
            self.group.send(encode(step))
        except RuntimeError as error:
            raise self.give_up(error) from error

    def check(self) -> None:
        """Raise what one of them has found wrong, or `RankLost` if one is gone."""
        if self.lost is not None:
            for process in self._processes:
                if process.error is not None:
                    raise process.error
            raise RankLost(self.lost)

    def check_step(self, num_tokens: int, waited_s: float) -> None:
        """:meth:`check`, and `RankLost` if a step of so many tokens has been waited for too long.

        It may wait for a rank that is still compiling, but not for devices that all have it.
        """
        self.check()
        limit_s = STEP_S * max(1.0, num_tokens / STEP_TOKENS)
        if waited_s > limit_s and all(process.steps >= self._steps_told for process in self._processes):
            self._lose(f"A step of the divided model hangs. {_REMEDY}")
            self.check()

    def give_up(self, error: Exception) -> RankLost:
        """The first rank failed where the others wait for it, or was failed by one that has died: end them all."""
        deadline = time.monotonic() + 2 * BEAT_S
        while self.lost is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)  # a death is seen a moment after the lines to it are cut
        reason = reason_of(error)
        self._lose(f"A step of the divided model failed ({reason}). {_REMEDY}")
        return RankLost(self.lost or reason)

    def close(self) -> None:
        """End all processes and wait for that. Harmless when repeated."""
        with self._lock:
            self._is_closed = True
        self._abort()
        for process in self._processes:
            process.close()
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _wait(self, is_done: Callable[[_Process], bool], stage: str, progress: ProgressCallback) -> None:
        while True:
            self.check()
            done = sum(map(is_done, self._processes))
            if done == len(self._processes):
                return
            progress(Progress(stage, done, len(self._processes)))
            time.sleep(_POLL_S)

    def _ended(self, process: _Process) -> None:
        if process.error is not None:
            self._lose(str(process.error))
        else:
            self._lose(f"{process.name} has ended unexpectedly. {_REMEDY}")

    def _watch(self) -> None:
        while not self._is_closed and self.lost is None:
            woken_s = time.monotonic()
            time.sleep(BEAT_S)
            if time.monotonic() - woken_s > 2 * BEAT_S + 1.0:
                continue  # it was us who slept: what they have sent meanwhile has to be read first
            for process in self._processes:
                if process.memory is not None and time.monotonic() - process.heard_s > SILENCE_S:
                    self._lose(f"{process.name} hangs. {_REMEDY}")

    def _lose(self, sentence: str) -> None:
        with self._lock:
            if self._is_closed or self.lost is not None:
                return
            self.lost = sentence
        logger.error("%s", self.lost)
        for process in self._processes:
            process.kill()  # who waits for one of them hears of it at once
        self.on_lost()
        self._abort()

    def _abort(self) -> None:
        """Let go of what is under way on the GPU; whatever comes of that, nobody waits for it for long."""
        thread = threading.Thread(target=self.group.abort, name="nanochat-abort", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)
