"""Keeps what is pasted from being taken for keys.

A terminal marks a paste's begin and end. Textual looks for escape sequences in between as well, and what it can't
make sense of it plays back as key presses: a pasted log with colours would send messages and run commands. So
Escape is hidden from it until the paste has ended. Knows nothing of Textual.
"""

from __future__ import annotations

import time

ESCAPE = "\x1b"
BEGIN, END = "\x1b[200~", "\x1b[201~"
HIDDEN = "\uf01b"
"""Stands for Escape in between; for private use, so no text means anything by it."""
SEQUENCE_S = 0.1
"""Parts of a mark come within this time, or the first of them was the Escape key."""


class PasteGuard:
    """For one terminal's input, which comes in pieces that may end anywhere."""

    def __init__(self) -> None:
        self._is_inside = False
        self._recent = ""
        """Outside: the end of what has been passed on, if it may be the beginning of a mark."""
        self._recent_s = 0.0
        self._held = ""
        """Inside: what may be the beginning of the end's mark, not passed on yet."""

    def hide(self, data: str) -> str:
        """The next piece, as the parser may see it."""
        passed = []
        rest, self._held = self._held + data, ""
        while rest:
            part, rest = self._inside(rest) if self._is_inside else self._outside(rest)
            passed.append(part)
        return "".join(passed)

    def _outside(self, data: str) -> tuple[str, str]:
        recent = self._recent if time.monotonic() - self._recent_s < SEQUENCE_S else ""
        text = recent + data
        self._recent, self._recent_s = "", time.monotonic()
        before, mark, _ = text.partition(BEGIN)
        if not mark:
            self._recent = _unfinished(text, BEGIN)
            return data, ""
        self._is_inside = True
        end = len(before) + len(mark) - len(recent)
        return data[:end], data[end:]

    def _inside(self, data: str) -> tuple[str, str]:
        text, mark, rest = data.partition(END)
        if mark:
            self._is_inside = False
        else:
            self._held = _unfinished(data, END)
            text = data[: len(data) - len(self._held)]
        return text.replace(ESCAPE, HIDDEN) + mark, rest


def show(text: str) -> str:
    """A paste's text as it was."""
    return text.replace(HIDDEN, ESCAPE)


def _unfinished(text: str, mark: str) -> str:
    """The longest end of ``text`` with which ``mark`` begins, but not all of it."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((mark[:length] for length in lengths if text.endswith(mark[:length])), "")
