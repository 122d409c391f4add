"""The process of a rank other than the first: loads its part of the model, then runs each step it is told of.

Ends when the first rank does, however that ends.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any, BinaryIO

from nanochat.engine.ranks import BEAT_S, RankSetup
from nanochat.errors import NanochatError, reason_of

logger = logging.getLogger(__name__)


def main() -> None:
    """Run the rank that is described on standard input; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank says when it is over
    orders, reports = _Reports.open()
    setup: RankSetup = pickle.load(orders)
    threading.Thread(target=_end_with, args=(orders, setup), daemon=True).start()
    try:
        _follow(setup, reports)
    except NanochatError as error:
        reports.send("error", kind=type(error).__name__, message=str(error))
    except BaseException as error:
        logger.exception("rank %d of %d failed", setup.shard.rank, setup.shard.size)
        reports.send("error", kind="RankLost", message=_sentence(setup, error))
    finally:
        _leave(setup, 1)


def _follow(setup: RankSetup, reports: _Reports) -> None:
    import torch

    from nanochat.engine.cpu_threads import choose_threads
    from nanochat.engine.loading import load_part
    from nanochat.engine.models.families import load_model_config
    from nanochat.engine.parallel import Group
    from nanochat.engine.step_message import decode

    device = torch.device(setup.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, choose_threads(setup.config.threads) // setup.shard.size))
    reports.send("here")
    threading.Thread(target=reports.beat, daemon=True).start()
    group = Group(setup.shard, device)
    part = load_part(
        setup.config,
        setup.model,
        load_model_config(setup.model),
        device,
        group,
        connect=lambda: group.connect(setup.meeting),
    )
    reports.send("ready", memory=part.memory.to_json())
    with torch.inference_mode():
        while True:
            part.runner.follow(decode(group.receive()))
            reports.steps += 1


def _sentence(setup: RankSetup, error: BaseException) -> str:
    return (
        f"Process {setup.shard.rank + 1} of the {setup.shard.size} that the model is divided among failed "
        f"({reason_of(error)}). Load the model again, or restart nanochat."
    )


def _end_with(orders: BinaryIO, setup: RankSetup) -> None:
    """Wait for the end of the first rank's line, which nobody else holds, and end this process."""
    orders.read()
    _leave(setup, 0)


def _leave(setup: RankSetup, status: int) -> None:
    shutil.rmtree(setup.meeting, ignore_errors=True)  # if the first rank was killed, nobody else does it
    os._exit(status)  # threads that wait for other ranks would keep us


class _Reports:
    """Lines of JSON to the first rank, from any thread."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.steps = 0
        """Launched so far."""

    @classmethod
    def open(cls) -> tuple[BinaryIO, _Reports]:
        """Standard input and output, taken for this use: what libraries print goes to standard error."""
        orders, stream = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        sys.stdout.flush()
        os.dup2(2, 1)
        return orders, cls(stream)

    def send(self, event: str, **values: Any) -> None:
        """Harmless where nobody listens any more."""
        line = json.dumps({"event": event, **values}) + "\n"
        with self._lock, suppress(OSError):
            self._stream.write(line.encode())
            self._stream.flush()

    def beat(self) -> None:
        """Tell for ever that this process lives."""
        while True:
            time.sleep(BEAT_S)
            self.send("beat", steps=self.steps)
