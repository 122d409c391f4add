"""What the user can do with tabs: open, close, fork, rename, move and reach them, and find saved chats."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from textual.content import Content
from textual.message import Message

from nanochat.errors import HistoryError
from nanochat.history import History
from nanochat.sanitize import sanitize_line
from nanochat.ui.archive import Archive
from nanochat.ui.chat import Chat
from nanochat.ui.chat_screen import ChatScreen
from nanochat.ui.dialogs import Confirm
from nanochat.ui.restoring import restored_chat
from nanochat.ui.search_screen import Found, SearchScreen
from nanochat.ui.tab_bar import TabBar
from nanochat.ui.tab_picker import PickedTab, TabPicker, TitleDialog
from nanochat.ui.titles import MAX_TITLE


@dataclass
class SavedChatLoaded(Message):
    """A chat was read from the history, to be opened."""

    found: Found
    result: Chat | HistoryError


class TabScreen(ChatScreen):
    """The chats, and what can be done with their tabs."""

    def __init__(self, system: str | None, archive: Archive) -> None:
        super().__init__(system, archive)
        self._replacing = asyncio.Lock()
        """Held while the last tab is being replaced by a new one."""

    @property
    def chat(self) -> Chat:
        """The chat in view."""
        return self.workspace.active

    async def action_new_chat(self) -> None:
        await self.open_chat(Chat(system=self.system))

    async def action_fork_chat(self) -> None:
        chat = self.chat
        fork = self.workspace.fork(chat)
        self.archive.forked(chat, fork)
        await self.open_chat(fork)

    async def _close(self, chat: Chat) -> None:
        """Close a chat's tab, at once if it isn't the last: the next key may be waiting, and is for the next tab."""
        if self.workspace.chats == [chat]:
            async with self._replacing:
                if self.workspace.chats == [chat]:
                    await self.action_new_chat()
        if chat in self.workspace.chats:
            self.workspace.close(chat)
            self.remove_pane(chat)

    async def action_close_chat(self) -> None:
        chat = self.chat

        async def close(agreed: bool | None) -> None:
            if agreed:
                await self._close(chat)

        if chat.is_busy:
            question = (
                f"“{sanitize_line(chat.title)}” is still answering. Close it? What it has said is saved."
            )
            self.app.push_screen(Confirm(question, "Close"), close)
        else:
            await self._close(chat)

    def action_delete_chat(self) -> None:
        """Close the tab in view and delete its chat from the history, once the user agrees."""
        chat = self.chat

        async def delete(agreed: bool | None) -> None:
            if agreed and not self._must_stop_first(chat, "delete"):
                await self._close(chat)
                self.archive.delete(chat)

        if not self._must_stop_first(chat, "delete"):
            question = f"Delete “{sanitize_line(chat.title)}” for good, with all its branches?"
            self.app.push_screen(Confirm(question, "Delete", is_final=True), delete)

    def _must_stop_first(self, chat: Chat, verb: str) -> bool:
        """Whether an answer is under way; the user is told. It may also have begun while a dialog asked."""
        if chat.is_busy:
            self.notify(f"Stop the answer first (Esc), then {verb} the chat.")
        return chat.is_busy

    def action_next_chat(self) -> None:
        self._show(self.workspace.neighbour(1))

    def action_previous_chat(self) -> None:
        self._show(self.workspace.neighbour(-1))

    def action_jump(self, number: int) -> None:
        if number <= len(self.workspace.chats):
            self._show(self.workspace.chats[number - 1])

    def action_goto(self, argument: str = "") -> None:
        """Go to the tab of a number; without one, let the user pick."""
        if argument:
            if (place := self._place(argument)) is not None:
                self._show(self.workspace.chats[place - 1])
            return

        def take(picked: PickedTab | None) -> None:
            if picked is not None:
                self._take_picked(picked)

        labels = [(chat.id, Content(sanitize_line(chat.title))) for chat in self.workspace.chats]
        self.app.push_screen(TabPicker(labels, self.chat.id), take)

    def _take_picked(self, picked: PickedTab) -> None:
        if list(picked.order) != [chat.id for chat in self.workspace.chats]:
            self.workspace.reorder(picked.order)
            self.show_order()
        if picked.chat_id is not None and (chat := self.workspace.find(picked.chat_id)) is not None:
            self._show(chat)
            if picked.is_to_be_renamed:
                self.action_rename()

    def _place(self, argument: str) -> int | None:
        """A tab's number as written; None, and the user is told, if there is no such tab."""
        last = len(self.workspace.chats)
        if argument.isdecimal() and len(argument) < 7 and 1 <= int(argument) <= last:
            return int(argument)
        self.notify(f"Give a tab's number, from 1 to {last}.", severity="warning")
        return None

    def action_move(self, argument: str = "") -> None:
        """Move the tab in view to a place."""
        if (place := self._place(argument)) is not None:
            self._move(place)

    def action_move_left(self) -> None:
        self._move(max(1, self.workspace.number(self.chat) - 1))

    def action_move_right(self) -> None:
        self._move(self.workspace.number(self.chat) + 1)

    def _move(self, place: int) -> None:
        self.workspace.move(self.chat, place)
        self.show_order()

    def action_rename(self, argument: str = "") -> None:
        """Give the chat in view another title; without one, ask for it."""
        chat = self.chat

        def take(title: str | None) -> None:
            if title is not None and (line := sanitize_line(title, MAX_TITLE)):
                chat.title = line
                self.archive.configure(chat)
                self.show_stats()

        if argument:
            take(argument)
        else:
            self.app.push_screen(TitleDialog(chat.title), take)

    # Saved chats

    def action_search(self, argument: str = "") -> None:
        """Search all chats, and open what is chosen."""

        def take(found: Found | None) -> None:
            if found is not None:
                self.open_saved(found)

        self.app.push_screen(SearchScreen(self.archive.read, argument), take)

    def open_saved(self, found: Found) -> None:
        """Bring a saved chat into view, at a message of it; its tab is opened if there is none."""
        chat = next((chat for chat in self.workspace.chats if chat.store_id == found.chat_id), None)
        if chat is not None:
            self._show_found(chat, found)
            return

        def load(history: History) -> Chat:
            return restored_chat(history.chat(found.chat_id), history.tree(found.chat_id))

        self.archive.read(load, lambda result: self.post_message(SavedChatLoaded(found, result)))

    async def on_saved_chat_loaded(self, event: SavedChatLoaded) -> None:
        if isinstance(event.result, HistoryError):
            self.notify(sanitize_line(str(event.result), 400), severity="error", markup=False)
            return
        chat = event.result
        if any(other.store_id == chat.store_id for other in self.workspace.chats):  # asked for twice
            self.open_saved(event.found)
            return
        await self.open_restored(chat)
        self._show_found(chat, event.found)

    def _show_found(self, chat: Chat, found: Found) -> None:
        wanted = found.message_id
        message = next(
            (one for one in chat.messages() if wanted is not None and one.store_id == wanted), None
        )
        is_elsewhere = message is not None and message not in chat.path
        if message is not None and (not is_elsewhere or not chat.is_busy):
            if is_elsewhere:
                chat.choose(message)
                self.forget_refusal(chat)
                self.archive.chose(message)
            self._show(chat)
            self.pane(chat).show_path(message)
        else:
            self._show(chat)
            if message is not None:
                self.notify("The message is on another branch; stop the answer (Esc), then open it again.")

    def on_tab_bar_picked(self, event: TabBar.Picked) -> None:
        if (chat := self.workspace.find(event.chat_id)) is not None:
            self._show(chat)

    async def on_tab_bar_new_wanted(self) -> None:
        await self.action_new_chat()

    def _show(self, chat: Chat) -> None:
        self.workspace.show(chat)
        self.show_active()
