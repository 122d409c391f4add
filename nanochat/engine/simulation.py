"""Runs the scheduler alone: scripted answers, a simulated clock, no model and no torch.

Two uses: small fixed cases whose figures can be compared from version to version, and a trace of real
arrivals replayed under a stated cost model.
"""

from __future__ import annotations

import csv
import io
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from nanochat.bounded import read_at_most
from nanochat.engine.block_pool import BlockPool
from nanochat.engine.config import EngineConfig, SamplingParams
from nanochat.engine.request import Request
from nanochat.engine.scheduler import Scheduler, StepPlan
from nanochat.errors import InvalidOption, PromptTooLong

BLOCK_SIZE = 4
ANSWER_TOKENS = 4
"""Block size and answer length of every case in the table."""

MAX_TRACE_BYTES = 256 * 2**20

MIXED = (2, 4, 6, 8, 8, 9)
EOS = 0


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table, with the figures of a sequential scheduler (one unfinished prefill a step)."""

    name: str
    max_num_batched_tokens: int
    num_blocks: int
    prompts: tuple[int, ...]
    """Length of each request's prompt; all arrive before the first round."""
    baseline_rounds: int
    baseline_preemptions: int


@dataclass(frozen=True, slots=True)
class CaseResult:
    name: str
    max_num_batched_tokens: int
    num_blocks: int
    requests: int
    rounds: int
    preemptions: int
    leaked_blocks: int
    peak_blocks: int
    upfront_blocks: int
    """What reserving each request's whole length at admission would take, if all ran at once."""
    baseline_rounds: int
    baseline_preemptions: int


TABLE = (
    Case("mixed, ample cache", 8, 24, MIXED, 10, 0),
    Case("mixed, cache pressure", 6, 7, MIXED, 12, 0),
    Case("decode fairness", 4, 12, (1,) * 12, 12, 0),
    Case("decode, preemption pressure", 12, 4, (3,) * 8, 12, 4),
)


def run_case(case: Case) -> CaseResult:
    """Run one case to its end."""
    pool = BlockPool(case.num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(
        pool,
        max_num_seqs=len(case.prompts),
        max_num_batched_tokens=case.max_num_batched_tokens,
        max_model_len=case.num_blocks * BLOCK_SIZE + 1,
    )
    params = SamplingParams(max_tokens=ANSWER_TOKENS)
    for number, length in enumerate(case.prompts):
        prompt = [100 * number + position for position in range(length)]  # nothing to share
        scheduler.add(Request(number, prompt, params))
    rounds = peak = 0
    while scheduler.has_work:
        plan = scheduler.plan(float(rounds))
        rounds += 1
        peak = max(peak, pool.num_used)
        scheduler.commit(plan, [1] * len(plan.sampling), float(rounds))
        scheduler.check_invariants()
    upfront = sum(-(-(length + ANSWER_TOKENS - 1) // BLOCK_SIZE) for length in case.prompts)
    return CaseResult(
        name=case.name,
        max_num_batched_tokens=case.max_num_batched_tokens,
        num_blocks=case.num_blocks,
        requests=len(case.prompts),
        rounds=rounds,
        preemptions=scheduler.num_preemptions,
        leaked_blocks=pool.num_used,
        peak_blocks=peak,
        upfront_blocks=upfront,
        baseline_rounds=case.baseline_rounds,
        baseline_preemptions=case.baseline_preemptions,
    )


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    time_s: float
    """Since the first one."""
    prompt_tokens: int
    answer_tokens: int


def read_trace(path: Path) -> list[Arrival]:
    """Read a CSV file with columns TIMESTAMP (ISO 8601), ContextTokens and GeneratedTokens.

    Raises:
        InvalidOption: it can't be read, or a line isn't as it should be.
    """
    rows: list[tuple[datetime, int, int]] = []
    try:
        text = read_at_most(path, MAX_TRACE_BYTES).decode("utf-8")
        for line, row in enumerate(csv.DictReader(io.StringIO(text, newline="")), start=2):
            rows.append(_parse_row(row, path, line))
    except UnicodeDecodeError as error:
        raise InvalidOption(f"The trace {path} isn't text in UTF-8; name a CSV file.") from error
    except OSError as error:
        raise InvalidOption(
            f"The trace {path} can't be read: {error.strerror or error}; check the path."
        ) from error
    except csv.Error as error:
        raise InvalidOption(f"The trace {path} can't be read: {error}; name a CSV file.") from error
    if not rows:
        raise InvalidOption(f"The trace {path} holds no requests.")
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    return [Arrival((when - start).total_seconds(), prompt, answer) for when, prompt, answer in rows]


def _parse_row(row: dict[str, str], path: Path, line: int) -> tuple[datetime, int, int]:
    try:
        when = datetime.fromisoformat(row["TIMESTAMP"])
        prompt, answer = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidOption(
            f"Line {line} of the trace {path} needs TIMESTAMP, ContextTokens and GeneratedTokens, "
            "a time and two whole numbers."
        ) from error
    if prompt < 1 or answer < 1:
        raise InvalidOption(f"Line {line} of the trace {path} has a length below 1.")
    return when if when.tzinfo else when.replace(tzinfo=UTC), prompt, answer


@dataclass(frozen=True, slots=True)
class CostModel:
    """Simulated seconds a step takes: ``step_s``, and ``token_s`` for each of its tokens."""

    step_s: float = 0.008
    token_s: float = 25e-6

    def seconds(self, plan: StepPlan) -> float:
        return self.step_s + self.token_s * plan.num_tokens


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Nearest rank. All 0 without values."""
        ordered = sorted(values) or [0.0]
        p50, p90, p99 = (ordered[-(-len(ordered) * rank // 100) - 1] for rank in (50, 90, 99))
        return cls(p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What came of a trace."""

    requests: int
    refused: int
    """Prompts longer than the whole cache."""
    steps: int
    simulated_s: float
    prompt_tokens: int
    answer_tokens: int
    computed_tokens: int
    """Tokens of all steps together: less than prompts and answers by what the prefix cache gave."""
    preemptions: int
    prefix_hit_rate: float
    """Share of all prompt tokens that were found in the prefix cache."""
    peak_blocks: int
    ttft_steps: Percentiles
    """Steps from arrival to the first token, both included."""
    ttft_s: Percentiles
    """In simulated seconds."""
    planner_us: Percentiles
    """Real microseconds of plan() and commit(), a step."""


class Replay:
    """Replays a trace against one scheduler. ``config`` gives block size, blocks and both budgets."""

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        config: EngineConfig,
        *,
        cost: CostModel = CostModel(),
        shared_prefix_tokens: int = 0,
    ) -> None:
        """``shared_prefix_tokens``: so many first tokens are the same in all prompts, the others random."""
        if config.num_kv_blocks is None:
            raise InvalidOption("A simulation needs a number of KV blocks.")
        self._pool = BlockPool(config.num_kv_blocks, config.block_size, prefix_caching=config.prefix_caching)
        self._scheduler = Scheduler(
            self._pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.num_kv_blocks * config.block_size + 1,
        )
        self._cost = cost
        self._arrivals = deque(arrivals)
        self._randoms = random.Random(0)
        self._shared = self._random_tokens(min(shared_prefix_tokens, self._scheduler.max_model_len))
        self._clock_s = 0.0
        self._steps = self._refused = self._computed = self._peak_blocks = 0
        self._answers: dict[Request, int] = {}
        """Scripted length of each live request's answer."""
        self._born: dict[Request, int] = {}
        """Steps that had been made when it arrived."""
        self._done: list[Request] = []
        self._ttft_steps: list[float] = []
        self._ttft_s: list[float] = []
        self._planner_us: list[float] = []

    def run(self) -> ReplayResult:
        while self._arrivals or self._scheduler.has_work:
            if not self._scheduler.has_work:
                self._clock_s = max(self._clock_s, self._arrivals[0].time_s)
            while self._arrivals and self._arrivals[0].time_s <= self._clock_s:
                self._arrive(self._arrivals.popleft())
            if self._scheduler.has_work:
                self._step()
        scheduler = self._scheduler
        return ReplayResult(
            requests=len(self._done),
            refused=self._refused,
            steps=self._steps,
            simulated_s=round(self._clock_s, 3),
            prompt_tokens=sum(request.num_prompt_tokens for request in self._done),
            answer_tokens=sum(request.num_generated_tokens for request in self._done),
            computed_tokens=self._computed,
            preemptions=scheduler.num_preemptions,
            prefix_hit_rate=round(scheduler.prefix_hit_tokens / max(1, scheduler.prefix_query_tokens), 4),
            peak_blocks=self._peak_blocks,
            ttft_steps=Percentiles.of(self._ttft_steps),
            ttft_s=Percentiles.of([round(seconds, 3) for seconds in self._ttft_s]),
            planner_us=Percentiles.of([round(value, 1) for value in self._planner_us]),
        )

    def _random_tokens(self, count: int) -> list[int]:
        return list(memoryview(self._randoms.randbytes(2 * count)).cast("H"))

    def _arrive(self, arrival: Arrival) -> None:
        try:
            self._scheduler.check_fits(arrival.prompt_tokens)
        except PromptTooLong:
            self._refused += 1
            return
        shared = self._shared[: arrival.prompt_tokens]
        prompt = shared + self._random_tokens(arrival.prompt_tokens - len(shared))
        params = SamplingParams(max_tokens=max(SamplingParams().max_tokens, arrival.answer_tokens))
        request = Request(len(self._born), prompt, params, frozenset([EOS]), arrival_s=arrival.time_s)
        self._scheduler.add(request)
        self._answers[request] = arrival.answer_tokens
        self._born[request] = self._steps

    def _step(self) -> None:
        start = time.perf_counter()
        plan = self._scheduler.plan(self._clock_s)
        planned = time.perf_counter()
        sampling = plan.sampling
        token_ids = [
            EOS if request.num_generated_tokens + 1 == self._answers[request] else 1
            for request, _, _, _ in sampling
        ]
        first = [request for request, _, _, _ in sampling if request.first_token_s is None]
        self._steps += 1
        self._clock_s += self._cost.seconds(plan)
        self._computed += plan.num_tokens
        self._peak_blocks = max(self._peak_blocks, self._pool.num_used)
        committing = time.perf_counter()
        accepted = self._scheduler.commit(plan, token_ids, self._clock_s)
        end = time.perf_counter()
        self._planner_us.append((planned - start + end - committing) * 1e6)
        self._ttft_steps += [float(self._steps - self._born[request]) for request in first]
        self._ttft_s += [self._clock_s - request.arrival_s for request in first]
        self._done += [request for request, _ in accepted if request.finish_reason is not None]
