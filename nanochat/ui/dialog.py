"""What all dialogs have in common. Knows none of them."""

from __future__ import annotations

from typing import TypeVar

from textual.await_complete import AwaitComplete
from textual.screen import ModalScreen

T = TypeVar("T")


class Dialog(ModalScreen[T]):
    """A screen on top that gives its result once.

    Of several keys typed at once, those after the one that closes it still come to it; Textual would take the
    screen below away for each.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_result = False

    def dismiss(self, result: T | None = None) -> AwaitComplete:
        """Give the result and go; harmless when repeated."""
        if self._has_result:
            return AwaitComplete.nothing()
        self._has_result = True
        return super().dismiss(result)
