"""Colours: one calm dark theme, one light one, and a hue for each tab that its blocks share.

The greys are nearly neutral, so that a terminal of 256 colours shows greys too and not its nearest teal.
"""

from __future__ import annotations

from textual.theme import Theme

NUM_TAB_COLOURS = 9

_TABS_DARK = (
    "#7cc4ff",
    "#f5b86b",
    "#86d993",
    "#f28fb8",
    "#b8a2ff",
    "#62d3c6",
    "#f58a76",
    "#cfd76a",
    "#9fb3d9",
)
_TABS_LIGHT = (
    "#1f77c9",
    "#b26a00",
    "#2e8540",
    "#c2347a",
    "#6a4fd0",
    "#00857a",
    "#c7432b",
    "#7d7a00",
    "#4b6295",
)


def tab_colour(slot: int) -> str:
    """The style name of a tab's hue; hues repeat after the ninth tab."""
    return f"$tab-{slot % NUM_TAB_COLOURS + 1}"


def _tab_variables(colours: tuple[str, ...]) -> dict[str, str]:
    return {f"tab-{number}": colour for number, colour in enumerate(colours, 1)}


DARK = Theme(
    name="nanochat-dark",
    dark=True,
    primary="#8fb8ff",
    secondary="#a99cff",
    accent="#f5b86b",
    foreground="#d9dbe2",
    background="#131418",
    surface="#1c1d22",
    panel="#26272d",
    success="#86d993",
    warning="#f5c86b",
    error="#f58a76",
    variables={
        "muted": "#868992",
        "faint": "#50525a",
        "line": "#313239",
        "map-free": "#3b3d45",
        "map-cached": "#6b6e79",
        **_tab_variables(_TABS_DARK),
    },
)

LIGHT = Theme(
    name="nanochat-light",
    dark=False,
    primary="#2b62c4",
    secondary="#6a4fd0",
    accent="#a85d00",
    foreground="#262a35",
    background="#fbfbf9",
    surface="#f1f1ee",
    panel="#e6e6e2",
    success="#2e8540",
    warning="#946200",
    error="#b93a24",
    variables={
        "muted": "#676d7d",
        "faint": "#a9adb8",
        "line": "#d9d9d4",
        "map-free": "#d0d1d0",
        "map-cached": "#9aa0ae",
        **_tab_variables(_TABS_LIGHT),
    },
)

THEMES = (DARK, LIGHT)
