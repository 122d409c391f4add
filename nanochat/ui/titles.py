"""Titles of chats: from their first message, and as much of them as a tab shows."""

from __future__ import annotations

from nanochat.sanitize import sanitize_line

NEW_TITLE = "New chat"
TITLE_LENGTH = 22
"""Characters of a title on its tab."""
MAX_TITLE = 60
"""Characters of a title."""


def title_from(text: str) -> str:
    """A chat's title from its first message: its beginning."""
    return _cut(sanitize_line(text, 8 * MAX_TITLE), MAX_TITLE) or NEW_TITLE


def short_title(title: str) -> str:
    """As much of a title as a tab shows."""
    return _cut(sanitize_line(title), TITLE_LENGTH)


def _cut(line: str, length: int) -> str:
    """At a word, if there is one to cut at."""
    if len(line) <= length:
        return line
    head = line[:length].rpartition(" ")[0].rstrip(" ,.;:!?")
    return (head or line[: length - 1]) + "…"
