"""Ranks of a divided model as threads of one process, over real gloo: cheap, and just as divided."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import TypeVar

import torch

from nanochat.engine.config import EngineConfig
from nanochat.engine.loading import load_part
from nanochat.engine.models.families import load_model_config
from nanochat.engine.models.shard import Shard
from nanochat.engine.parallel import Group
from nanochat.engine.progress import ProgressCallback
from nanochat.engine.ranks import RankMemory
from nanochat.engine.step_message import PackedStep, RecordedStep, decode, encode
from nanochat.errors import RankLost

Result = TypeVar("Result")


class ThreadedRanks:
    """Connected groups, one a rank."""

    def __init__(self, groups: list[Group], pool: ThreadPoolExecutor) -> None:
        self.groups = groups
        self._pool = pool

    def run(self, work: Callable[[Group], Result]) -> list[Result]:
        """What each rank's ``work`` returns, done by all at the same time."""
        futures = [self._pool.submit(work, group) for group in self.groups]
        return [future.result(60) for future in futures]


@contextmanager
def threaded_ranks(size: int, folder: Path) -> Iterator[ThreadedRanks]:
    """``size`` ranks that meet in ``folder``."""
    groups = [Group(Shard(rank, size), torch.device("cpu")) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        ranks = ThreadedRanks(groups, pool)
        ranks.run(lambda group: group.connect(folder))
        yield ranks


class ThreadRanks:
    """Takes the place of `Ranks`: the other ranks are threads of this process, which load and follow alike."""

    lost: str | None = None

    def __init__(self, config: EngineConfig, model: Path, device: torch.device) -> None:
        size = config.tensor_parallel_size
        self.on_lost: Callable[[], object] = lambda: None
        self.group = Group(Shard(0, size), device)
        self._meeting = Path(tempfile.mkdtemp(prefix="nanochat-test-"))
        self._pool = ThreadPoolExecutor(size)
        self._loaded: Queue[RankMemory] = Queue()
        self._others = [
            self._pool.submit(self._follow, config, model, Group(Shard(rank, size), device))
            for rank in range(1, size)
        ]

    def _follow(self, config: EngineConfig, model: Path, group: Group) -> None:
        sizes, meeting = load_model_config(model), self._meeting
        connect = functools.partial(group.connect, meeting)
        part = load_part(config, model, sizes, group.device, group, connect=connect)
        self._loaded.put(part.memory)
        with torch.inference_mode():
            while message := group.receive():
                part.runner.follow(decode(message))

    def connect(self, progress: ProgressCallback) -> None:
        self.group.connect(self._meeting)

    def wait_until_ready(self, progress: ProgressCallback) -> list[RankMemory]:
        return [self._loaded.get(timeout=60) for _ in self._others]

    def tell(self, step: PackedStep | RecordedStep) -> None:
        self.group.send(encode(step))

    def check_step(self, num_tokens: int, waited_s: float) -> None:
        pass

    def give_up(self, error: Exception) -> RankLost:
        return RankLost(str(error))

    def close(self) -> None:
        if not self._pool._shutdown:
            self.group.send(b"")
            for other in self._others:
                other.result(60)  # raises what it has raised
            self._pool.shutdown()
            shutil.rmtree(self._meeting)
