"""How numbers look on the screen: tokens, times, rates, bars and sparklines. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

SPARKS = "▁▂▃▄▅▆▇█"
MISSING = "—"
_MANY = 10**12
"""Nothing that is counted here gets as far; what a broken server tells must not fill the panel."""
_LONG_S = 100 * 3600


def count(value: int | None) -> str:
    """``1183`` as ``1,183``."""
    if value is None:
        return MISSING
    return f"{value:,}" if value < _MANY else f"over {_MANY:.0e}"


def duration(seconds: float | None) -> str:
    """Three significant digits with the unit that suits: ``41 ms``, ``1.24 s``, ``2 min 5 s``."""
    if seconds is None:
        return MISSING
    if seconds < 0.9995:
        milliseconds = seconds * 1000
        return f"{milliseconds:.1f} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    if seconds >= _LONG_S:
        return "over 100 h"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def rate(tokens_per_second: float | None) -> str:
    """Tokens a second without the unit; one decimal below ten."""
    if tokens_per_second is None or tokens_per_second <= 0:
        return MISSING
    if tokens_per_second >= _MANY:
        return f"over {_MANY:.0e}"
    return f"{tokens_per_second:.1f}" if tokens_per_second < 9.95 else f"{tokens_per_second:,.0f}"


def percent(part: float, whole: float) -> str:
    """``part`` of ``whole`` as ``60 %``; a dash when there is no whole."""
    return f"{100 * part / whole:.0f} %" if whole else MISSING


def share(part: float | None) -> str:
    """A part of a whole, 0 to 1, as ``60 %``."""
    return MISSING if part is None else f"{100 * part:.0f} %"


def size(num_bytes: float) -> str:
    """``98.3 MB``: decimal units, as downloads are counted."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"


def sparkline(values: Iterable[float], width: int) -> str:
    """The last ``width`` values as bars scaled to their own maximum, right-aligned with spaces."""
    recent = list(values)[-width:] if width > 0 else []
    top = max(recent, default=0.0)
    last = len(SPARKS) - 1
    bars = "".join(SPARKS[round(last * max(0.0, value) / top)] if top > 0 else SPARKS[0] for value in recent)
    return bars.rjust(width)


def bar(fraction: float, width: int) -> tuple[str, str]:
    """A thin bar of ``width`` cells as (filled, rest), filled to half a cell."""
    halves = round(min(1.0, max(0.0, fraction)) * width * 2)
    if fraction > 0:
        halves = max(1, halves)
    whole, half = divmod(halves, 2)
    filled = "━" * whole + "╸" * half
    return filled, "━" * (width - len(filled))


def plural(number: int, noun: str) -> str:
    """``1 turn``, ``3 turns``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
