"""Chats and messages in one SQLite file, saved while they stream. Knows nothing of widgets or models.

:class:`History` is the whole of it; the other modules of this package are its parts.
"""

from nanochat.history.database import default_history_file
from nanochat.history.records import Chat, Message, SearchHit
from nanochat.history.store import History

__all__ = ["Chat", "History", "Message", "SearchHit", "default_history_file"]
