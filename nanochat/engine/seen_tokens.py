"""The distinct ids of a token list that grows: what a repetition penalty is about.

Knows nothing of torch, numpy or requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class SeenTokens:
    """Takes in each token once, however often it is asked: a context is long, and a step adds one token."""

    def __init__(self) -> None:
        self._ids = array("q")
        self._members: set[int] = set()
        self._num_taken = 0

    def of(self, token_ids: Sequence[int]) -> array[int]:
        """Distinct ids, 64 bits each, by first occurrence. To be copied before the next call.

        The list must begin as it did the last time.
        """
        for token_id in token_ids[self._num_taken :]:
            if token_id not in self._members:
                self._members.add(token_id)
                self._ids.append(token_id)
        self._num_taken = len(token_ids)
        return self._ids
