"""How many prompt tokens a step may take on so that nobody waits for it long: learned from how long steps took.

Knows nothing of torch, requests or clocks: it is told durations, in seconds.
"""

from __future__ import annotations

from nanochat.engine.step_plan import StepPlan

GRAIN = 16
"""Budgets are multiples of this: kernels are prepared anew for every number of rows."""
FLOOR = 64
"""Tokens that a prompt may always take: on a CPU they cost little more than one, and it has to get on."""
FIRST_TOKENS = 128
"""Of the first prompt on a CPU, when nothing is known of the machine. A GPU is fast, and compiles each new size."""
LONE_GOAL_S = 0.5
"""A step that no chat waits for may take so long: a cancel, or whoever comes next, still has to."""
FEWEST_TOKENS = 8
"""A prefill of fewer says nothing about the cost of one token."""
SLOWER_SHARE = 0.5
"""Of a slower observation in the estimates: the machine's other work, and contexts, change quickly."""
FASTER_SHARE = 0.8
"""Of a faster one: what made one step slow by itself, such as compiling a kernel, must be forgotten soon."""


class StepPace:
    """Two estimates: what a step costs beside its prefill, and what each token of a prefill adds."""

    def __init__(self, goal_s: float = 0.0, first_tokens: int | None = None) -> None:
        """``goal_s``: how long a step may take while chats are running. 0: any step, as long as it likes.

        ``first_tokens``: most that a step may take on before any has told how long they take.
        """
        self.goal_s = goal_s
        self._first_tokens = first_tokens
        self._decode_s = 0.0
        self._token_s = 0.0

    def record(self, plan: StepPlan, duration_s: float) -> None:
        """A step took this long."""
        tokens = plan.num_tokens - len(plan.decodes)
        if not tokens:
            self._decode_s = _blend(self._decode_s, duration_s)
            return
        if plan.decodes:
            # One slow step must not hold prompts up until the next step without any: it may be far off.
            self._decode_s = min(self._decode_s, duration_s)
        if tokens >= FEWEST_TOKENS:
            others_s = min(self._decode_s, duration_s / 2) if plan.decodes else 0.0
            self._token_s = _blend(self._token_s, (duration_s - others_s) / tokens)

    def prefill_tokens(self, budget: int, *, beside_chats: bool) -> int:
        """Of ``budget``, how many tokens of prompts a step may take, ``beside_chats`` that wait for it or alone."""
        if not self.goal_s:
            return budget
        if not self._token_s:
            return budget if self._first_tokens is None else min(budget, self._first_tokens)
        seconds = self.goal_s - self._decode_s if beside_chats else max(self.goal_s, LONE_GOAL_S)
        affordable = int(seconds / self._token_s)
        return min(budget, max(FLOOR, affordable - affordable % GRAIN))


def _blend(estimate: float, observed: float) -> float:
    share = FASTER_SHARE if observed < estimate else SLOWER_SHARE
    return observed if not estimate else estimate + share * (observed - estimate)
