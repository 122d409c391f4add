"""One chat's page: its messages, and the prompt below them.

Shows what a :class:`Chat` holds and changes nothing in it; what the user asks for is posted as a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.message import Message as TextualMessage
from textual.widget import Widget

from nanochat.ui.chat import Chat, Message, Note
from nanochat.ui.message import AnswerMessage, BranchLabel, NoteView, UserMessage
from nanochat.ui.prompt import Prompt

PLACEHOLDER = "Ask something, or / for commands"


class Transcript(VerticalScroll):
    """The messages. It follows the newest text until the user scrolls up, and again from the end on."""

    can_focus = False


class ChatPane(Vertical):
    """A chat as it is seen."""

    @dataclass
    class Prompted(TextualMessage):
        """The user has sent a text, which may be a slash command."""

        pane: ChatPane
        text: str

    @dataclass
    class BranchWanted(TextualMessage):
        """The user wants to see another branch of a message."""

        pane: ChatPane
        message: Message
        step: int

    def __init__(self, chat: Chat, slot: int, welcome: Widget | None = None) -> None:
        """``welcome`` is shown as long as the chat is empty."""
        super().__init__(id=pane_id(chat.id), classes=f"slot-{slot}")
        self.chat = chat
        self._welcome = welcome
        self._transcript = Transcript()
        self._column = Vertical(classes="column")
        self._prompt = Prompt(chat.draft, placeholder=PLACEHOLDER)
        self._is_stale = False

    def compose(self) -> ComposeResult:
        with self._transcript, self._column:
            if self._welcome is not None:
                yield self._welcome
            yield from self._messages()
        with Horizontal(classes="prompt-row"):
            yield self._prompt

    def on_mount(self) -> None:
        self._transcript.anchor()
        self._update_welcome()

    def on_show(self) -> None:
        if self._is_stale:
            self._is_stale = False
            self._update_all()

    def take_prompt(self, text: str = "") -> None:
        """Replace what stands in the prompt."""
        self._prompt.take(text)

    def restore_prompt(self, text: str) -> None:
        """Give an unsent text back, ahead of what has been written since."""
        self._prompt.take(f"{text}\n{self._prompt.full_text}" if self.has_draft else text)

    def withdraw_draft(self, text: str) -> None:
        """Empty the prompt if it still holds this text."""
        if self._prompt.full_text == text:
            self._prompt.take()

    @property
    def prompt(self) -> Prompt:
        """Where the user writes."""
        return self._prompt

    @property
    def has_draft(self) -> bool:
        """Whether anything stands in the prompt."""
        return bool(self._prompt.text.strip())

    def show_turn(self, answer: Message) -> None:
        """A question and its answer to come were added at the end."""
        self._update_welcome()
        if answer.parent is not None and answer.branch[1] == 1:
            self._column.mount(UserMessage(answer.parent))
            self._column.mount(AnswerMessage(self.chat, answer))
        else:
            self.show_path()
        self._transcript.anchor()

    def show_path(self) -> None:
        """Another branch was chosen, or messages went: show the path anew."""
        with self.app.batch_update():
            self._column.query("UserMessage, AnswerMessage, NoteView").remove()
            self._column.mount_all(list(self._messages()))
        self._update_welcome()

    def show_note(self, note: Note) -> None:
        """A note was added at the end."""
        self._update_welcome()
        self._column.mount(NoteView(note))
        self._transcript.anchor()

    def grow(self, report_cost: Callable[[float], None]) -> None:
        """The live answer has more text; a hidden pane draws it when it is shown."""
        if not self.is_shown:
            self._is_stale = True
            return
        answer = self._live_answer()
        if answer is None:
            return
        started_s = time.monotonic()
        answer.show_text()
        self.call_after_refresh(lambda: report_cost(time.monotonic() - started_s))

    def update_live(self) -> None:
        """The live answer's state or rate has changed."""
        if self.is_shown and (answer := self._live_answer()) is not None:
            answer.show_footer()

    def end_answer(self, message: Message) -> None:
        """An answer is complete."""
        for answer in self._answers():
            if answer.message is message:
                answer.finish()

    def toggle_reasoning(self) -> None:
        """Unfold or fold the reasoning of every answer."""
        for answer in self._answers():
            answer.toggle_reasoning()

    def scroll_page(self, direction: int) -> None:
        """A page up (-1) or down (1)."""
        if direction < 0:
            self._transcript.scroll_page_up(animate=False)
        else:
            self._transcript.scroll_page_down(animate=False)

    @property
    def is_shown(self) -> bool:
        """Whether this is the chat in view."""
        return self.display and self.is_attached

    def on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        event.stop()
        self.post_message(self.Prompted(self, event.text))

    def on_branch_label_stepped(self, event: BranchLabel.Stepped) -> None:
        event.stop()
        self.post_message(self.BranchWanted(self, event.message, event.step))

    def _messages(self) -> list[Widget]:
        path = self.chat.path
        first_sent = self.chat.first_sent
        widgets: list[Widget] = [NoteView(note) for note in self.chat.notes if note.after is None]
        for index, message in enumerate(path):
            if index == first_sent and index > 0:
                widgets.append(NoteView(Note(None, "The turns above are left out of the context.")))
            widget = UserMessage(message) if message.role == "user" else AnswerMessage(self.chat, message)
            widget.set_class(index < first_sent, "-dropped")
            widgets.append(widget)
            widgets += [NoteView(note) for note in self.chat.notes if note.after is message]
        return widgets

    def _answers(self) -> list[AnswerMessage]:
        return list(self._column.query(AnswerMessage))

    def _live_answer(self) -> AnswerMessage | None:
        return next(
            (answer for answer in reversed(self._answers()) if answer.message is self.chat.live), None
        )

    def _update_welcome(self) -> None:
        if self._welcome is not None:
            self._welcome.display = not self.chat.root.children and not self.chat.notes

    def _update_all(self) -> None:
        for answer in self._answers():
            answer.show_text()
            answer.show_footer()


def pane_id(chat_id: int) -> str:
    """The pane's id among the widgets."""
    return f"chat-{chat_id}"
