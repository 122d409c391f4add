"""What the ranks of one model do together: sums, gathers and broadcasts, through ``torch.distributed``.

NCCL between GPUs, gloo between processes on a CPU; gloo also carries what the host tells the other ranks. All
on one machine: the ranks meet in a private folder, gloo listens on the loopback address alone. Groups are
objects of their own, so that several engines, and a program's own use of ``torch.distributed``, don't meet.

Knows nothing of models, steps or processes.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch

from nanochat.engine.models.shard import WHOLE, Shard

CONNECT_TIMEOUT = timedelta(minutes=2)
"""For ranks that have all begun to connect."""
_FOREVER = timedelta(days=3650)
"""Nobody asks for hours, and the other ranks wait. Whether they live is somebody else's to see."""
_FIRST_BYTES = 8192
"""A message up to this length, less eight bytes, is one broadcast; longer ones are two."""


class Collectives(Protocol):
    """What a decoder needs of the ranks it is divided among. Every rank calls the same in the same order."""

    shard: Shard

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in ``x`` itself."""

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """On rank 0 every rank's ``x``, all of one shape; an empty list on the others."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``x`` on every rank, in ``x`` itself."""


class Alone:
    """One rank that holds the whole model."""

    shard = WHOLE

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def least(self, value: int) -> int:
        return value


ALONE = Alone()


class Group:
    """The ranks of one model on one machine. On a GPU everything but messages may be part of a CUDA graph."""

    def __init__(self, shard: Shard, device: torch.device) -> None:
        """Of this rank, whose tensors are on ``device``. Not connected yet."""
        self.shard = shard
        self.device = device
        self._host: Any = None
        self._device: Any = None

    def connect(self, folder: Path) -> None:
        """Meet the other ranks in ``folder``, which is private and used for nothing else. Blocks.

        Raises:
            RuntimeError: they don't all come.
        """
        dist = _distributed()
        rank, size = self.shard.rank, self.shard.size
        store = dist.FileStore(str(folder / "store"), size)
        store.set_timeout(CONNECT_TIMEOUT)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = CONNECT_TIMEOUT
        host = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, options)
        host._set_default_timeout(_FOREVER)
        self._host = self._device = host
        if self.device.type == "cuda":
            self._device = _nccl(dist.PrefixStore("device", store), self.shard)
            # Connects, which must not happen while a graph is recorded.
            x = torch.zeros(1, device=self.device)
            self.all_reduce(x)
            self.gather(x)
            self.broadcast(x)
            torch.cuda.synchronize(self.device)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives.all_reduce`."""
        options = _distributed().AllreduceOptions()
        options.asyncOp = False
        _finish(self._device.allreduce([x], options))
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """See `Collectives.gather`."""
        options = _distributed().GatherOptions()
        options.rootRank = 0
        options.asyncOp = False
        is_root = self.shard.rank == 0
        parts = [torch.empty_like(x) for _ in range(self.shard.size)] if is_root else []
        _finish(self._device.gather([parts] if is_root else [], [x], options))
        return parts

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives.broadcast`."""
        _broadcast(self._device, x)
        return x

    def least(self, value: int) -> int:
        """The least of all ranks' values."""
        dist = _distributed()
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        tensor = torch.tensor([value], dtype=torch.int64)
        _finish(self._host.allreduce([tensor], options))
        return int(tensor)

    def send(self, message: bytes) -> None:
        """From rank 0, to every other rank's :meth:`receive`."""
        first = bytearray(_FIRST_BYTES)
        first[:8] = len(message).to_bytes(8, "little")
        room = _FIRST_BYTES - 8
        first[8 : 8 + min(room, len(message))] = message[:room]
        _broadcast(self._host, torch.frombuffer(first, dtype=torch.uint8))
        if len(message) > room:
            _broadcast(self._host, torch.frombuffer(bytearray(message[room:]), dtype=torch.uint8))

    def receive(self) -> bytes:
        """What rank 0 sends next, however long that takes."""
        first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        _broadcast(self._host, first)
        flat = first.numpy().tobytes()
        length, message = int.from_bytes(flat[:8], "little"), flat[8:]
        if length <= len(message):
            return message[:length]
        rest = torch.empty(length - len(message), dtype=torch.uint8)
        _broadcast(self._host, rest)
        return message + rest.numpy().tobytes()

    def abort(self) -> None:
        """End what is under way on the GPU without the others; nothing can be done together any more."""
        if self._device is not None and self._device is not self._host:
            self._device.abort()


def _distributed() -> Any:
    """``torch.distributed``, of which builds for some systems lack parts, and much isn't typed."""
    import torch.distributed

    return torch.distributed


def _broadcast(group: Any, x: torch.Tensor) -> None:
    options = _distributed().BroadcastOptions()
    options.rootRank = 0
    options.asyncOp = False
    _finish(group.broadcast([x], options))


def _finish(work: Any) -> None:
    """Let what comes next on this stream wait; a backend that has seen to it already gives no work."""
    if work is not None:
        work.wait()


def _nccl(store: Any, shard: Shard) -> Any:
    """NCCL that leaves it to us what a lost rank means: by itself it would end the whole process."""
    dist = _distributed()
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _FOREVER
    options.global_ranks_in_group = list(range(shard.size))
    options.group_name = "nanochat"
    group = dist.ProcessGroupNCCL(store, shard.rank, shard.size, options)
    group._set_sequence_number_for_group()
    return group
