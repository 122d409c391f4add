"""The row of tabs: each with a badge that says what its chat is doing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal, HorizontalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from nanochat.ui.chat import Chat, Phase
from nanochat.ui.theme import tab_colour
from nanochat.ui.titles import short_title

_BADGES = {
    Phase.LOADING: ("◌", "$muted"),
    Phase.SUBMITTED: ("◌", "$muted"),
    Phase.QUEUED: ("◌", "$muted"),
    Phase.PREFILL: ("◐", "$accent"),
    Phase.DECODE: ("●", "$success"),
    Phase.PREEMPTED: ("◍", "$warning"),
}


def badge(chat: Chat) -> tuple[str, str]:
    """A tab's glyph and its style."""
    if chat.is_busy:
        return _BADGES.get(chat.phase, ("◌", "$muted"))
    if chat.has_failed:
        return "✗", "$error"
    if chat.is_unread:
        return "◆", "$primary"
    return ("○", "$muted") if chat.root.children else ("✎", "$muted")


@dataclass(frozen=True, slots=True)
class TabState:
    """All that a tab shows."""

    badge: tuple[str, str]
    number: int
    slot: int
    title: str
    suffix: str
    is_active: bool
    is_unread: bool
    is_marked: bool

    def label(self) -> Content:
        """``◐ 2 Email 43 % ✓``; the tick marks a tab that broadcasts go to."""
        glyph, style = self.badge
        return (
            Content.styled(f"{glyph} ", style)
            + Content.styled(f"{self.number} ", f"bold {tab_colour(self.slot)}")
            + Content.styled(
                short_title(self.title), "bold" if self.is_active or self.is_unread else "$muted"
            )
            + Content.styled(self.suffix, style)
            + Content.styled(" ✓" if self.is_marked else "", "bold $accent")
        )


def tab_state(chat: Chat, number: int, slot: int, is_active: bool, is_marked: bool = False) -> TabState:
    """What a chat's tab shows."""
    is_reading = chat.phase is Phase.PREFILL and chat.prefill_progress is not None
    suffix = f" {100 * (chat.prefill_progress or 0.0):.0f} %" if is_reading else ""
    return TabState(badge(chat), number, slot, chat.title, suffix, is_active, chat.is_unread, is_marked)


class Tab(Static):
    """One tab."""

    def __init__(self, chat_id: int) -> None:
        super().__init__("", classes="tab", markup=False)
        self.chat_id = chat_id
        self._state: TabState | None = None

    def show(self, state: TabState) -> bool:
        """Bring the label up to date; returns whether the tab now takes other room, or is one that is in view."""
        if state == self._state:
            return False
        was_active = self._state is not None and self._state.is_active
        self._state = state
        before, label = self.content, state.label()
        old_width = before.cell_length if isinstance(before, Content) else -1
        has_moved = label.cell_length != old_width  # else it is drawn anew, and nothing else laid out
        self.update(label, layout=has_moved)
        self.set_class(state.is_active, "-active")
        return has_moved or state.is_active != was_active

    @property
    def is_unread(self) -> bool:
        """Whether its chat has an answer that nobody has seen."""
        return self._state is not None and self._state.is_unread

    def on_click(self) -> None:
        self.post_message(TabBar.Picked(self.chat_id))


class NewTab(Static):
    """The ``+`` at the end."""

    def __init__(self) -> None:
        super().__init__("+", classes="tab new-tab", markup=False)

    def on_click(self) -> None:
        self.post_message(TabBar.NewWanted())


class EdgeMark(Static):
    """How many tabs are hidden beyond an end of the row; not there when none is. A click brings them nearer."""

    def __init__(self, direction: int) -> None:
        """``direction``: -1 for the left end, 1 for the right one."""
        super().__init__("", classes="edge-mark", markup=False)
        self._direction = direction
        self.display = False

    def show(self, hidden: Sequence[Tab]) -> None:
        """Tell their number; in colour if one of them has something new."""
        text = f"‹{len(hidden)}" if self._direction < 0 else f"{len(hidden)}›"
        self.update(
            Content.styled(text, "bold $primary" if any(tab.is_unread for tab in hidden) else "$muted")
        )
        self.display = bool(hidden)

    def on_click(self) -> None:
        self.post_message(TabStrip.ScrollWanted(self._direction))


class TabBar(HorizontalScroll):
    """All tabs in order."""

    can_focus = False

    @dataclass
    class Picked(Message):
        """A tab was clicked."""

        chat_id: int

    class NewWanted(Message):
        """The ``+`` was clicked."""

    def __init__(self) -> None:
        super().__init__()
        self._in_view: Tab | None = None
        """The tab to keep in view; None once the user has scrolled."""

    def compose(self) -> ComposeResult:
        yield NewTab()

    def add(self, chat_id: int) -> None:
        """A tab at the end."""
        self.mount(Tab(chat_id), before=self.query_one(NewTab))

    def put_in_order(self, chat_ids: Sequence[int]) -> None:
        """Put the tabs in this order."""
        places = {chat_id: place for place, chat_id in enumerate(chat_ids)}
        self.sort_children(
            key=lambda tab: places.get(tab.chat_id, 0) if isinstance(tab, Tab) else len(places)
        )

    def take_away(self, chat_id: int) -> None:
        """The chat was closed."""
        for tab in self.query(Tab):
            if tab.chat_id == chat_id:
                tab.remove()

    def show(
        self, chats: Sequence[Chat], slots: dict[int, int], active_id: int, marked: Collection[int] = ()
    ) -> None:
        """Bring every label up to date."""
        tabs = {tab.chat_id: tab for tab in self.children if isinstance(tab, Tab)}
        has_changed = False
        for number, chat in enumerate(chats, 1):
            if (tab := tabs.get(chat.id)) is not None:
                state = tab_state(chat, number, slots[chat.id], chat.id == active_id, chat.id in marked)
                has_changed |= tab.show(state)
        # Any label may have grown and pushed the active tab out of view.
        if has_changed and (active := tabs.get(active_id)) is not None:
            self._in_view = active
            self.call_after_refresh(self._bring_into_view)

    def _bring_into_view(self) -> None:
        """At once, and whichever tab it is by now: an older wish that waited would win otherwise."""
        tab = self._in_view
        if tab is not None and tab.parent is self:
            self.scroll_to_widget(tab, animate=False, force=True, immediate=True)

    def on_resize(self) -> None:
        self.call_after_refresh(self._bring_into_view)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.scroll_by(8)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.scroll_by(-8)

    def scroll_by(self, columns: int) -> None:
        """The user looks at other tabs: the one in view no longer has to be seen."""
        self._in_view = None
        self.scroll_relative(x=columns, animate=False)

    def hidden(self) -> tuple[list[Tab], list[Tab]]:
        """Tabs that are not to be seen whole: beyond the left end, and beyond the right one."""
        view = self.scrollable_content_region
        tabs = [tab for tab in self.children if isinstance(tab, Tab)]
        return (
            [tab for tab in tabs if tab.region.x < view.x],
            [tab for tab in tabs if tab.region.x >= view.x and tab.region.right > view.right],
        )


class TabStrip(Horizontal):
    """The row of tabs, and at its ends how many are hidden there."""

    @dataclass
    class ScrollWanted(Message):
        """A mark was clicked."""

        direction: int

    def __init__(self, bar: TabBar) -> None:
        super().__init__()
        self._bar = bar
        self._left, self._right = EdgeMark(-1), EdgeMark(1)
        self._shown: object = None

    def compose(self) -> ComposeResult:
        yield self._left
        yield self._bar
        yield self._right

    def on_mount(self) -> None:
        for name in ("scroll_x", "virtual_size", "size"):
            self.watch(self._bar, name, self.look_soon, init=False)

    def look_soon(self) -> None:
        """Bring the marks up to date once the tabs have their places."""
        self.call_after_refresh(self._look)

    def _look(self) -> None:
        # With room for all of them, the marks themselves are what hides one: they go.
        fits = self._bar.virtual_size.width <= self.size.width
        left, right = ([], []) if fits else self._bar.hidden()
        shown = [[(tab.chat_id, tab.is_unread) for tab in tabs] for tabs in (left, right)]
        if shown != self._shown:
            self._shown = shown
            self._left.show(left)
            self._right.show(right)

    def on_tab_strip_scroll_wanted(self, event: ScrollWanted) -> None:
        event.stop()
        width = max(8, self._bar.size.width - 8)
        self._bar.scroll_by(event.direction * width)
