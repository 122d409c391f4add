"""What to leave out of a chat that has become too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nanochat.backend.interface import DropOffer, Said

MIN_ANSWER_SHARE = 8
"""After dropping turns, at least one part in this many of the context is left for the answer."""


def drop_offer(messages: Sequence[Said], limit: int, count: Callable[[int], int]) -> DropOffer | None:
    """The fewest oldest turns to leave out so that the rest fits ``limit`` tokens with room to answer.

    None if even the last message alone doesn't fit.

    Args:
        count: tokens of the prompt that begins with the message of this index.
    """
    starts = [index for index, message in enumerate(messages) if message.role == "user"]
    room = limit - max(1, limit // MIN_ANSWER_SHARE)
    low, high = 1, len(starts) - 1  # turns to drop; the more, the fewer tokens
    if high < 1 or count(starts[high]) >= limit:
        return None
    while low < high:
        middle = (low + high) // 2
        if count(starts[middle]) <= room:
            high = middle
        else:
            low = middle + 1
    return DropOffer(low, count(0), count(starts[low]), limit)
