"""Makes text from outside fit to be shown: the one door between a model's or a paste's text and a terminal.

A terminal obeys what it is sent, so control characters, escape sequences, direction overrides and
invisible characters that could carry hidden text never reach it. Characters with a visible stand-in
keep one, so that nothing disappears unseen. Knows nothing of widgets.
"""

from __future__ import annotations

import re
import unicodedata

MAX_MARKS = 8
"""Most combining or joining characters kept in a row; languages need fewer, floods use thousands."""

_PIECE = 50_000
"""Characters cleaned at a time: a single operation on a text holds Python's lock until it is done."""

_LINE_BREAKS = "\v\f\x1c\x1d\x1e\x85\u2028\u2029"
"""What ``str.splitlines`` breaks at and Markdown doesn't: both must see the same lines."""

SURROGATES = re.compile("[\ud800-\udfff]")
"""Halves of a character, which no UTF-8 can hold alone."""
_INVISIBLE = (
    *range(0x202A, 0x202F),  # direction embeddings and overrides
    *range(0x2066, 0x206A),  # direction isolates
    *(0x061C, 0x200E, 0x200F),  # direction marks
    *(0x00AD, 0x200B, 0x2060, 0xFEFF, 0x180E),  # soft hyphen, zero-width spaces and joiners
    *range(0x2061, 0x2066),  # invisible operators
    *range(0x206A, 0x2070),  # deprecated format characters
    *range(0xFFF9, 0xFFFC),  # interlinear annotation
    *range(0x1BCA0, 0x1BCA4),  # shorthand format controls
    *range(0x1D173, 0x1D17B),  # musical ones
    *range(0xE0000, 0xE0080),  # tag characters
    *range(0xE0100, 0xE01F0),  # variation selectors beyond the first sixteen
)


def _table() -> dict[int, str]:
    table = {code: chr(0x2400 + code) for code in range(0x20)}  # control pictures: ESC becomes ␛
    table |= {0x7F: "\u2421"}
    table |= dict.fromkeys(range(128, 160), "�")
    table |= dict.fromkeys(range(55296, 57344), "�")
    table |= {ord(character): "\n" for character in _LINE_BREAKS}
    table |= dict.fromkeys(_INVISIBLE, "")
    for kept in "\t\n\r":
        del table[ord(kept)]
    return table


_TABLE = _table()


def _is_mark(character: str) -> bool:
    """Whether it takes no cell of its own: combining marks, variation selectors and joiners."""
    return character in "\u200c\u200d" or unicodedata.category(character) in ("Mn", "Me", "Cf")


class Sanitizer:
    """Cleans a text that arrives in pieces: the pieces joined are the whole text cleaned."""

    def __init__(self) -> None:
        self._marks = 0
        self._ends_in_return = False

    def feed(self, text: str) -> str:
        """The next piece, cleaned."""
        if self._ends_in_return and text.startswith("\n"):
            text = text[1:]  # the line break was given out with the carriage return
            self._ends_in_return = False
        if text:
            self._ends_in_return = text.endswith("\r")
        text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_TABLE)
        return self._limit_marks(text)

    def _limit_marks(self, text: str) -> str:
        if text.isascii():
            self._marks = 0 if text else self._marks
            return text
        kept = []
        for character in text:
            self._marks = self._marks + 1 if _is_mark(character) else 0
            if self._marks <= MAX_MARKS:
                kept.append(character)
        return "".join(kept)


def encodable(text: str) -> str:
    """The text with each lone surrogate, which no UTF-8 can hold, as U+FFFD."""
    return SURROGATES.sub("\ufffd", text)


def sanitize(text: str) -> str:
    """A whole text, cleaned; line breaks and tabs stay. Other threads get their turn in between."""
    if len(text) <= _PIECE:
        return Sanitizer().feed(text)
    sanitizer = Sanitizer()
    return "".join(sanitizer.feed(text[start : start + _PIECE]) for start in range(0, len(text), _PIECE))


def sanitize_line(text: str, limit: int = 200) -> str:
    """A text cleaned and put on one line of at most ``limit`` characters, for titles and notices."""
    line = " ".join(sanitize(text[: 8 * limit]).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"
