"""What a chat template may cost: time, the size of each value it makes, and of all of them together.

Values that a template makes share their parts, so a few lines can describe a text of any length: ten times
a list of ten times a list. A value therefore weighs what it is written out, and is weighed when it is made,
so that none exists whose writing out, comparing or sorting would take long. What a user's own messages
need is added to the limits. Knows nothing of the sandbox.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Set, ValuesView
from dataclasses import dataclass
from typing import Any, TypeVar

from jinja2 import TemplateError
from jinja2.runtime import Context

T = TypeVar("T")

BUDGET = "budget of this rendering"
"""Where a rendering's context has it. No identifier, so a template can't name it."""
ELEMENT = 16
"""Characters that an element of a container weighs beside its contents."""
POINTER = 8
"""Characters' worth of memory that an element of a new container takes, its contents being shared."""
MAX_INTEGER_BITS = 4096
MAX_PADDING = 10_000
_CONTAINERS = (list, tuple, Mapping, Set, ValuesView)
_SHARE_OF_ALL = 8
"""All values together may be so many times as large as one."""
_INPUT_COPIES, _INPUT_COPIES_OF_ALL = 8, 1024
"""How many times what it is given a template may hold in one value, and make in all (some join up a chat
message by message)."""


class TemplateLimitExceeded(TemplateError):
    """The template takes too long or makes too much text."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """How much one rendering may cost, beside what its messages need."""

    seconds: float = 10.0
    characters: int = 1 << 22
    """Of the whole output and of any text or list on the way to it."""


class Budget:
    """What is left to one rendering."""

    def __init__(self, limits: TemplateLimits, variables: Mapping[str, Any]) -> None:
        self._deadline = time.monotonic() + limits.seconds
        self._limits = limits
        given = _weight(variables, None)
        self._largest = limits.characters + _INPUT_COPIES * given
        self._left = _SHARE_OF_ALL * limits.characters + _INPUT_COPIES_OF_ALL * given

    def spend(self) -> None:
        """Called so often that the time between two calls is short."""
        if time.monotonic() > self._deadline:
            raise TemplateLimitExceeded(f"it takes longer than {self._limits.seconds:g} s")

    def check_size(self, length: int) -> None:
        """Whether one value may be so long; asked before it is made, where that can be known."""
        if length > self._largest:
            raise TemplateLimitExceeded(f"it makes a text longer than {self._largest} characters")

    def charge(self, length: int) -> None:
        """So many characters have been made."""
        self._left -= length
        if self._left < 0:
            raise TemplateLimitExceeded("it makes too much text on its way")

    def check_replacement(self, text: str, old: Any, new: Any) -> None:
        """Whether a text may become what it is with all of one part replaced."""
        if isinstance(old, str) and isinstance(new, str):
            self.check_size(len(text) + text.count(old) * len(new))

    def weigh(self, value: Any) -> int:
        """Characters of a value written out in full, roughly."""
        return _weight(value, self)

    def accept(self, value: T) -> T:
        """A value that the template has made; returns it if it may exist."""
        self.spend()
        if isinstance(value, str):
            self.check_size(len(value))
            self.charge(len(value))
        elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise TemplateLimitExceeded("a number is too large")
        elif isinstance(value, _CONTAINERS):
            self.weigh(value)
            self.charge(POINTER * len(value))
        return value


def budget_of(context: Context) -> Budget:
    """The budget of the rendering that a context belongs to."""
    budget: Budget = context.parent[BUDGET]
    return budget


def _weight(value: Any, budget: Budget | None) -> int:
    """Each shared part counts as often as it is written; with a budget it stops where that is used up."""
    weight = 0
    to_weigh = [value]
    while to_weigh:
        item = to_weigh.pop()
        if isinstance(item, str):
            weight += len(item)
        elif isinstance(item, int):
            weight += ELEMENT + item.bit_length() // 3
        elif isinstance(item, _CONTAINERS):
            weight += ELEMENT * (1 + len(item))
            if budget is not None:
                budget.check_size(weight)
            to_weigh.extend(item)
            if isinstance(item, Mapping):
                to_weigh.extend(item.values())
        else:
            weight += ELEMENT
    if budget is not None:
        budget.check_size(weight)
    return weight
