"""Colours: a calm dark theme, a light one, one of high contrast, and a hue for each tab that its blocks share.

The greys are nearly neutral, so that a terminal of 256 colours shows greys too and not its nearest teal.
"""

from __future__ import annotations

from textual.theme import Theme

from nanochat.errors import InvalidOption

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
    "#1a6dbb",
    "#9a5b00",
    "#2e8540",
    "#c2347a",
    "#6a4fd0",
    "#007a70",
    "#c7432b",
    "#737000",
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

# Black, white and full hues: for glare, projectors and weak eyes.
CONTRAST = Theme(
    name="nanochat-contrast",
    dark=True,
    primary="#9ecbff",
    secondary="#d3c4ff",
    accent="#ffd23f",
    foreground="#ffffff",
    background="#000000",
    surface="#141414",
    panel="#242424",
    success="#7dff8e",
    warning="#ffd23f",
    error="#ff8f7d",
    variables={
        "muted": "#c8c8c8",
        "faint": "#8f8f8f",
        "line": "#6b6b6b",
        "map-free": "#5a5a5a",
        "map-cached": "#a8a8a8",
        **_tab_variables(_TABS_DARK),
    },
)

THEMES = (DARK, LIGHT, CONTRAST)


def theme_named(name: str) -> Theme:
    """The theme that settings and ``/theme`` call ``dark``, ``light`` or ``contrast``.

    Raises:
        InvalidOption: there is none of that name.
    """
    for theme in THEMES:
        if short_name(theme) == name:
            return theme
    names = ", ".join(map(short_name, THEMES))
    raise InvalidOption(f'There is no theme "{name[:30]}"; there are {names}.')


def short_name(theme: Theme) -> str:
    """Its name without the app's."""
    return theme.name.removeprefix("nanochat-")
