"""The only place that uses what Textual doesn't promise to keep. Its test fails when an update moves it."""

from __future__ import annotations

from typing import Any

from textual.app import App


def write_to_terminal(app: App[Any], sequence: str) -> None:
    """Send a control sequence in step with the screen's own output; nothing without a terminal.

    Textual's public API can send OSC 52, but not wrapped for tmux.
    """
    if app._driver is not None:
        app._driver.write(sequence)
