"""The row of tabs: each with a badge that says what its chat is doing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from textual import events
from textual.app import ComposeResult
from textual.containers import HorizontalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from nanochat.ui.chat import Chat, Phase, short_title
from nanochat.ui.theme import tab_colour

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


def tab_label(chat: Chat, number: int, slot: int, is_active: bool, is_marked: bool = False) -> Content:
    """``◐ 2 Email 43 % ✓``; the tick marks a tab that broadcasts go to."""
    glyph, style = badge(chat)
    suffix = ""
    if chat.phase is Phase.PREFILL and chat.prefill_progress is not None:
        suffix = f" {100 * chat.prefill_progress:.0f} %"
    title_style = "bold" if is_active or chat.is_unread else "$muted"
    return (
        Content.styled(f"{glyph} ", style)
        + Content.styled(f"{number} ", f"bold {tab_colour(slot)}")
        + Content.styled(short_title(chat.title), title_style)
        + Content.styled(suffix, style)
        + Content.styled(" ✓" if is_marked else "", "bold $accent")
    )


class Tab(Static):
    """One tab."""

    def __init__(self, chat_id: int) -> None:
        super().__init__("", classes="tab", markup=False)
        self.chat_id = chat_id

    def on_click(self) -> None:
        self.post_message(TabBar.Picked(self.chat_id))


class NewTab(Static):
    """The ``+`` at the end."""

    def __init__(self) -> None:
        super().__init__("+", classes="tab new-tab", markup=False)

    def on_click(self) -> None:
        self.post_message(TabBar.NewWanted())


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
        tabs = {tab.chat_id: tab for tab in self.query(Tab)}
        has_changed = False
        for number, chat in enumerate(chats, 1):
            if (tab := tabs.get(chat.id)) is None:
                continue
            is_active = chat.id == active_id
            label = tab_label(chat, number, slots[chat.id], is_active, chat.id in marked)
            before = tab.content
            if not (isinstance(before, Content) and before.is_same(label)):
                tab.update(label)
                has_changed |= len(str(before)) != len(label)
            if is_active != tab.has_class("-active"):
                tab.set_class(is_active, "-active")
                has_changed = True
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
        self.scroll_relative(x=8, animate=False)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.scroll_relative(x=-8, animate=False)
