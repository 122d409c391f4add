"""Prompts are cut so that running chats keep their pace."""

from __future__ import annotations

from nanochat.engine.block_pool import BlockPool
from nanochat.engine.config import SamplingParams
from nanochat.engine.request import Request
from nanochat.engine.scheduler import Scheduler, StepPlan
from nanochat.engine.step_pace import FIRST_TOKENS, FLOOR, LONE_GOAL_S, StepPace

DECODE_S = 0.02
TOKEN_S = 0.001


def make_scheduler(pace: StepPace) -> Scheduler:
    pool = BlockPool(1024, 16)
    return Scheduler(pool, max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=4096, pace=pace)


def add(scheduler: Scheduler, request_id: int, length: int) -> None:
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    scheduler.add(Request(request_id, [request_id] * length, params))


def step(scheduler: Scheduler, slowdown: float = 1.0) -> tuple[StepPlan, float]:
    """One step of a machine that takes `DECODE_S` and `TOKEN_S` for each token of a prompt; and its time."""
    plan = scheduler.plan(0.0)
    seconds = slowdown * (DECODE_S + TOKEN_S * (plan.num_tokens - len(plan.decodes)))
    scheduler.commit(plan, [7] * len(plan.sampling), 0.0)
    scheduler.pace.record(plan, seconds)
    return plan, seconds


def chat_then_long_prompt(goal_s: float) -> list[float]:
    """Times of the steps in which a prompt of 2,000 tokens is computed beside a chat."""
    scheduler = make_scheduler(StepPace(goal_s))
    add(scheduler, 1, 64)
    for _ in range(4):
        step(scheduler)
    add(scheduler, 2, 2000)
    times = []
    while True:
        plan, seconds = step(scheduler)
        if not plan.prefills:
            return times
        times.append(seconds)


def test_no_step_takes_much_longer_than_the_goal() -> None:
    times = chat_then_long_prompt(0.1)
    assert max(times) <= 0.11
    assert len(times) <= 2000 * TOKEN_S / (0.1 - DECODE_S) * 1.3


def test_without_a_goal_the_whole_prompt_is_one_step() -> None:
    assert len(chat_then_long_prompt(0.0)) == 1


def test_a_goal_that_cannot_be_met_still_lets_the_prompt_advance() -> None:
    assert len(chat_then_long_prompt(0.001)) == -(-2000 // FLOOR)


def test_without_a_running_chat_a_prompt_is_cut_so_that_a_cancel_is_heard() -> None:
    scheduler = make_scheduler(StepPace(0.1))
    add(scheduler, 1, 64)
    step(scheduler)
    scheduler.finish(scheduler.running[0], "cancelled", 0.0)
    add(scheduler, 2, 2000)
    plan, seconds = step(scheduler)
    assert 300 < plan.num_tokens < 2000
    assert seconds <= 1.1 * LONE_GOAL_S


def test_a_quick_machine_cuts_no_prompt() -> None:
    scheduler = make_scheduler(StepPace(0.1))
    add(scheduler, 1, 64)
    step(scheduler, slowdown=0.01)
    scheduler.finish(scheduler.running[0], "cancelled", 0.0)
    add(scheduler, 2, 2000)
    assert step(scheduler)[0].num_tokens == 2000


def test_the_first_prompt_is_begun_with_care() -> None:
    for first_tokens in (FIRST_TOKENS, None):
        scheduler = make_scheduler(StepPace(0.1, first_tokens))
        add(scheduler, 1, 2000)
        assert step(scheduler)[0].num_tokens == (first_tokens or 2000)


def test_it_follows_a_machine_that_becomes_slower() -> None:
    scheduler = make_scheduler(StepPace(0.5))
    add(scheduler, 1, 64)
    for _ in range(4):
        step(scheduler)
    add(scheduler, 2, 4000)
    times = [step(scheduler, slowdown=5)[1] for _ in range(6)]
    assert times[0] > 1
    assert times[-1] <= 0.6


def test_one_slow_step_does_not_hold_a_prompt_up() -> None:
    """The machine was away for a second while a chat ran; in the next prompt's steps the chat runs as well."""
    scheduler = make_scheduler(StepPace(0.5))
    add(scheduler, 1, 64)
    for _ in range(4):
        step(scheduler)
    step(scheduler, slowdown=50)
    add(scheduler, 2, 2000)
    plans = [step(scheduler)[0] for _ in range(2)]
    assert plans[0].num_tokens == FLOOR + 1
    assert plans[1].num_tokens > 300
