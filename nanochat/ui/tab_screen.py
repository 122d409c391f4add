"""What the user can do with tabs: open, close, fork, rename, move and reach them, and find saved chats."""

from __future__ import annotations

from nanochat.ui.chat import Chat
from nanochat.ui.chat_screen import ChatScreen
from nanochat.ui.dialogs import Confirm
from nanochat.ui.sanitize import sanitize_line
from nanochat.ui.tab_bar import TabBar


class TabScreen(ChatScreen):
    """The chats, and what can be done with their tabs."""

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

    def action_close_chat(self) -> None:
        chat = self.chat

        async def close(agreed: bool | None) -> None:
            if agreed and chat in self.workspace.chats:
                if len(self.workspace.chats) == 1:
                    await self.action_new_chat()
                self.workspace.close(chat)
                await self.remove_pane(chat)

        if chat.is_busy:
            question = (
                f"“{sanitize_line(chat.title)}” is still answering. Close it? What it has said is saved."
            )
            self.app.push_screen(Confirm(question, "Close"), close)
        else:
            self.run_worker(close(True))

    def action_next_chat(self) -> None:
        self._show(self.workspace.neighbour(1))

    def action_previous_chat(self) -> None:
        self._show(self.workspace.neighbour(-1))

    def action_jump(self, number: int) -> None:
        if number <= len(self.workspace.chats):
            self._show(self.workspace.chats[number - 1])

    def on_tab_bar_picked(self, event: TabBar.Picked) -> None:
        if (chat := self.workspace.find(event.chat_id)) is not None:
            self._show(chat)

    async def on_tab_bar_new_wanted(self) -> None:
        await self.action_new_chat()

    def _show(self, chat: Chat) -> None:
        self.workspace.show(chat)
        self.show_active()
