"""Pictures of the app as SVG: the whole screen, or one widget alone."""

from __future__ import annotations

import io
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.segment import Segment, Segments
from textual.geometry import Region
from textual.widget import Widget


def widget_svg(widget: Widget, title: str) -> str:
    """A widget as it stands on the screen, in a frame of its own."""
    width, height = widget.outer_size  # with its border and padding
    console = Console(
        width=width,
        height=height,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        record=True,
        legacy_windows=False,
    )
    for strip in widget.render_lines(Region(0, 0, width, height)):
        console.print(Segments([*strip, Segment("\n")]), end="")
    return console.export_svg(title=title)


def file_name(now: datetime) -> str:
    """Sorts by time, and two within a second don't meet."""
    return f"nanochat-{now:%Y-%m-%d-%H%M%S-%f}"[:-3] + ".svg"


def save(svg: str, file: Path) -> str | None:
    """Write a picture, with its folder if need be; returns what went wrong, in a sentence."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(svg, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        return f"The screenshot can't be saved in {file.parent}: {reason}."
    return None


def pictures_folder() -> Path:
    """The user's pictures, or the home folder where there are none."""
    from platformdirs import user_pictures_path

    pictures = user_pictures_path()
    return pictures if pictures.is_dir() else Path.home()
