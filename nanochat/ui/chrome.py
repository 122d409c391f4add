"""What frames the chats: the header, the welcome of an empty chat, and the bar of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from textual.content import Content
from textual.geometry import Size
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from nanochat.engine.progress import Progress
from nanochat.sanitize import sanitize_line
from nanochat.ui import formatting as fmt
from nanochat.ui.actions import ACTIONS, Action, find
from nanochat.ui.lines import LinesWidget
from nanochat.ui.terminal import MIN_COLUMNS, MIN_ROWS

if TYPE_CHECKING:
    from nanochat.ui.app import NanochatApp

BAR_WIDTH = 32
BETWEEN_KEYS = "   "
ALWAYS_SHOWN = ("help", "command_palette")
"""They lead to all others."""


@dataclass(frozen=True, slots=True)
class LoadState:
    """Where the model stands: loading, failed, or ready."""

    progress: Progress | None = None
    error: str | None = None
    model: str | None = None
    """``SmolLM2-135M-Instruct · cpu int4 native · kv bfloat16`` once it is ready."""


def amount(progress: Progress) -> str:
    """``41.2 MB of 98.3 MB``, ``3 of 30``, or nothing when the length isn't known."""
    if not progress.total:
        return ""
    if progress.unit == "B":
        return f"{fmt.size(progress.done)} of {fmt.size(progress.total)}"
    return f"{fmt.count(progress.done)} of {fmt.count(progress.total)}"


def welcome(state: LoadState, actions: Sequence[Action] = ACTIONS, who: str = "engine") -> Content:
    """What an empty chat says; ``who``: what answers."""
    title = Content.styled("nanochat", "bold $accent")
    lines = [title, Content.styled(f"many chats at once, one {who}", "$muted"), Content("")]
    if state.error is not None:
        lines += [
            Content.styled(
                f"There is no {'server' if who == 'server' else 'model'} to answer", "bold $error"
            ),
            Content(sanitize_line(state.error, 2_000)),
        ]
        quits = f"{find('quit', actions).key_label} quits."
        way_out = f"{ways_out(is_over_server=who == 'server')}, {quits}"
        lines += [Content(""), Content.styled(way_out, "$muted")]
    elif state.model is None:
        progress = state.progress or Progress("Starting")
        lines.append(Content(f"{sanitize_line(progress.stage)}…"))
        if progress.total:
            filled, space = fmt.bar(progress.done / progress.total, BAR_WIDTH)
            lines.append(Content.styled(filled, "$accent") + Content.styled(space, "$line"))
            lines.append(Content.styled(amount(progress), "$muted"))
        lines += [
            Content(""),
            Content.styled("You can write already; it is sent when the model is ready.", "$muted"),
        ]
    else:
        lines += [Content(state.model), Content("")]
        shown = [find(id, actions) for id in ("new_chat", "fork_chat", "stop", "again", "help")]
        lines.append(Content("   ").join(map(_key, shown)))
    return Content("\n").join(lines)


def ways_out(*, is_over_server: bool) -> str:
    """What can be done when nothing answers."""
    another = "asks the server for another" if is_over_server else "loads another"
    return f"/model tries again, /model NAME {another}"


class Welcome(Static):
    """Shown in a chat without messages."""

    def __init__(self, state: LoadState) -> None:
        super().__init__("", markup=False)
        self._state = state

    def on_mount(self) -> None:
        self.show(self._state)

    def show(self, state: LoadState) -> None:
        """Bring up to date."""
        self._state = state
        who = "server" if is_over_server(self) else "engine"
        self.update(welcome(state, actions_of(self), who))


NOT_SAVED = "not saved"


def header(state: LoadState, busy: str, width: int, *, is_saved: bool = True, who: str = "engine") -> Content:
    """Name and model on the left, what the engine is doing on the right.

    Before that stands whether chats can't be saved, as long as that is so.
    """
    left = Content.styled("nanochat", "bold $accent") + Content.styled(f"   {state.model or ''}", "$muted")
    right = Content.styled(busy, "$muted")
    if state.error is not None:
        right = Content.styled("no server" if who == "server" else "no model", "$error")
    elif state.model is None:
        progress = state.progress or Progress("Starting")
        share = f" {fmt.percent(progress.done, progress.total)}" if progress.total else ""
        right = Content.styled(sanitize_line(progress.stage) + share, "$accent")
    if not is_saved:
        right = Content.styled(NOT_SAVED, "bold $warning") + ("   " if right.plain else "") + right
    left = left.truncate(max(0, width - cell_len(right.plain) - 1), ellipsis=True)
    return left + " " * (width - cell_len(left.plain) - cell_len(right.plain)) + right


class Header(LinesWidget):
    """The line on top."""

    DEFAULT_CSS = "Header { height: 1; }"

    def __init__(self) -> None:
        super().__init__()
        self._state = LoadState()
        self._busy = ""
        self._is_saved = True

    def show(self, state: LoadState, busy: str) -> None:
        """Bring up to date."""
        self._state, self._busy = state, busy
        self._draw()

    def show_saved(self, is_saved: bool) -> None:
        """Say whether chats are being saved."""
        self._is_saved = is_saved
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        width = self.content_size.width
        who = "server" if is_over_server(self) else "engine"
        self.show_lines([header(self._state, self._busy, width, is_saved=self._is_saved, who=who)])


class TooSmall(Static):
    """Covers a screen that is too small for anything else, and says so."""

    def __init__(self) -> None:
        super().__init__("", markup=False)
        self.display = False

    def measure(self, size: Size) -> None:
        """The terminal has this size now."""
        self.display = size.width < MIN_COLUMNS or size.height < MIN_ROWS
        if self.display:
            needed = f"{MIN_COLUMNS} × {MIN_ROWS}"
            self.update(
                f"Too small: {size.width} × {size.height}.\nEnlarge the terminal to {needed}; nothing is lost."
            )


class KeyBar(Widget):
    """The most used keys, as many as fit; each can be clicked."""

    DEFAULT_CSS = "KeyBar { height: 1; }"
    can_focus = False

    def render(self) -> Content:
        keys = [
            Content.from_markup(
                f"[@click=screen.do('{action.id}')][b]$key[/b] $label[/]",
                key=action.key_label,
                label=action.footer,
            )
            for action in fitting_keys(actions_of(self), self.content_size.width)
        ]
        return Content(BETWEEN_KEYS).join(keys)


def fitting_keys(actions: Sequence[Action], width: int) -> list[Action]:
    """The actions to show in a key bar of this width: the help in any case, the first ones of the rest."""
    shown = [action for action in actions if action.footer and action.key_label]
    room = width + len(BETWEEN_KEYS)
    chosen: set[str] = set()
    for action in sorted(shown, key=lambda action: action.id not in ALWAYS_SHOWN):
        room -= cell_len(f"{action.key_label} {action.footer}{BETWEEN_KEYS}")
        if room < 0:
            break
        chosen.add(action.id)
    return [action for action in shown if action.id in chosen]


def _key(action: Action) -> Content:
    return Content.styled(action.key_label, "$accent") + Content.styled(f" {action.footer}", "$muted")


def is_over_server(widget: Widget) -> bool:
    """Whether the widget's app chats with a server instead of an engine of its own."""
    return bool(getattr(widget.app, "is_over_server", False))


def actions_of(widget: Widget | Screen[Any]) -> tuple[Action, ...]:
    """The actions with the keys that hold in the widget's app."""
    app: NanochatApp = widget.app  # type: ignore[assignment]
    return app.actions
