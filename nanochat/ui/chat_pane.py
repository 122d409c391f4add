"""One chat's page: its messages, and the prompt below them.

Shows what a :class:`Chat` holds and changes nothing in it; what the user asks for is posted as a message.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual.app import ComposeResult
from textual.message import Message as TextualMessage
from textual.widget import Widget
from textual.widgets import Static

from nanochat.ui.blank import BlankHorizontal, BlankVertical
from nanochat.ui.chat import Chat, Message, Note
from nanochat.ui.message import AnswerMessage, BranchStepped, UserMessage
from nanochat.ui.prompt import Prompt
from nanochat.ui.transcript import Transcript

PLACEHOLDER = "Ask something, or / for commands"
EDITING = "Editing: Enter sends a branch, Esc leaves"
"""Short enough for a prompt beside the panel in 100 columns."""


class ChatPane(BlankVertical):
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

    @dataclass
    class EditWanted(TextualMessage):
        """The user wants to send another text instead of a message's."""

        pane: ChatPane
        message: Message

    def __init__(self, chat: Chat, slot: int, welcome: Widget | None = None) -> None:
        """``welcome`` is shown as long as the chat is empty."""
        super().__init__(id=pane_id(chat.id), classes=f"slot-{slot}")
        self.chat = chat
        self._transcript = Transcript(chat, welcome)
        self._prompt = Prompt(chat.draft, placeholder=PLACEHOLDER)
        self._is_stale = False
        self._set_aside = ""
        """What stood in the prompt before a message was put there to be edited."""
        self._to_edit = ""
        """That message's text."""

        self._label = Static("", classes="pane-label", markup=False)
        self._label.display = False

    def compose(self) -> ComposeResult:
        yield self._label
        yield self._transcript
        with BlankHorizontal(classes="prompt-row"):
            yield self._prompt

    def show_label(self, text: str) -> None:
        """Say above the messages which of two chats this is; an empty text takes the line away."""
        if text != self._label.content:
            self._label.update(text)
            self._label.display = bool(text)

    def be_seen(self) -> None:
        """The chat comes into view; its messages are made when this happens first."""
        if not self._transcript.is_built:
            self._transcript.show_end()

    def on_show(self) -> None:
        if self._is_stale:
            self._is_stale = False
            self._update_all()

    def take_sent(self) -> None:
        """The oldest text that is on its way has arrived."""
        self._prompt.on_its_way.pop(0)

    def take_prompt(self, text: str = "") -> None:
        """Replace what stands in the prompt."""
        self._prompt.take(text)

    def restore_prompt(self, text: str) -> None:
        """Give an unsent text back, ahead of what has been written since."""
        self._prompt.take(f"{text}\n{self._prompt.full_text}" if self.has_draft else text)

    def begin_edit(self, text: str) -> None:
        """Put a message's text into the prompt to be edited; what stood there waits."""
        if self._prompt.border_title is None:
            self._set_aside = self._prompt.full_text
        self._prompt.border_title = EDITING
        self._prompt.take(text)
        self._to_edit = self._prompt.full_text

    def end_edit(self, *, is_given_up: bool = False) -> None:
        """The message was sent, or the edit given up: what stood in the prompt before is back."""
        if self._prompt.border_title is None:
            return
        self._prompt.border_title = None
        if is_given_up:
            self._prompt.take()
        if self._set_aside:
            self.restore_prompt(self._set_aside)
        self._set_aside = ""

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

    @property
    def draft(self) -> str:
        """What is not sent yet: of a message being edited, what was changed, ahead of what waits for its end."""
        prompt = self._prompt
        text, is_editing = prompt.full_text, prompt.border_title is not None
        if is_editing and text == self._to_edit:
            text = ""
        set_aside = self._set_aside if is_editing else ""
        return "\n".join(filter(None, (*prompt.on_its_way, text, set_aside)))

    def show_turn(self, answer: Message) -> None:
        """A question and its answer to come were added at the end."""
        self._transcript.show_turn(answer)

    def show_path(self, at: Message | None = None) -> None:
        """Another branch was chosen, or messages went: show the path anew, from one of its messages on."""
        if at is None:
            self._transcript.show_end()
        else:
            self._transcript.show_at(at)

    def show_note(self, note: Note) -> None:
        """A note was added at the end."""
        self._transcript.show_note(note)

    def grow(self) -> bool:
        """The live answer has more text; returns whether it is seen. A hidden pane draws it when it is shown."""
        if not self.is_shown:
            self._is_stale = True
            return False
        if (answer := self._live_answer()) is not None:
            answer.show_text()
        return True

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
            self._transcript.page_up()
        else:
            self._transcript.page_down()

    @property
    def is_shown(self) -> bool:
        """Whether this is the chat in view."""
        return self.display and self.is_attached

    def on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        event.stop()
        self.post_message(self.Prompted(self, event.text))

    def on_branch_stepped(self, event: BranchStepped) -> None:
        event.stop()
        self.post_message(self.BranchWanted(self, event.message, event.step))

    def on_user_message_edit_wanted(self, event: UserMessage.EditWanted) -> None:
        event.stop()
        self.post_message(self.EditWanted(self, event.message))

    def _answers(self) -> list[AnswerMessage]:
        return self._transcript.answers()

    def _live_answer(self) -> AnswerMessage | None:
        return next(
            (answer for answer in reversed(self._answers()) if answer.message is self.chat.live), None
        )

    def _update_all(self) -> None:
        for answer in self._answers():
            answer.show_text()
            answer.show_footer()


def pane_id(chat_id: int) -> str:
    """The pane's id among the widgets."""
    return f"chat-{chat_id}"
