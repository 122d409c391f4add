"""Damaged and hostile files: each must load or end in one sentence, quickly, in little memory, and run no code.

10,000 files of every kind that nanochat reads are made from a seed: settings, tokenizers, chat templates and
weights of models, GGUF files, chat histories, settings files, exported chats. Worker processes with a memory
limit use each as a user would. A fault is an error that isn't a sentence, a traceback in the log, anything
written to the terminal, code from the file that runs, a process that dies, a file that takes over 5 s.

    python -m benchmarks.fuzz --json benchmarks/results/fuzz.json
    python -m benchmarks.fuzz --kind gguf --count 500 --seed 7
    python -m benchmarks.fuzz --only gguf:123          # one file again, with its traceback
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import random
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine

SLOW_S = 5.0
"""Of the processor: on a busy machine a file takes as long as others let it. One that waits for ever meets ``HANG_S``."""
HANG_S = 30.0
MEMORY_MIB = 768
"""Private memory that a worker may take beyond what it has once everything is imported."""
MAX_SENTENCE = 1500
START_S = 120.0
KINDS = {
    "config.json": 1600,
    "tokenizer.json": 1600,
    "tokenizer_config.json": 1600,
    "generation_config.json": 600,
    "safetensors": 1200,
    "index": 300,
    "gguf": 1200,
    "history": 800,
    "settings": 600,
    "chat.json": 500,
}
"""Each kind with its share of 10,000 files."""

_FORBIDDEN_EVENTS = (
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.spawn"),
    *("socket.connect", "socket.getaddrinfo", "pickle.find_class", "webbrowser.open", "ftplib.connect"),
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch(logging.Handler):
    """Notes what must not happen while a file is used: code run, files written elsewhere, tracebacks logged."""

    def __init__(self, work: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self._work = str(work)
        self._active = False
        self._terminal = os.open(work / "terminal", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(self._terminal, descriptor)
        sys.addaudithook(self._audit)
        logging.getLogger().addHandler(self)
        threading.excepthook = lambda hooked: self.found.append(f"a thread died: {hooked.exc_value!r}")
        sys.unraisablehook = lambda hooked: self.found.append(f"unraisable: {hooked.exc_value!r}")

    def begin(self) -> None:
        self.found.clear()
        self._active = True

    def end(self) -> list[str]:
        self._active = False
        if (Path(self._work) / "canary").exists() or Path("canary").exists():
            self.found.append("code from the file has run")
        sys.stdout.flush()
        sys.stderr.flush()
        if written := os.pread(self._terminal, 300, 0):
            self.found.append(f"written to the terminal: {written!r}")
            os.ftruncate(self._terminal, 0)
        return list(self.found)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(f"a traceback was logged: {record.exc_info[1]!r}")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active:
            return
        if event in _FORBIDDEN_EVENTS:
            self.found.append(f"{event}{arguments!r}"[:200])
        elif event == "open" and isinstance(arguments[0], str) and (arguments[2] or 0) & _WRITES:
            if not arguments[0].startswith((self._work, "/dev/null", "/dev/shm")):
                self.found.append(f"opened to write: {arguments[0][:200]}")
        elif event == "exec" and getattr(arguments[0], "co_filename", "").startswith(self._work):
            self.found.append(f"executed {arguments[0].co_filename}")


def work(seed: int, only: tuple[str, int] | None) -> None:
    """A worker: takes ``kind index`` lines from standard input, answers each with a line of JSON."""
    from benchmarks.fuzz_targets import TARGETS, Bases
    from nanochat.errors import NanochatError

    with tempfile.TemporaryDirectory() as folder:
        bases = Bases(Path(folder))
        for kind in KINDS:
            (Path(folder) / "work" / kind).mkdir(parents=True)
        os.chdir(Path(folder) / "work")
        answers = os.fdopen(os.dup(1), "w", buffering=1)
        faulthandler.enable(os.fdopen(os.dup(2), "w"))
        watch = Watch(Path(folder) / "work")
        if only is None:
            _limit_memory()
            print(json.dumps({"ready": True}), file=answers)
        for line in [" ".join(map(str, only))] if only else sys.stdin:
            kind, index = line.split()
            target, place = TARGETS[kind], Path(folder) / "work" / kind
            target.write(random.Random(f"{seed} {kind} {index}"), bases, place)
            outcome, detail = "loaded", ""
            watch.begin()
            started, started_cpu = time.perf_counter(), time.process_time()
            try:
                target.use(bases, place)
            except NanochatError as error:
                outcome, detail = "refused", str(error)
                if only:
                    traceback.print_exc(file=answers)
                if not detail.strip() or len(detail) > MAX_SENTENCE or "Traceback" in detail:
                    outcome = "no sentence"
            except BaseException as error:
                outcome, detail = "error", "".join(traceback.format_exception(error)[-3:])
            seconds, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
            if found := watch.end():
                outcome, detail = "forbidden", "; ".join(found)[:1000]
            peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            report = {
                "outcome": outcome,
                "detail": detail,
                "seconds": seconds,
                "cpu_s": cpu_s,
                "peak_mib": peak_mib,
            }
            print(json.dumps(report), file=answers)


def _limit_memory() -> None:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit = (int(fields["VmData"].split()[0]) // 1024 + MEMORY_MIB) * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class Worker:
    """A worker process, started anew when it has died or hangs."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._process: subprocess.Popen[str] | None = None
        handle, name = tempfile.mkstemp(prefix="fuzz-worker-")
        os.unlink(name)
        self._errors = handle

    def try_file(self, kind: str, index: int) -> dict[str, Any]:
        """Its report; of one that died or hung, what can be told from outside."""
        process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(f"{kind} {index}\n")
        process.stdin.flush()
        report = self._read(process, HANG_S)
        if report is None:
            is_alive = process.poll() is None
            self.stop(signal.SIGABRT)  # it says where it was
            status = (
                f"no answer in {HANG_S:.0f} s" if is_alive else f"the process died ({process.returncode})"
            )
            return {
                "outcome": "died",
                "detail": status + self._last_words(),
                "seconds": HANG_S,
                "peak_mib": 0,
            }
        return report

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fuzz", "--worker", "--seed", str(self._seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "HF_HUB_OFFLINE": "1",
            },
        )
        if self._read(self._process, START_S) is None:
            raise RuntimeError(f"the worker doesn't start{self._last_words()}")
        return self._process

    def _read(self, process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any] | None:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            return None
        line = process.stdout.readline()
        return json.loads(line) if line else None

    def _last_words(self) -> str:
        end = os.fstat(self._errors).st_size
        return " " + os.pread(self._errors, 3000, max(0, end - 3000)).decode(errors="replace").strip()


@dataclass
class Tally:
    """What has been seen of one kind."""

    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    peak_mib: float = 0.0


def run(counts: dict[str, int], seed: int, first: int, num_workers: int) -> dict[str, Any]:
    """Try files ``first`` to ``first + count`` of each kind."""
    tallies = {kind: Tally() for kind in counts}
    faults: list[dict[str, Any]] = []
    lock = threading.Lock()
    jobs = _jobs(counts, first)

    def drain(_: int) -> None:
        worker = Worker(seed)
        try:
            while True:
                with lock:
                    job = next(jobs, None)
                if job is None:
                    return
                report = worker.try_file(*job)
                if report["outcome"] in ("loaded", "refused") and report["cpu_s"] > SLOW_S:
                    report["outcome"] = "slow"
                with lock:
                    tally = tallies[job[0]]
                    tally.outcomes[report["outcome"]] += 1
                    tally.slowest_s = max(tally.slowest_s, report["seconds"])
                    tally.peak_mib = max(tally.peak_mib, report["peak_mib"])
                    if report["outcome"] not in ("loaded", "refused"):
                        faults.append({"file": f"{job[0]}:{job[1]}", **report})
        finally:
            worker.stop()

    started = time.monotonic()
    with ThreadPoolExecutor(num_workers) as pool:
        list(pool.map(drain, range(num_workers)))
    return {
        "seed": seed,
        "first": first,
        "files": sum(counts.values()),
        "seconds": round(time.monotonic() - started, 1),
        "kinds": {
            kind: dict(tally.outcomes)
            | {"slowest_s": round(tally.slowest_s, 2), "peak_mib": round(tally.peak_mib)}
            for kind, tally in tallies.items()
        },
        "faults": faults,
    }


def _jobs(counts: dict[str, int], first: int) -> Iterator[tuple[str, int]]:
    for kind, count in counts.items():
        for index in range(first, first + count):
            yield kind, index


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="files in all, shared out among the kinds")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this kind; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of each kind's first file")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", metavar="KIND:INDEX", help="one file, in this process, without limits")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the report here")
    options = parser.parse_args()
    if options.worker or options.only:
        kind, _, index = (options.only or "").partition(":")
        work(options.seed, (kind, int(index)) if options.only else None)
        return 0
    kinds = {kind: share for kind, share in KINDS.items() if not options.kind or kind in options.kind}
    total = sum(kinds.values())
    counts = {kind: max(1, share * options.count // total) for kind, share in kinds.items()}
    report = run(counts, options.seed, options.first, options.workers)
    print(json.dumps(report, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(describe_machine(device="cpu") | report, indent=1) + "\n")
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
