"""Names of keys: whether one exists, how it is written for people, and whether it can be a command's.

A key is named as Textual names it: ``ctrl+n``, ``alt+left``, ``f5``, ``shift+enter``.
"""

from __future__ import annotations

from textual.keys import Keys

MODIFIERS = ("ctrl", "alt", "shift", "super", "meta", "hyper")

_NAMED = frozenset(key.value.split("+")[-1] for key in Keys if key.value[0] not in "<c" or "+" in key.value)
_PRINTS = frozenset({"space"})
_EDITS = frozenset(
    {"up", "down", "left", "right", "home", "end", "insert", "delete", "backspace", "enter", "tab", "return"}
)
"""What writing needs: as commands without ctrl or alt they would cripple the prompt."""
_LABELS = {
    "escape": "Esc",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "left": "←",
    "right": "→",
    "up": "↑",
    "down": "↓",
    "backslash": "\\",
}


def split(keys: str) -> tuple[str, ...]:
    """``"f4, ctrl+pagedown"`` as single names."""
    return tuple(key.strip() for key in keys.split(",") if key.strip())


def exists(key: str) -> bool:
    """Whether a terminal could send a key of this name."""
    *modifiers, name = key.split("+")
    return (
        all(modifier in MODIFIERS for modifier in modifiers)
        and len(set(modifiers)) == len(modifiers)
        and (len(name) == 1 or name in _NAMED)
    )


def writes(key: str) -> bool:
    """Whether the key writes a character."""
    *modifiers, name = key.split("+")
    return not set(modifiers) - {"shift"} and (len(name) == 1 or name in _PRINTS)


def is_free(key: str) -> bool:
    """Whether a command may have this key: neither writes a character nor is needed to edit text."""
    *modifiers, name = key.split("+")
    if set(modifiers) - {"shift"}:
        return True
    return len(name) > 1 and name not in _PRINTS and name not in _EDITS


def label(keys: str) -> str:
    """The first of some keys as people write it: ``^N``, ``Alt ←``, ``F5``."""
    names = split(keys)
    if not names:
        return ""
    *modifiers, name = names[0].split("+")
    shown = _LABELS.get(name, name.upper() if len(name) == 1 else name.capitalize())
    if modifiers == ["ctrl"] and len(name) == 1:
        return f"^{shown}"
    return " ".join([*(modifier.capitalize() for modifier in modifiers), shown])
