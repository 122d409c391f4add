"""The live panel: what the engine is doing, drawn from snapshots of its statistics.

:func:`panel` and :func:`one_line` are pure; the widgets below them only hold the latest snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.cells import cell_len
from textual.content import Content

from nanochat.backend.stats import BackendStats, share
from nanochat.engine.stats import BlockMap, SlowStep
from nanochat.sanitize import sanitize_line
from nanochat.ui import block_map as blocks
from nanochat.ui import formatting as fmt
from nanochat.ui.chrome import is_over_server
from nanochat.ui.lines import LinesWidget
from nanochat.ui.theme import tab_colour

HISTORY = 240
"""Samples kept for sparklines."""
FLASH = 6
"""Refreshes for which a new preemption stays marked."""
SPARK_WIDTH = 12
MIN_MAP_HEIGHT = 3
ROOMY = 96
"""Cells from which on the one line has wider gaps."""
WIDE = 34
"""Cells from which on there is room for sparklines and every column."""
CONTEXT_WARNING = 0.8
"""Share of the context from which on it counts as nearly full."""


@dataclass(frozen=True, slots=True)
class TabRow:
    """One chat's line in the panel."""

    number: int
    slot: int
    """Which tab colour it has."""
    state: str
    context_tokens: int
    ttft_s: float | None
    rate: float | None
    is_active: bool = False
    is_alarming: bool = False
    """Whether the state deserves a second look: preempted or failed."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the panel shows at one moment."""

    stats: BackendStats
    block_map: BlockMap | None
    slots: Mapping[int, int]
    """Tab colour by request id."""
    tabs: tuple[TabRow, ...]
    context_tokens: int
    """Of the chat in view."""
    context_limit: int | None


@dataclass(slots=True)
class History:
    """Past samples for sparklines, and how long a preemption still flashes."""

    decode: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    prefill: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    preemptions: int | None = None
    """As they were last told."""
    flash: int = 0
    is_still: bool = False
    """Whether nothing is to flash, because the user wants little motion."""
    lost: frozenset[int] = frozenset()
    """Blocks that the newest preemptions took from their chats, as long as they flash."""
    _waiting: frozenset[int] = frozenset()
    """Requests that were preempted in the last snapshot."""
    _owner: tuple[int, ...] = ()
    """Owners of the blocks in the last snapshot."""

    def record(self, stats: BackendStats) -> None:
        """Add a sample."""
        self.decode.append(stats.decode_tok_s or 0.0)
        self.prefill.append(stats.prefill_tok_s or 0.0)
        before, now = self.preemptions, stats.preemptions
        is_new = before is not None and now is not None and now > before
        self.flash = FLASH if is_new else max(0, self.flash - 1)
        if self.is_still:
            self.flash = 0
        self.preemptions = now if now is not None else before

    def watch(self, snapshot: Snapshot) -> None:
        """Find the blocks that requests have lost since the last snapshot by being preempted."""
        preempted = frozenset(row.request_id for row in snapshot.stats.requests if row.state == "preempted")
        new = preempted - self._waiting
        if self.flash == 0:
            self.lost = frozenset()
        elif new:
            self.lost = frozenset(block for block, owner in enumerate(self._owner) if owner in new)
        self._waiting = preempted
        self._owner = snapshot.block_map.owner if snapshot.block_map is not None else ()


def panel(
    snapshot: Snapshot, history: History, width: int, height: int, has_colours: bool = True
) -> list[Content]:
    """At most ``height`` lines of ``width`` cells. Map and chats share what height the rest leaves.

    Without colours, the map's blocks bear the numbers of their tabs.
    """
    gap = [Content("")]
    head = _slow_lines(snapshot.stats, width) + _kv_lines(snapshot, width)
    middle = [
        *gap,
        *_counter_lines(snapshot.stats, history, width),
        *gap,
        *_speed_lines(snapshot.stats, history, width),
        *gap,
    ]
    foot = gap + _context_lines(snapshot, width)
    room = height - len(head) - len(middle) - len(foot) - 2  # the map's legend, and the chats' heading
    num_tabs = min(len(snapshot.tabs), max(1, room - MIN_MAP_HEIGHT))
    tabs = _tab_lines(snapshot.tabs, num_tabs, width)
    numbers = None if has_colours else {tab.slot: tab.number for tab in reversed(snapshot.tabs)}
    kv_map = _map_lines(snapshot, history, width, room - num_tabs, numbers)
    return (head + kv_map + middle + tabs + foot)[:height]


def _slow_text(slow: SlowStep) -> str:
    return f"one step has taken {slow.seconds:.0f} s"


def _slow_lines(stats: BackendStats, width: int) -> list[Content]:
    """What the engine is at when it seems to hang."""
    if stats.slow_step is None:
        return []
    text = f"{_slow_text(stats.slow_step)} so far: {sanitize_line(stats.slow_step.what, 200)}"
    return [*Content.styled(text, "$warning").wrap(max(1, width)), Content("")]


def one_line(snapshot: Snapshot, history: History, width: int) -> Content:
    """The most telling figures on one line, as many as fit."""
    stats = snapshot.stats
    filled, space = fmt.bar(stats.kv_share or 0.0, 6)
    context = _context_share(snapshot)
    slow = [] if stats.slow_step is None else [Content.styled(_slow_text(stats.slow_step), "$warning")]
    parts = [
        *slow,
        _label("KV ") + Content.styled(filled, "$primary") + Content.styled(space, "$line")
        + f" {fmt.share(stats.kv_share)}",
        Content.styled(fmt.rate(stats.decode_tok_s), "bold") + _label(" tok/s"),
        _label("context ") + Content.styled(fmt.share(context), _context_style(context)),
        _label("TTFT ") + fmt.duration(stats.ttft_p50_s),
        _label("hits ") + fmt.share(stats.hit_share),
        _label("preempted ") + Content.styled(fmt.count(stats.preemptions), _flash_style(history)),
    ]  # fmt: skip
    line = Content("")
    for part in parts:
        longer = (
            line + Content.styled("  ·  " if width >= ROOMY else " · ", "$faint") + part if line else part
        )
        if cell_len(longer.plain) <= width:
            line = longer
    return line


def _label(text: str) -> Content:
    return Content.styled(text, "$muted")


def _spread(left: Content, right: Content, width: int) -> Content:
    """Left and right parts of a line, the left one cut when both don't fit."""
    space = width - cell_len(left.plain) - cell_len(right.plain)
    if space < 1:
        left = left.truncate(max(0, width - cell_len(right.plain) - 1), ellipsis=True)
        space = max(1, width - cell_len(left.plain) - cell_len(right.plain))
    return left + " " * space + right


def _bar_line(fraction: float, width: int, style: str) -> Content:
    filled, space = fmt.bar(fraction, width)
    return Content.styled(filled, style) + Content.styled(space, "$line")


def _flash_style(history: History) -> str:
    return "bold $background on $warning" if history.flash else ""


def _kv_lines(snapshot: Snapshot, width: int) -> list[Content]:
    stats = snapshot.stats
    has_counts = stats.kv_total is not None
    used = Content(f"{fmt.count(stats.kv_used)} / {fmt.count(stats.kv_total)}" if has_counts else "")
    percent = Content.styled(fmt.share(stats.kv_share).rjust(6), "bold")
    fraction = stats.kv_share or 0.0
    style = "$warning" if fraction > 0.9 else "$primary"
    name = _label(f"KV {stats.kv_unit if has_counts else 'cache'}" if width >= WIDE else "KV")
    return [_spread(name, used + percent, width), _bar_line(fraction, width, style)]


def _map_lines(
    snapshot: Snapshot, history: History, width: int, height: int, numbers: Mapping[int, int] | None
) -> list[Content]:
    if snapshot.block_map is None or height < 1:
        return [_label(snapshot.stats.source).truncate(width)] if snapshot.stats.source and height > 0 else []
    total = len(snapshot.block_map.owner)
    size = blocks.group_size(total, width * height)
    found = blocks.cells(snapshot.block_map, snapshot.slots, width * height, history.lost)
    mark = "■" if numbers is None else "1"
    unit = f"{mark} = {fmt.plural(size, 'block')}" if width >= WIDE else f"{mark} = {size}"
    gap = "  " if width >= WIDE else " "
    legend = gap.join((unit, "▣ shared", "□ cached"))
    return [*blocks.draw(found, width, numbers), _label(legend).truncate(width)]


def _counter_lines(stats: BackendStats, history: History, width: int) -> list[Content]:
    hits = Content.styled(fmt.share(stats.hit_share), "bold")
    preempted = Content.styled(fmt.count(stats.preemptions), _flash_style(history) or "bold")
    left, right = _label("Prefix hits  ") + hits, _label("Preempted  ") + preempted
    if width < WIDE:
        return [_spread(_label("Prefix hits"), hits, width), _spread(_label("Preempted"), preempted, width)]
    return [_spread(left, right, width)]


def _speed_lines(stats: BackendStats, history: History, width: int) -> list[Content]:
    spark = SPARK_WIDTH if width >= WIDE else 0
    ttft = Content(fmt.duration(stats.ttft_p50_s))
    rows = [("TTFT p50", ttft, fmt.sparkline(stats.ttft_s, spark), "$secondary 60%")]
    rows += [("     p95", Content(fmt.duration(stats.ttft_p95_s)), "", "")]
    rows += [
        (
            name,
            Content(fmt.rate(value)) + (_label(" tok/s") if value else ""),
            fmt.sparkline(past, spark),
            style,
        )
        for name, value, past, style in (
            ("Decode", stats.decode_tok_s, history.decode, "$success 60%"),
            ("Prefill", stats.prefill_tok_s, history.prefill, "$accent 60%"),
        )
    ]
    return [_speed_line(*row, spark, width) for row in rows]


def _speed_line(name: str, value: Content, spark: str, style: str, spark_width: int, width: int) -> Content:
    left = _spread(_label(name), value, width - spark_width - (2 if spark_width else 0))
    return left + ("  " if spark_width else "") + Content.styled(spark.rjust(spark_width), style)


def _tab_lines(tabs: tuple[TabRow, ...], limit: int, width: int) -> list[Content]:
    if len(tabs) > limit:  # those around the one in view
        active = next((index for index, tab in enumerate(tabs) if tab.is_active), 0)
        first = max(0, min(active - limit // 2, len(tabs) - limit))
        tabs = tabs[first : first + limit]
    wide = width >= WIDE
    columns = f"{'ctx':>6}{'TTFT':>8}{'tok/s':>6}" if wide else f"{'tok/s':>6}"
    lines = [_spread(_label("chat"), _label(columns), width)]
    for tab in tabs:
        figures = (
            f"{fmt.count(tab.context_tokens) if tab.context_tokens else fmt.MISSING:>6}{fmt.duration(tab.ttft_s):>8}"
            if wide
            else ""
        )
        figures += f"{fmt.rate(tab.rate):>6}"
        number = Content.styled(f"{tab.number:>2} ", f"bold {tab_colour(tab.slot)}")
        state = Content.styled(
            tab.state, "$warning" if tab.is_alarming else "" if tab.is_active else "$muted"
        )
        lines.append(
            _spread(number + state, Content.styled(figures, "" if tab.is_active else "$muted"), width)
        )
    return lines


def _context_share(snapshot: Snapshot) -> float | None:
    # Nothing is known of a chat that was never sent, or of which a server has told nothing.
    return share(snapshot.context_tokens, snapshot.context_limit or 0) if snapshot.context_tokens else None


def _context_style(part: float | None) -> str:
    return "bold $warning" if part is not None and part >= CONTEXT_WARNING else ""


def _context_amount(snapshot: Snapshot) -> Content:
    style = _context_style(_context_share(snapshot))
    amount = f"{fmt.count(snapshot.context_tokens or None)} / {fmt.count(snapshot.context_limit)}"
    return Content.styled(amount, style)


def _context_lines(snapshot: Snapshot, width: int) -> list[Content]:
    part = _context_share(snapshot) or 0.0
    style = "$warning" if part >= CONTEXT_WARNING else "$secondary"
    title = _label("Context of this chat" if width >= WIDE else "Context")
    return [_spread(title, _context_amount(snapshot), width), _bar_line(part, width, style)]


class StatsPanel(LinesWidget):
    """The panel beside the chat."""

    DEFAULT_CSS = "StatsPanel { height: 1fr; }"

    def __init__(self, history: History) -> None:
        super().__init__()
        self._history = history
        self._snapshot: Snapshot | None = None

    def show(self, snapshot: Snapshot) -> None:
        """Draw this one."""
        self._snapshot = snapshot
        self._history.watch(snapshot)
        self._redraw()

    def on_mount(self) -> None:
        self._history.is_still = self.app.animation_level == "none"

    def on_resize(self) -> None:
        self._redraw()

    def _redraw(self) -> None:
        width, height = self.content_size
        if self._snapshot is not None:
            has_colours = not self.app.no_color
            self.show_lines(panel(self._snapshot, self._history, width, height, has_colours))
        else:
            until = "the server has answered" if is_over_server(self) else "the model is loaded"
            self.show_lines(_label(f"Statistics appear here once {until}.").wrap(max(1, width)))


class StatsLine(LinesWidget):
    """The panel's stand-in on a narrow screen."""

    DEFAULT_CSS = "StatsLine { height: 1; }"

    def __init__(self, history: History) -> None:
        super().__init__()
        self._history = history
        self._snapshot: Snapshot | None = None

    def show(self, snapshot: Snapshot) -> None:
        """Draw this one."""
        self._snapshot = snapshot
        self.show_lines([one_line(snapshot, self._history, self.content_size.width)])

    def on_resize(self) -> None:
        if self._snapshot is not None:
            self.show(self._snapshot)
