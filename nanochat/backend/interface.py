"""The one interface between those who chat and what answers them. Plain values and protocols; no engine, no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol

from nanochat.backend.stats import BackendStats
from nanochat.engine.outputs import Event, RequestOutput
from nanochat.engine.stats import BlockMap
from nanochat.errors import NanochatError


class Said(Protocol):
    """One message of a chat, as far as a prompt needs it."""

    @property
    def role(self) -> Literal["root", "user", "assistant"]: ...

    @property
    def text(self) -> str:
        """What a user wrote; an answer's text lies in ``output``."""

    @property
    def output(self) -> RequestOutput | None: ...

    @property
    def enable_thinking(self) -> bool | None:
        """What the template was told about thinking when an answer began."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a user says, where there is no chat around it."""

    text: str
    role: Literal["user"] = "user"
    output: None = None
    enable_thinking: None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """A snapshot of what to answer, so that who submits it reads nothing that changes."""

    chat_id: int
    system: str | None
    started: datetime
    """The chat's beginning, for templates that state the date."""
    messages: tuple[Said, ...]
    """Ends with a user's message."""
    sampling: Mapping[str, Any]
    """What the user has set, by parameter name; the rest is as the backend has it."""
    enable_thinking: bool | None = None
    keep_reasoning: bool = False
    partial: RequestOutput | None = None
    """An answer to the last message that is to go on."""


@dataclass(frozen=True, slots=True)
class DropOffer:
    """Leaving out this many of the oldest turns makes the prompt fit."""

    turns: int
    tokens_before: int
    tokens_after: int
    limit: int
    is_estimate: bool = False
    """Whether ``tokens_after`` was reckoned from the texts' lengths."""


class Refused(NanochatError):
    """The turn can't be answered as it is; the message says why, and ``offer`` what would make it fit."""

    def __init__(self, message: str, offer: DropOffer | None = None) -> None:
        super().__init__(message)
        self.offer = offer


class AnswerHandle(Protocol):
    """One answer under way; methods are for any thread."""

    @property
    def request_id(self) -> int:
        """As in the rows of :class:`BackendStats`."""

    @property
    def done(self) -> bool:
        """Whether it has ended; events may still be waiting to be taken."""

    def __iter__(self) -> Iterator[Event]:
        """Events as they come, until the end; blocks."""

    def poll(self) -> list[Event]:
        """Events since the last call, oldest first."""

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end, at most ``timeout`` seconds.

        Raises:
            TimeoutError: it has not ended by then.
            NanochatError: the turn was refused before anything was said, as if it had not begun.
        """

    def cancel(self) -> None:
        """Ask for an early end; the text so far is kept. Harmless when repeated or too late."""


@dataclass(frozen=True, slots=True)
class Started:
    """An answer has begun, or waits for its turn."""

    handle: AnswerHandle
    reasoning_tags: tuple[str, str] | None
    opens_reasoning: bool = False
    """Whether the answer begins inside its reasoning."""
    partial: RequestOutput | None = None
    """The answer that goes on, as far as the backend was given it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a backend is and can do; it doesn't change."""

    model: str
    """Printable, on one line."""
    place: str
    """Where and how it runs, in a few words: ``cpu · kv bfloat16``, or a server's address."""
    description: str
    """The same in a sentence or two."""
    context_limit: int | None
    """Longest prompt plus answer, in tokens; None where that isn't known."""
    reasoning_tags: tuple[str, str] | None
    """What encloses the reasoning in answers; None for a model without any."""
    has_template: bool = True
    """Whether the model was made to chat."""
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    """What holds where the user sets nothing, by parameter name."""
    knows_defaults: bool = True
    """Whether ``default_sampling`` is the truth: a server doesn't tell its own."""
    tells_tokens: bool = True
    """Whether answers come with their token ids, and with all that they cost."""
    refresh_s: float | None = None
    """How often its figures change also while no chat of ours is answering; None: never."""


class Backend(Protocol):
    """What answers chats. All methods but :meth:`start` and :meth:`count` return at once; each is for any thread."""

    @property
    def about(self) -> About: ...

    def start(self, turn: Turn) -> Started:
        """Begin to answer; may take as long as encoding a long prompt does.

        Raises:
            Refused: the prompt is too long, or asks for what this backend can't do.
            NanochatError: it can't be answered for another reason.
        """

    def count(self, turn: Turn) -> int | None:
        """Tokens of the prompt, with the partial answer; None where they can't be known. May take as long as
        :meth:`start`, and raises what its prompt raises.
        """

    def forget(self, chat_id: int) -> None:
        """The chat was closed."""

    def stats(self, *, is_shown: bool = True) -> BackendStats:
        """What it is doing. Not ``is_shown``: nobody looks, so nothing need be fetched for it."""

    def block_map(self) -> BlockMap | None:
        """Who holds each KV block; None where that isn't known."""

    def close(self, wait_s: float = 0.0) -> None:
        """End every answer and all threads within seconds. Harmless when repeated.

        Whoever needs the memory that a long step uses waits so much longer for its end.
        """
