"""Searching all chats as the words are written; without words, the chats that were used last.

A chat stands there once, with its newest hits below its title: who looks for a chat shall see many, not one
chat's many messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from nanochat.errors import HistoryError
from nanochat.history import History, SearchHit
from nanochat.sanitize import sanitize_line
from nanochat.ui import formatting as fmt
from nanochat.ui.actions import dialog_binding, dialog_keys, find
from nanochat.ui.chrome import actions_of
from nanochat.ui.dialog import Dialog
from nanochat.ui.line_input import LineInput

LIMIT = 200
"""Hits looked for at most."""
MAX_LINES = 50
"""Rows shown at most; a chat is shown with all of its rows, or not at all."""
MAX_PER_CHAT = 3
"""Messages of one chat that are shown; the others are counted."""
PAUSE_S = 0.08
"""A search begins when nothing has been written for this long."""

MOVES = {
    "list_down": "cursor_down",
    "list_up": "cursor_up",
    "list_page_down": "page_down",
    "list_page_up": "page_up",
}
"""What a key does in the list, by its action."""

Ask = Callable[[History], list[SearchHit]]
Read = Callable[[Ask, Callable[[list[SearchHit] | HistoryError], object]], None]


@dataclass(frozen=True, slots=True)
class Found:
    """A chat, and a message of it unless it is the title that was found; ids of the history."""

    chat_id: int
    message_id: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """A hit as it is listed."""

    hit: SearchHit
    num_hits: int = 0
    """Messages of the chat that were found, if this is the chat's first row; it shows the title."""
    is_first: bool = True


def rows(hits: Sequence[SearchHit]) -> list[Row]:
    """Hits by chat, each chat where its first hit stands: the title, and its newest messages.

    A title that was found is a row of its own, which opens the chat as it was left: a title is mostly the
    beginning of the first question, so that message would be found with nearly every one.
    """
    by_chat: dict[int, list[SearchHit]] = {}
    for hit in hits:
        by_chat.setdefault(hit.chat_id, []).append(hit)
    listed: list[Row] = []
    for found in by_chat.values():
        messages = [hit for hit in found if hit.message_id is not None]
        titles = [hit for hit in found if hit.message_id is None]
        shown = titles + messages[:MAX_PER_CHAT]
        if len(listed) + len(shown) > MAX_LINES:
            break
        listed += [Row(hit, len(messages), index == 0) for index, hit in enumerate(shown)]
    return listed


class RowOption(Option):
    """A row in the list. A choice goes by the row, as others may have taken its place meanwhile."""

    def __init__(self, row: Row) -> None:
        super().__init__(_shown(row))
        self.hit = row.hit


@dataclass
class Answered(Message):
    """What a search has found."""

    number: int
    """Which search: an answer to an earlier one than the last is of no use any more."""
    result: list[SearchHit] | HistoryError


class SearchScreen(Dialog[Found | None]):
    """Gives what the user has chosen; None if nothing."""

    BINDINGS: ClassVar = [
        dialog_binding(action_id, "leave", priority=True) for action_id in ("dialog_close", "search")
    ]

    def __init__(self, read: Read, words: str = "") -> None:
        """``read`` asks the history on a thread, and calls back there."""
        super().__init__()
        self._read = read
        self._line = LineInput(words, placeholder="Search all chats", compact=True)
        self._number = 0
        self._rows: list[Row] = []
        self._num_hits = 0
        self._num_chats = 0

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog search"):
            yield self._line
            hits = OptionList(markup=False, compact=True)
            hits.can_focus = False
            yield hits
            yield Static("", id="state", markup=False)

    def on_mount(self) -> None:
        self._search()

    def on_input_changed(self) -> None:
        self._number += 1
        number = self._number
        self.set_timer(PAUSE_S, lambda: self._search() if number == self._number else None)

    def on_input_submitted(self) -> None:
        hits = self.query_one(OptionList)
        if self._rows and hits.highlighted is not None:
            self._choose(hits.get_option_at_index(hits.highlighted))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self._choose(event.option)

    def on_key(self, event: events.Key) -> None:
        """The list's keys, while the words have the focus."""
        if (move := MOVES.get(dialog_keys(actions_of(self)).get(event.key, ""))) is not None:
            event.stop()
            event.prevent_default()
            getattr(self.query_one(OptionList), f"action_{move}")()

    def on_answered(self, event: Answered) -> None:
        if event.number != self._number or self not in self.app.screen_stack:  # it was closed meanwhile
            return
        state, hits = self.query_one("#state", Static), self.query_one(OptionList)
        if isinstance(event.result, HistoryError):
            state.update(Content.styled(sanitize_line(str(event.result), 400), "$error"))
            return
        self._rows, self._num_hits = rows(event.result), len(event.result)
        self._num_chats = len({hit.chat_id for hit in event.result})
        hits.clear_options()
        hits.add_options([RowOption(row) for row in self._rows])
        if self._rows:
            hits.highlighted = 0
        state.update(Content.styled(self._summary(), "$muted"))

    def action_leave(self) -> None:
        self.dismiss(None)

    def _summary(self) -> str:
        words = self.query_one(LineInput).value.strip()
        if not words:
            return f"The chats used last. {self._ways()} Enter opens one."
        if not self._rows:
            return "Nothing found: a message must have words that begin with all of these."
        found = f"The first {LIMIT} hits" if self._num_hits >= LIMIT else fmt.plural(self._num_hits, "hit")
        found += f" in {self._num_chats} chats" if self._num_chats > 1 else ""
        shown = len({row.hit.chat_id for row in self._rows})
        only = f"; the first {shown} chats are shown" if shown < self._num_chats else ""
        return f"{found}, newest first{only}. {self._ways()} Enter opens the chat there."

    def _ways(self) -> str:
        return " ".join(find(name, actions_of(self)).key_label for name in ("list_up", "list_down"))

    def _search(self) -> None:
        number, words = self._number, self._line.value
        ask: Ask = (lambda history: history.search(words, LIMIT)) if words.strip() else _recent
        self._read(ask, lambda result: self.post_message(Answered(number, result)))

    def _choose(self, option: Option) -> None:
        if isinstance(option, RowOption):
            self.dismiss(Found(option.hit.chat_id, option.hit.message_id))


def _recent(history: History) -> list[SearchHit]:
    return [
        SearchHit(
            chat_id=chat.id,
            chat_title=chat.title,
            message_id=None,
            role=None,
            created_at=chat.updated_at,
            snippet="",
            spans=(),
        )
        for chat in history.list_chats(MAX_LINES)
    ]


def _shown(row: Row) -> Content:
    """The words around a hit, below its chat's title if it is the chat's first; or the title alone, if that was found."""
    hit = row.hit
    date = f"{datetime.fromtimestamp(hit.created_at):%Y-%m-%d}" if 0 <= hit.created_at < 2**33 else ""
    title = sanitize_line(hit.chat_title, 60) or "Untitled"
    more = f"  {row.num_hits} hits" if row.num_hits > 1 else ""
    head = Content.styled(title, "bold") + Content.styled(f"  {date}{more}", "$muted")
    if hit.message_id is None:
        return head
    line = Content("").join(
        [Content.styled("you  " if hit.role == "user" else "     ", "$muted"), *_pieces(hit)]
    )
    return head + "\n" + line if row.is_first else line


def _pieces(hit: SearchHit) -> list[Content]:
    """The snippet with the words found in another colour, each piece made harmless by itself."""
    pieces, end = [], 0
    for start, stop in hit.spans:
        pieces.append(Content.styled(_line(hit.snippet[end:start]), "$muted"))
        pieces.append(Content.styled(_line(hit.snippet[start:stop]), "$accent"))
        end = stop
    return [*pieces, Content.styled(_line(hit.snippet[end:]), "$muted")]


def _line(text: str) -> str:
    """Sanitised, with the spaces at its ends kept."""
    inner = sanitize_line(text, 400)
    head, tail = " " * text[:1].isspace(), " " * text[-1:].isspace()
    return f"{head}{inner}{tail}" if inner else head
