"""The open chats in their order, which one is in view, and each one's colour. Knows nothing of widgets."""

from __future__ import annotations

from collections.abc import Sequence

from nanochat.ui.chat import Chat
from nanochat.ui.theme import NUM_TAB_COLOURS
from nanochat.ui.titles import NEW_TITLE, title_from


class Workspace:
    """At least one chat is open at any time."""

    def __init__(self, first: Chat) -> None:
        self.chats: list[Chat] = []
        self.slots: dict[int, int] = {}
        """Colour slot by chat id."""
        self.marked: set[int] = set()
        """Ids of the chats that broadcasts go to; all when empty."""
        self._partners: dict[int, int] = {}
        """Ids of two compared chats, both ways."""
        self.active = first
        self.add(first)

    def add(self, chat: Chat) -> None:
        """Open a chat at the end, out of view, in a colour that the fewest others have."""
        self.colour(chat)
        self.chats.append(chat)

    def colour(self, chat: Chat) -> int:
        """Give a chat its colour before it is opened, unless it has one; returns the slot."""
        used = list(self.slots.values())
        return self.slots.setdefault(
            chat.id, min(range(NUM_TAB_COLOURS), key=lambda slot: (used.count(slot), slot))
        )

    def reorder(self, chat_ids: Sequence[int]) -> None:
        """Put the chats into this order; those that aren't named come last."""
        places = {chat_id: place for place, chat_id in enumerate(chat_ids)}
        self.chats.sort(key=lambda chat: places.get(chat.id, len(places)))

    def move(self, chat: Chat, place: int) -> None:
        """Move a chat to a place, counted from 1; those beyond the ends mean the ends."""
        self.chats.remove(chat)
        self.chats.insert(max(0, min(place - 1, len(self.chats))), chat)

    def show(self, chat: Chat) -> None:
        """Bring a chat into view."""
        self.active = chat
        chat.is_unread = False

    def close(self, chat: Chat) -> None:
        """Take a chat out; its right neighbour comes into view, or else its left one.

        The caller opens another one first if this is the last.
        """
        index = self.chats.index(chat)
        self.chats.remove(chat)
        del self.slots[chat.id]
        self.marked.discard(chat.id)
        self.unpair(chat)
        if self.active is chat:
            self.show(self.chats[min(index, len(self.chats) - 1)])

    def find(self, chat_id: int) -> Chat | None:
        """The open chat with this id."""
        return next((chat for chat in self.chats if chat.id == chat_id), None)

    def neighbour(self, step: int) -> Chat:
        """The chat so many tabs to the right (or left) of the one in view, around the ends."""
        return self.chats[(self.chats.index(self.active) + step) % len(self.chats)]

    def number(self, chat: Chat) -> int:
        """A chat's place, from 1."""
        return self.chats.index(chat) + 1

    def fork(self, chat: Chat) -> Chat:
        """A copy of a chat, named after it; not open yet."""
        other = chat.fork()
        other.title = title_from(f"Fork of {chat.title}") if chat.title != NEW_TITLE else NEW_TITLE
        return other

    def toggle_mark(self, chat: Chat) -> None:
        """Mark a chat for broadcasts, or take its mark away."""
        self.marked ^= {chat.id}

    @property
    def recipients(self) -> list[Chat]:
        """The chats that a broadcast goes to."""
        return [chat for chat in self.chats if not self.marked or chat.id in self.marked]

    def pair(self, one: Chat, other: Chat) -> None:
        """Compare two chats; they may be opened later."""
        self._partners |= {one.id: other.id, other.id: one.id}

    def unpair(self, chat: Chat) -> None:
        """End a chat's comparison, if there is one."""
        if (other := self._partners.pop(chat.id, None)) is not None:
            self._partners.pop(other, None)

    def partner(self, chat: Chat) -> Chat | None:
        """The open chat that this one is compared with."""
        return self.find(self._partners.get(chat.id, 0))

    @property
    def busy(self) -> list[Chat]:
        """Chats whose answer is under way."""
        return [chat for chat in self.chats if chat.is_busy]
