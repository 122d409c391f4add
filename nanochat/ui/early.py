"""What is said and written before the history is open, to be saved once it is. Knows no history."""

from __future__ import annotations

from dataclasses import dataclass

from nanochat.ui.chat import Chat


@dataclass(slots=True)
class Early:
    """What there is of a chat so far."""

    chat: Chat
    draft: str = ""
    """What stands in its prompt."""
    is_open: bool = True
    """Whether its tab is."""

    @property
    def has_text(self) -> bool:
        return bool(self.chat.root.children or self.draft.strip())


class EarlyChats:
    """In the order in which they began."""

    def __init__(self) -> None:
        self._chats: dict[int, Early] = {}

    @property
    def have_text(self) -> bool:
        """Whether there is anything to save."""
        return any(early.has_text for early in self._chats.values())

    def said(self, chat: Chat) -> None:
        """The chat has messages."""
        self._chats.setdefault(chat.id, Early(chat))

    def wrote(self, chat: Chat, draft: str) -> None:
        """This stands in its prompt now."""
        if draft.strip() or chat.id in self._chats:
            self._chats.setdefault(chat.id, Early(chat)).draft = draft

    def left(self, chat: Chat) -> None:
        """Its tab was closed."""
        if (early := self._chats.get(chat.id)) is not None:
            early.is_open, early.draft = False, ""

    def delete(self, chat: Chat) -> None:
        """It isn't to be saved."""
        self._chats.pop(chat.id, None)

    def take(self) -> list[Early]:
        """All of them, to be saved now."""
        chats, self._chats = list(self._chats.values()), {}
        return chats
