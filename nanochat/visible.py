"""Text from outside made fit for a terminal or a file that is shown in one: it must not command it."""

from __future__ import annotations

_STAND_INS = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"}
_STAND_INS |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")


def visible(text: str) -> str:
    """The text with control characters, but tabs and line breaks, replaced by visible ones: ESC by ␛."""
    return text.translate(_STAND_INS)
