"""The only place that uses what Textual doesn't promise to keep. Its test fails when an update moves it."""

from __future__ import annotations

import asyncio
import string
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from functools import partial
from itertools import pairwise
from typing import Any, Self

from rich.traceback import Traceback
from textual import events
from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual._compositor import ChopsUpdate, Compositor
from textual._styles_cache import StylesCache
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.content import Content
from textual.driver import Driver
from textual.geometry import Region, Size
from textual.keys import Keys
from textual.message import Message
from textual.screen import UPDATE_PERIOD, Screen
from textual.scrollbar import ScrollBar, ScrollBarRender
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import TextArea

from nanochat.ui.paste_guard import PasteGuard, show

_AltDigit = Enum("_AltDigit", {f"ALT_{digit}": f"alt+{digit}" for digit in range(10)})  # type: ignore[misc]
_WRAP = Content._wrap_and_format
_INIT_TIMER = Timer.__init__
_FEED = XTermParser.feed
_KEYS: dict[str, Any] = ANSI_SEQUENCES_KEYS  # type: ignore[assignment]


def let_alt_digits_through() -> None:
    """Have Alt and a digit arrive as such from terminals that send Escape and the digit: most of them.

    Textual takes the pair for what one terminal on macOS means by it, such as "¡" for Alt 1, which would be
    written into the prompt.
    """
    for key in _AltDigit:
        _KEYS[f"\x1b{key.value[-1]}"] = (key,)


def let_keys_follow_escape() -> None:
    """Have Escape and a control key arrive as the two when they come as one, from a quick hand or a slow line.

    Textual knows no such sequence, and writes "^" for its Escape.
    """
    for letter in string.ascii_lowercase:
        control = chr(ord(letter) - ord("a") + 1)
        if control not in "\t\r":
            _KEYS.setdefault(f"\x1b{control}", (Keys.Escape, Keys(f"ctrl+{letter}")))


def let_pastes_be_pastes() -> None:
    """Have nothing of a pasted text arrive as keys: see `paste_guard`."""
    XTermParser.feed = _feed_guarded  # type: ignore[method-assign,assignment]


def _feed_guarded(parser: XTermParser, data: str) -> Iterable[Message]:
    if not data:  # the end of all input
        return _FEED(parser, data)
    guard: PasteGuard | None = getattr(parser, "paste_guard", None)
    if guard is None:
        guard = PasteGuard()
        parser.paste_guard = guard  # type: ignore[attr-defined]
    return _feed_hidden(parser, guard.hide(data))


def _feed_hidden(parser: XTermParser, data: str) -> Iterator[Message]:
    for message in _FEED(parser, data) if data else ():
        if isinstance(message, events.Paste):
            message.text = show(message.text)
        yield message


def let_text_have_no_room() -> None:
    """Have a text be drawn where there is no room for a single character, as in a window a few columns wide.

    Textual ends the app with an error there: it divides the text into lines of no characters.
    """
    Content._wrap_and_format = _wrap_into_one_column_at_least  # type: ignore[method-assign,assignment]


def _wrap_into_one_column_at_least(content: Content, width: int, *args: Any, **options: Any) -> Any:
    return _WRAP(content, max(1, width), *args, **options)


def let_single_timers_come() -> None:
    """Have a timer that fires once fire, however late.

    Textual leaves out the ticks whose time has passed. Where its thread has to wait for longer than the timer's time
    between two of its lines, on a machine that has more to do, that is the only one: a notice stayed for ever, and
    drafts were saved no more.
    """
    Timer.__init__ = _init_timer  # type: ignore[method-assign,assignment]


def _init_timer(timer: Timer, *args: Any, **options: Any) -> None:
    if options.get("repeat") == 0:
        options["skip"] = False
    _INIT_TIMER(timer, *args, **options)


def write_to_terminal(app: App[Any], sequence: str) -> None:
    """Send a control sequence in step with the screen's own output; nothing without a terminal.

    Textual's public API can send OSC 52, but not wrapped for tmux.
    """
    if app._driver is not None:
        app._driver.write(sequence)


def lasting_driver(driver: type[Driver], end: Callable[[], object]) -> type[Driver]:
    """Textual's class for the terminal, made fit for what comes upon it; another one (a browser's) as it is.

    ``end`` is called, on any thread, when the terminal is gone.
    """
    if sys.platform == "win32" or driver is not LinuxDriver:
        return driver
    vars(linux_driver)["getincrementaldecoder"] = _decoder_for
    return type("LastingDriver", (_LastingDriver,), {"end": staticmethod(end)})


if sys.platform != "win32":
    from textual.drivers import linux_driver
    from textual.drivers.linux_driver import LinuxDriver

    class _Decoder:
        """Decodes what is typed. Textual's own ends the app with the first byte that isn't UTF-8."""

        def __init__(self, encoding: str) -> None:
            self._decoder = getincrementaldecoder(encoding)("replace")

        def decode(self, data: bytes, final: bool = False) -> str:
            """As codecs do.

            Raises:
                EOFError: nothing was read where something was to be read: the input has ended.
            """
            if not data and not final:
                raise EOFError
            return self._decoder.decode(data, final)

    def _decoder_for(encoding: str) -> Callable[[], _Decoder]:
        return partial(_Decoder, encoding)

    class _LastingDriver(LinuxDriver):
        """Ends the app with its input, and stops and goes on (SIGTSTP, SIGCONT) on the event loop.

        Textual would read the end of a closed terminal for ever. And it acts within the signal's handler, which may
        have come upon code that holds the lock of the queue to the terminal: it would wait for itself. As it clears
        the screen but draws only what changes afterwards, the whole screen is drawn again here. Of a stop that nobody
        can notice (SIGSTOP) it would begin a second time, with threads beside those that it has, and hang when it
        ends.
        """

        end: Callable[[], object]

        def __init__(self, app: App[Any], **options: Any) -> None:
            self._loop = asyncio.get_running_loop()  # first: the signals may come before this is over
            super().__init__(app, **options)

        def _sigtstp_application(self, *_: object) -> None:
            self._soon(self._stop)

        def _sigcont_application(self, *_: object) -> None:
            self._soon(self._go_on)

        def _soon(self, act: Callable[[], object]) -> None:
            with suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(act)

        def _stop(self) -> None:
            if not self._must_signal_resume:  # the terminal is still ours
                super()._sigtstp_application()

        def _go_on(self) -> None:
            if not self._must_signal_resume and self._auto_restart:
                self.suspend_application_mode()  # another program may have had it meanwhile
            super()._sigcont_application()
            self._app.refresh(layout=True)

        def _run_input_thread(self) -> None:
            try:
                self.run_input_thread()
            except (EOFError, OSError):
                self.end()
            except BaseException:
                self._app.call_later(self._app.panic, Traceback())


class LaidOutOnce(Widget):
    """A container whose screen isn't laid out a second time because of the size it was given by the first.

    Where scroll bars come or go, Textual asks for that by itself.
    """

    def _size_updated(
        self, size: Size, virtual_size: Size, container_size: Size, layout: bool = True
    ) -> bool:
        return super()._size_updated(size, virtual_size, container_size, layout=False)


class Growing(Widget):
    """Lines that stay as they are drawn when others follow them. For widgets without a border or children."""

    def _size_updated(
        self, size: Size, virtual_size: Size, container_size: Size, layout: bool = True
    ) -> bool:
        before = self._size, self.virtual_size, self._container_size
        if size.width != self._size.width:
            return super()._size_updated(size, virtual_size, container_size, layout=False)
        self._layout_cache.clear()
        self._size, self._container_size = size, container_size
        self.set_reactive(Widget.virtual_size, virtual_size)
        return before != (size, virtual_size, container_size)


class _LeanCompositor(Compositor):
    """Draws what has changed, and nothing that lies behind it or beside it.

    Textual has every widget drawn that reaches into the smallest rectangle around all changes: with a line of the
    chat and a figure of the panel these are all there are, each whole.
    """

    def render_partial_update(self) -> ChopsUpdate | None:
        screen = self.size.region
        regions = {region.intersection(screen) for region in self._dirty_regions}
        self._dirty_regions.clear()
        spans = list(self._regions_to_spans(region for region in regions if region))
        if not spans:
            return None
        cuts = self.cuts
        chops: list[dict[int, Strip | None]] = [{} for _ in cuts]
        left: dict[int, set[int]] = {}
        """By row: where the parts begin that nothing has been drawn in yet, and are to be."""
        for y, first, last in spans:
            row = cuts[y]
            chops[y] = dict.fromkeys(row[:-1])
            left.setdefault(y, set()).update(
                start for start, end in pairwise(row) if start < last and end > first
            )
        for widget, (region, clip) in self.visible_widgets.items():  # front to back
            if not left:
                break
            seen = region.intersection(clip)
            self._draw(widget, region, seen, chops, left)
        return ChopsUpdate(chops, spans, [row[1:] for row in cuts])

    def _draw(
        self,
        widget: Widget,
        region: Region,
        seen: Region,
        chops: list[dict[int, Strip | None]],
        left: dict[int, set[int]],
    ) -> None:
        """Draw a widget in those of the parts left that it covers; ``seen``: its part that can be seen."""
        x, end = seen.column_span
        rows = {
            y: starts
            for y in seen.line_range
            if y in left and (starts := sorted(start for start in left[y] if x <= start < end))
        }
        if not rows:
            return
        top = min(rows)
        height = max(rows) + 1 - top
        strips = widget.render_lines(Region(x - region.x, top - region.y, seen.width, height))
        for y, starts in rows.items():
            chop = chops[y]
            strip = strips[y - top] if y - top < len(strips) else Strip([])
            if strip.cell_length < seen.width:  # it has not heard of its new size yet
                strip = strip.extend_cell_length(seen.width, widget.visual_style.rich_style)
            ends = [cut - x for cut in self.cuts[y] if x < cut <= end]
            parts = dict(zip((x, *(x + cut for cut in ends)), strip.divide(ends), strict=False))
            for start in starts:
                chop[start] = parts[start]
            left[y].difference_update(starts)
            if not left[y]:
                del left[y]


class LeanScreen(Screen[None]):
    """A screen of which little changes at a time, but often: what it draws, and how it comes to it, is cheap."""

    def __init__(self) -> None:
        super().__init__()
        self._compositor = _LeanCompositor()
        self._drawn_s = 0.0
        """When it was last drawn, by the monotonic clock."""

    def _on_timer_update(self) -> None:
        now_s = time.monotonic()
        if now_s - self._drawn_s < UPDATE_PERIOD / 2:
            return  # a late drawing, or one at once, has just been: the timer, which goes on, is not to add another
        self._drawn_s = now_s
        super()._on_timer_update()

    async def _on_idle(self, event: events.Idle) -> None:
        """Draw at once what has changed, without a timer, which wakes the thread up again. Textual's own draws the
        rest: what changes again within a sixtieth of a second, or somebody waits for, who counts on that pace.
        """
        has_changed = self._layout_required or self._scroll_required or self._dirty_widgets
        is_due = time.monotonic() - self._drawn_s >= UPDATE_PERIOD
        is_free = self.is_current and not self._callbacks and not self.app._batch_count
        if has_changed and is_due and is_free:
            event.prevent_default()
            self._on_timer_update()


class _LeanScrollBar(ScrollBar):
    """Is drawn anew only if it looks other than before, which a line more of a long text hardly makes it."""

    _look: object = None

    def refresh(
        self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False
    ) -> Self:
        if self.is_attached and not (regions or layout or recompose):
            before, self._look = self._look, self._new_look()
            if self._look == before:
                return self
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    def _new_look(self) -> object:
        bar = self.render()
        if not isinstance(bar, ScrollBarRender):
            return bar
        size = self.size
        drawn = bar.render_bar(size.height, bar.virtual_size, bar.window_size, bar.position, bar.thickness)
        return size, bar.style, drawn.segments


def draw_scroll_bar_seldom(widget: Widget) -> None:
    """Make a vertical scroll bar cheap that goes along with a growing text. To be called when it is mounted."""
    if widget._vertical_scrollbar is None:
        bar = _LeanScrollBar(vertical=True, name="vertical", thickness=widget.scrollbar_size_vertical)
        bar.display = False
        widget._vertical_scrollbar = bar
        widget.app._start_widget(widget, bar)


def follows_end(widget: Widget) -> bool:
    """Whether a widget keeps its end in view, also where what was added has not been scrolled to yet."""
    return widget._anchored and not widget._anchor_released


def let_go(area: TextArea, screen: Screen[Any]) -> None:
    """Have nothing hold a text area that is gone: with its text, styles and drawn lines it is a quarter of a MiB.

    ``screen`` is where it was mounted. That screen's signal and the app's watchers would keep it as long as they
    live themselves.
    """
    screen.text_selection_started_signal.unsubscribe(area)
    for watchers in getattr(area.app, "__watchers", {}).values():
        watchers[:] = [watcher for watcher in watchers if watcher[0] is not area]
    # Colours by cache of drawn lines: a thousand of these, with all their lines, of widgets that may be gone.
    StylesCache.get_inner_outer.cache_clear()
