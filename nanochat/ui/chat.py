"""One chat as data: its tree of messages, its settings, and what its answer is doing now.

Messages form a tree, because answering again keeps the old answer: a message's siblings are the other
branches, and one child of each message is chosen. The path of chosen messages is what is shown and
sent. Knows nothing of widgets, threads or the engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from typing import Any, Literal

from nanochat.engine.outputs import RequestOutput
from nanochat.sanitize import sanitize
from nanochat.ui.reasoning import AnswerText
from nanochat.ui.titles import NEW_TITLE, title_from

Role = Literal["root", "user", "assistant"]

_ids = itertools.count(1)


class Phase(Enum):
    """What a chat's answer is doing."""

    IDLE = "idle"
    LOADING = "waiting for the model"
    SUBMITTED = "submitted"
    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"


@dataclass(slots=True, eq=False)
class Message:
    """A node of the tree."""

    role: Role
    text: str = ""
    """What a user wrote, as it is sent. An answer's text lies in ``answer`` and ``output``."""
    parent: Message | None = None
    children: list[Message] = field(default_factory=list)
    chosen: int = 0
    """Which child the path goes through."""
    beside: Message | None = None
    """The sibling that the path went through when this one was added."""
    answer: AnswerText = field(default_factory=AnswerText)
    """An answer's text as shown, while it streams and after."""
    output: RequestOutput | None = None
    """An answer's end; None while it runs."""
    partial: RequestOutput | None = None
    """What stood there when the answer now running was continued."""
    is_interrupted: bool = False
    """Whether the app ended before the answer did."""
    is_elsewhere: bool = False
    """Whether another nanochat was still writing the answer when it was read."""
    enable_thinking: bool | None = None
    """What the template was told about thinking when an answer began."""
    model: str = ""
    """Who answers."""
    store_id: int | None = None
    """Its id in the history once it is saved there."""

    def add(self, child: Message) -> Message:
        """Append a branch and choose it."""
        child.parent = self
        child.beside = self.children[self.chosen] if self.children else None
        self.children.append(child)
        self.chosen = len(self.children) - 1
        return child

    def remove(self) -> None:
        """Take this branch out of the tree; the path goes where it went before, or else through the newest."""
        if (parent := self.parent) is not None:
            parent.children.remove(self)
            chosen = [place for place, sibling in enumerate(parent.children) if sibling is self.beside]
            parent.chosen = chosen[0] if chosen else max(0, len(parent.children) - 1)
            self.parent = None

    @property
    def can_continue(self) -> bool:
        """Whether an answer has ended before its natural end, and nothing else is wrong with it."""
        if self.output is None or self.is_elsewhere:
            return False
        return self.output.finish_reason in ("cancelled", "length")

    @property
    def branch(self) -> tuple[int, int]:
        """(which, of how many) among its siblings, counted from 1."""
        siblings = self.parent.children if self.parent is not None else [self]
        return siblings.index(self) + 1, len(siblings)


NoteKind = Literal["information", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence from the app in a chat; it is shown, and never sent."""

    after: Message | None
    """The message it stands below; None: above all."""
    text: str
    kind: NoteKind = "information"
    action_id: str = ""
    """Something that can be done about it, by its id in the actions table."""
    action_label: str = ""


@dataclass(frozen=True, slots=True)
class Counted:
    """What a chat's context comes to where no answer tells."""

    last: Message
    """The message that ends it."""
    left_out: Message | None
    num_tokens: int | None = None
    """None: it is being counted, or can't be."""


@dataclass(slots=True, eq=False)
class Chat:
    """A conversation in a tab. Only the UI thread changes it."""

    system: str | None = None
    title: str = NEW_TITLE
    sampling: dict[str, Any] = field(default_factory=dict)
    """This chat's own sampling settings, by parameter name, over the defaults."""
    id: int = field(default_factory=_ids.__next__)
    started: datetime = field(default_factory=lambda: datetime.now().astimezone())
    root: Message = field(default_factory=lambda: Message("root"))
    left_out: Message | None = None
    """The last message that isn't sent, because the user chose so; it counts on the paths that go through it."""
    phase: Phase = Phase.IDLE
    prefill_progress: float | None = None
    prefill_tokens: tuple[int, int] | None = None
    """Read so far, and to read in all."""
    live_rate: float | None = None
    """Tokens a second of the answer now decoding."""
    live: Message | None = None
    """The answer now being made."""
    is_unread: bool = False
    has_failed: bool = False
    warned_context: bool = False
    notes: list[Note] = field(default_factory=list)
    draft: str = ""
    """Text to put into the prompt when its tab is opened."""
    editing: Message | None = None
    """The question that the next message stands beside, as another branch."""
    enable_thinking: bool | None = None
    """Whether the model is asked to reason before it answers; None leaves it to its template."""
    keep_reasoning: bool = False
    """Whether earlier reasoning stays in the context also where the template leaves it out."""
    store_id: int | None = None
    """Its id in the history once it is saved there."""
    counted: Counted | None = None
    """What was counted last; it holds as long as it fits the path."""

    @property
    def is_busy(self) -> bool:
        return self.live is not None

    @property
    def path(self) -> list[Message]:
        """Chosen messages from the oldest to the newest."""
        return list(_walk(self.root))

    @property
    def last_answer(self) -> Message | None:
        path = self.path
        return path[-1] if path and path[-1].role == "assistant" else None

    @property
    def first_sent(self) -> int:
        """Index in the path of the first message that isn't left out: where a turn begins, at most the last one."""
        path = self.path
        starts = turn_starts(path)
        if self.left_out not in path or not starts:
            return starts[0] if starts else 0
        after = path.index(self.left_out)
        return next((start for start in starts if start > after), starts[-1])

    def leave_out(self, turns: int) -> None:
        """Leave so many more of the oldest turns out of what is sent, on this path and those that branch off later."""
        path = self.path
        starts = turn_starts(path)
        first = starts.index(self.first_sent) + turns
        self.left_out = path[starts[first] - 1] if first < len(starts) else path[-1]

    @property
    def droppable_turns(self) -> int:
        """Turns that may still be left out; the last one always stays."""
        return max(0, len(turn_starts(self.context)) - 1)

    @property
    def context(self) -> list[Message]:
        """The path without the turns that are left out."""
        return self.path[self.first_sent :]

    @property
    def context_tokens(self) -> int:
        """Tokens of the context as counted, or after the newest answer on the path that tells them; 0 before one."""
        path = self.path
        if self._has_counted(path) and self.counted is not None and self.counted.num_tokens is not None:
            return self.counted.num_tokens
        for message in reversed(path):
            if message.output is not None and message.output.metrics.prompt_tokens:
                metrics = message.output.metrics
                return metrics.prompt_tokens + metrics.completion_tokens
        return 0

    @property
    def needs_count(self) -> bool:
        """Whether the last message doesn't tell what the context comes to, as one that was cut off or imported."""
        if self.is_busy:
            return False
        path = self.path
        if not path or self._has_counted(path):
            return False
        output = path[-1].output
        return output is None or not output.metrics.prompt_tokens

    def _has_counted(self, path: Sequence[Message]) -> bool:
        counted = self.counted
        is_last = counted is not None and bool(path) and counted.last is path[-1]
        return is_last and counted is not None and counted.left_out is self.left_out

    def ask(self, text: str) -> Message:
        """Add a user's message and the answer to come; returns the answer.

        The message follows the path, or is a branch beside the one that is being edited.
        """
        if not self.root.children and self.title == NEW_TITLE:
            self.title = title_from(text)
        if self.editing is not None and self.editing.parent is not None:
            before = self.editing.parent
            self.choose(before)  # another branch may have been looked at meanwhile
        else:
            before = self.path[-1] if self.root.children else self.root
        self.editing = None
        return self.begin_answer(before.add(Message("user", text)))

    def begin_answer(self, question: Message) -> Message:
        """A new branch of answers to a question of the path."""
        return self._begin(question.add(Message("assistant")))

    def continue_answer(self, answer: Message) -> None:
        """The last answer of the path, which ended early, goes on."""
        answer.partial, answer.output = answer.output, None
        self._begin(answer)

    def _begin(self, answer: Message) -> Message:
        self.live = answer
        answer.enable_thinking = self.enable_thinking
        self.phase = Phase.SUBMITTED
        self.has_failed = False
        return answer

    def end_answer(self, output: RequestOutput) -> None:
        """The live answer has ended; its text is taken from the output as a whole."""
        if self.live is not None:
            self.live.output = output
            self.live.partial = None
            self.live.is_interrupted = False
            self.live.answer.replace(sanitize(output.text))
        self.has_failed = output.finish_reason == "error"
        self._rest()

    def withdraw(self) -> tuple[str, Message | None]:
        """Take the question back whose answer could not start; returns its text and what has gone.

        When it has been answered before, only the new branch goes, and the text is empty. An answer that
        could not be continued stays as it was, and nothing goes.
        """
        answer, text = self.live, ""
        gone: Message | None = None
        if answer is not None and answer.partial is not None:
            answer.output, answer.partial = answer.partial, None
        elif answer is not None and (question := answer.parent) is not None:
            gone = answer
            answer.remove()
            if not question.children:
                gone, text = question, question.text
                before = question.parent
                question.remove()
                if before is not None and before.children:
                    self.editing = before.children[before.chosen]
                elif before is self.root and self.title == title_from(text):
                    self.title = NEW_TITLE
        self._rest()
        return text, gone

    def choose_branch(self, message: Message, step: int) -> bool:
        """Go to a sibling; False if there is none in that direction."""
        if message.parent is None:
            return False
        target = message.parent.chosen + step
        if not 0 <= target < len(message.parent.children):
            return False
        message.parent.chosen = target
        return True

    def choose(self, message: Message) -> None:
        """Make the path go through a message."""
        while (parent := message.parent) is not None:
            parent.chosen = parent.children.index(message)
            message = parent

    def messages(self) -> Iterator[Message]:
        """All messages of all branches, each after the one that it follows."""
        waiting = list(reversed(self.root.children))
        while waiting:
            message = waiting.pop()
            yield message
            waiting += reversed(message.children)

    def fork(self) -> Chat:
        """A new chat with this path; an answer under way stays behind, its question becomes the draft."""
        other = Chat(
            system=self.system,
            sampling=dict(self.sampling),
            started=self.started,
            enable_thinking=self.enable_thinking,
            keep_reasoning=self.keep_reasoning,
        )
        end = other.root
        path = self.path
        partial = self.live.partial if self.live is not None else None
        if self.live is not None and partial is None:
            other.draft = path[-2].text
            path = path[:-2]
        for message in path:
            # A text of its own: the answer may be continued in either chat.
            answer = message.answer.copy()
            copy = replace(message, parent=None, children=[], chosen=0, answer=answer, store_id=None)
            end = end.add(copy)
            if message is self.left_out:
                other.left_out = end
        if partial is not None:  # it goes on there, and stays as it was here
            end.answer.replace(sanitize(partial.text))
            end.output, end.partial = partial, None
        return other

    def has_just_noted(self, text: str) -> bool:
        """Whether this very sentence stands last already, below the newest message."""
        path, last = self.path, self.notes[-1] if self.notes else None
        return last is not None and last.text == text and last.after is (path[-1] if path else None)

    def note(
        self, text: str, kind: NoteKind = "information", action_id: str = "", action_label: str = ""
    ) -> Note:
        """Add a sentence below the newest message."""
        path = self.path
        note = Note(path[-1] if path else None, text, kind, action_id, action_label)
        self.notes.append(note)
        return note

    def clear(self) -> None:
        """Forget all messages."""
        self.root = Message("root")
        self.left_out = None
        self.notes.clear()
        self.title = NEW_TITLE
        self.editing = None
        self.warned_context = self.has_failed = False

    def _rest(self) -> None:
        self.live = None
        self.phase = Phase.IDLE
        self.prefill_progress = self.prefill_tokens = self.live_rate = None


def _walk(message: Message) -> Iterator[Message]:
    while message.children:
        message = message.children[message.chosen]
        yield message


def turn_starts(path: Sequence[Message]) -> list[int]:
    """Indices of the users' messages: where each turn begins."""
    return [index for index, message in enumerate(path) if message.role == "user"]
