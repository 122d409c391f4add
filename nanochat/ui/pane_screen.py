"""The screen's parts and the tabs' pages: the workspace as it is seen.

State lives in :class:`Workspace` and its chats; the widgets only show it. What comes from the engine lies in
:mod:`nanochat.ui.chat_screen`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from textual import events
from textual.app import ComposeResult
from textual.timer import Timer

from nanochat.ui.archive import Archive
from nanochat.ui.blank import Blank, BlankHorizontal, BlankSwitcher
from nanochat.ui.bridge import Bridge
from nanochat.ui.chat import Chat, NoteKind
from nanochat.ui.chat_pane import ChatPane, pane_id
from nanochat.ui.chrome import Header, KeyBar, LoadState, TooSmall, Welcome
from nanochat.ui.history_opening import HistoryOpened
from nanochat.ui.stats_panel import History, StatsLine, StatsPanel
from nanochat.ui.tab_bar import TabBar, TabStrip
from nanochat.ui.textual_private import LeanScreen
from nanochat.ui.workspace import Workspace

PANEL_COLUMNS = 96
"""A narrower screen, or one with fewer than ``PANEL_ROWS`` rows, has one line instead of the full panel."""
PANEL_ROWS = 18

DRAFT_S = 0.8
"""What is written in a prompt is saved this long after, with all that has come meanwhile."""

PanelMode = Literal["full", "narrow", "line", "off"]


class PaneScreen(LeanScreen, Blank):
    """Shows the workspace. One for the app."""

    def __init__(self, system: str | None, archive: Archive) -> None:
        super().__init__()
        self.archive = archive
        self.workspace = Workspace(Chat(system=system))
        self.bridge: Bridge | None = None
        self.load_state = LoadState()
        self.system = system
        self.panel_mode: PanelMode | None = None
        """What the user chose; None: what fits."""
        self._history = History()
        # Kept rather than looked up: timers may still fire while the screen is being taken apart.
        self._header = Header()
        self._tab_bar = TabBar()
        self._tab_strip = TabStrip(self._tab_bar)
        self._too_small = TooSmall()
        self._switcher = BlankSwitcher()
        self._panel = StatsPanel(self._history)
        self._stats_line = StatsLine(self._history)
        self._panes: dict[int, ChatPane] = {}
        self._told: dict[str, float] = {}
        """What was told in passing, and until when it stays, by the monotonic clock."""
        self._draft_timer: Timer | None = None

    def compose(self) -> ComposeResult:
        yield self._header
        yield self._tab_strip
        with BlankHorizontal(id="body"):
            with self._switcher:
                yield self._first_pane()  # not later: keys may come before the screen is shown
            yield self._panel
        yield self._stats_line
        yield KeyBar()
        yield self._too_small

    def _first_pane(self) -> ChatPane:
        chat = self.workspace.active
        pane = self._panes[chat.id] = ChatPane(chat, self.workspace.colour(chat), Welcome(self.load_state))
        return pane

    def on_mount(self) -> None:
        self._choose_panel()
        self._tab_bar.add(self.workspace.active.id)
        self.show_active()
        self.archive.open()

    def on_resize(self, event: events.Resize) -> None:
        self._choose_panel()
        self._too_small.measure(event.size)

    # Tabs and panes

    async def open_chat(self, *chats: Chat) -> None:
        """Open chats in tabs, and bring the first into view.

        Only what has its pane is in the workspace: keys may come at any moment until then, and reach what is there.
        """
        await self._add_panes(chats)
        for chat in chats:
            self.workspace.add(chat)
        self.workspace.show(chats[0])
        self.show_active()

    async def open_restored(self, chat: Chat) -> None:
        """Open a chat that was read from the history."""
        self._mark_reasoning(chat)
        self.archive.loaded(chat)
        await self.open_chat(chat)

    async def restore(self, opened: HistoryOpened) -> None:
        """The history is open: save what has been said meanwhile, and bring the last session's tabs back."""
        for chat in opened.tabs:
            self._mark_reasoning(chat)
        await self._add_panes(opened.tabs)
        # Only now: what is saved from here on, or found by a search, meets all of the tabs.
        self.archive.adopt(opened)
        early = list(self.workspace.chats)
        for chat in opened.tabs:
            self.workspace.add(chat)
        self.workspace.reorder([chat.id for chat in opened.tabs])
        first = early[0]
        is_untouched = not first.root.children and not self.pane(first).draft
        if opened.tabs and len(early) == 1 and is_untouched:
            self.workspace.show(opened.in_view or opened.tabs[-1])
            self.workspace.close(first)
            self.remove_pane(first)
        self.keep_drafts()
        self.show_order()
        self.show_active()

    def show_saved(self) -> None:
        """Say in the header, as long as it is so, that chats can't be saved."""
        self._header.show_saved(self.archive.is_saving)

    def show_order(self) -> None:
        """The tabs' order has changed."""
        self._tab_bar.put_in_order([chat.id for chat in self.workspace.chats])
        self.show_tabs()
        self.save_tabs()

    def save_tabs(self) -> None:
        """Have the next start find the tabs as they are."""
        self.archive.save_tabs(self.workspace.chats, self.workspace.active)

    def on_text_area_changed(self) -> None:
        """A prompt has changed: save it soon."""
        if self._draft_timer is None:
            self._draft_timer = self.set_timer(DRAFT_S, self.keep_drafts)

    def keep_drafts(self) -> None:
        """Save what stands in every prompt. Also works once the app has ended."""
        self._draft_timer = None
        for chat in self.workspace.chats:
            if self.is_open(chat):
                self.keep_draft(chat)

    def keep_draft(self, chat: Chat) -> None:
        """Save what stands in a chat's prompt."""
        if self.archive.keep_draft(chat, self.pane(chat).draft):
            self.save_tabs()

    def _mark_reasoning(self, chat: Chat) -> None:
        """An answer that was cut off before its reasoning was told from it: by the model of now."""
        tags = self.bridge.backend.about.reasoning_tags if self.bridge is not None else None
        for message in chat.messages():
            if message.is_interrupted and message.answer.tags is None:
                message.answer.tags = tags

    async def _add_panes(self, chats: Sequence[Chat]) -> None:
        """Make the pages of chats that aren't open yet, out of view, and then their tabs."""
        for chat in chats:
            pane = ChatPane(chat, self.workspace.colour(chat), Welcome(self.load_state))
            await self._switcher.add_content(pane)
            self._panes[chat.id] = pane
        for chat in chats:
            self._tab_bar.add(chat.id)
            if chat.draft:
                self.on_text_area_changed()

    def remove_pane(self, chat: Chat) -> None:
        """The workspace has closed a chat."""
        if self.bridge is not None:
            self.bridge.forget(chat.id)
        self.archive.left(chat)
        self._tab_bar.take_away(chat.id)
        self.show_active()
        self._panes.pop(chat.id).remove()

    def show_active(self) -> None:
        """Bring the workspace's active chat into view."""
        chat = self.workspace.active
        self._switcher.current = pane_id(chat.id)
        self.pane(chat).be_seen()
        self.set_focus(self.pane(chat).prompt)  # at once: the next key may be waiting already
        self.show_stats()
        self.save_tabs()

    def is_open(self, chat: Chat) -> bool:
        """Whether the chat has its pane yet."""
        return chat.id in self._panes

    def pane(self, chat: Chat) -> ChatPane:
        """The pane of an open chat."""
        return self._panes[chat.id]

    def tell(
        self,
        chat: Chat,
        text: str,
        kind: NoteKind = "information",
        action_id: str = "",
        action_label: str = "",
    ) -> None:
        """Say something in the chat it concerns, where it stays."""
        self.pane(chat).show_note(chat.note(text, kind, action_id, action_label))

    def notify(self, message: str, **options: Any) -> None:
        """Tell in passing; what is still there to be read is not told again, however often a key is pressed."""
        now_s = time.monotonic()
        self._told = {text: end_s for text, end_s in self._told.items() if end_s > now_s}
        if message not in self._told:
            self._told[message] = now_s + (options.get("timeout") or self.app.NOTIFICATION_TIMEOUT)
            super().notify(message, **options)

    def show_stats(self) -> None:
        """Bring up to date what changes while chats answer."""
        self.show_tabs()

    def show_tabs(self) -> None:
        """Bring the tabs' badges up to date."""
        workspace = self.workspace
        self._tab_bar.show(workspace.chats, workspace.slots, workspace.active.id, workspace.marked)
        self._tab_strip.look_soon()

    # The panel's size

    @property
    def fitting_panel_modes(self) -> tuple[PanelMode, ...]:
        """What F2 goes through on a screen of this size; the first is the default."""
        width, height = self.size
        if width >= PANEL_COLUMNS and height >= PANEL_ROWS:
            return "full", "narrow", "off"
        return "line", "narrow", "off"

    def show_panel(self, mode: PanelMode | None) -> None:
        """Set the panel's size; None: what fits."""
        self.panel_mode = mode
        self._choose_panel()
        self.call_after_refresh(self.show_stats)

    def _choose_panel(self) -> None:
        modes = self.fitting_panel_modes
        mode = self.panel_mode if self.panel_mode in modes else modes[0]
        self._panel.display = mode in ("full", "narrow")
        self._panel.set_class(mode == "narrow", "-narrow")
        self._stats_line.display = mode == "line"
