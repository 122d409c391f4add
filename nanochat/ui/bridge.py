"""Between a backend's threads and the app: submits turns, polls live requests, posts Textual messages.

Pull-based: the backend never calls into the app. A timer on the UI thread calls :meth:`Bridge.poll`,
which joins what has come for each chat into one message. Encoding a prompt may take long (a pasted
book), so prompts are submitted on a thread of their own. Widgets are not known here.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from textual.message import Message as TextualMessage

from nanochat.backend.interface import AnswerHandle, Backend, DropOffer, Refused, Turn
from nanochat.engine.config import SamplingParams
from nanochat.engine.outputs import RequestOutput
from nanochat.errors import NanochatError
from nanochat.sanitize import Sanitizer
from nanochat.ui.chat import Chat, Counted, Message
from nanochat.ui.restoring import joined_outputs

logger = logging.getLogger(__name__)

MAX_DELTA_INTERVAL_S = 0.09
"""However slowly a chat draws, its text is passed on this often."""
UNSEEN_INTERVAL_S = 0.5
"""A chat out of view draws nothing; its text is passed on this often, in time for being saved within a second."""
COST_FACTOR = 25.0
"""A chat whose last text took t of processor time gets the next one no sooner than this times t later: drawing takes at
most a 25th of the time, which a CPU's engine would miss, as long as a drawing takes under 4 ms."""


@dataclass
class AnswerStarted(TextualMessage):
    """The backend has taken the prompt."""

    chat_id: int
    handle: AnswerHandle
    reasoning_tags: tuple[str, str] | None
    opens_reasoning: bool = False
    """Whether the answer begins inside its reasoning."""
    partial: RequestOutput | None = None
    """The answer that goes on, as far as the backend was given it."""


@dataclass
class AnswerRefused(TextualMessage):
    """The prompt can't run; ``error`` is a sentence, ``offer`` what would make it fit."""

    chat_id: int
    error: str
    offer: DropOffer | None = None


@dataclass(frozen=True, slots=True)
class Grown:
    """New sanitised text of a chat, and how many tokens it came from."""

    chat_id: int
    text: str
    num_tokens: int


@dataclass
class AnswersGrew(TextualMessage, bubble=False):
    """New text of one or more chats: one message for all that has come at a time."""

    grown: list[Grown]


@dataclass
class ContextCounted(TextualMessage):
    """What a chat comes to."""

    chat_id: int
    counted: Counted


@dataclass
class AnswerEnded(TextualMessage):
    """The answer is complete, stopped, or has failed."""

    chat_id: int
    output: RequestOutput


@dataclass(slots=True)
class _Live:
    handle: AnswerHandle
    sanitizer: Sanitizer
    partial: RequestOutput | None
    passed_on_s: float = 0.0
    """When its last text was passed on."""
    not_before_s: float = 0.0
    rest_s: float | None = 0.0
    """How long after one text the next is passed on; None: at the moments for all chats out of view."""
    is_stopped: bool = False
    """Its end is waited for."""

    def begin_rest(self, now_s: float) -> None:
        """A text is passed on now."""
        rest_s = UNSEEN_INTERVAL_S - now_s % UNSEEN_INTERVAL_S if self.rest_s is None else self.rest_s
        self.passed_on_s, self.not_before_s = now_s, now_s + rest_s


class Bridge:
    """One for the app; all methods are for the UI thread."""

    def __init__(
        self,
        backend: Backend,
        sampling: Mapping[str, Any],
        post: Callable[[TextualMessage], object],
        keep: Callable[[int, str, Sequence[int]], object] = lambda chat_id, text, token_ids: None,
        keep_end: Callable[[int, RequestOutput], object] = lambda chat_id, output: None,
    ) -> None:
        """Connect a backend with the app.

        Args:
            sampling: settings over the backend's own, by parameter name.
            post: must be thread-safe.
            keep: called on the UI thread with each chat's id, its new text as the model wrote it, and the
                text's ids, as soon as they are known.
            keep_end: called there with each chat's id and its whole answer, as soon as that has ended.
        """
        self.backend = backend
        self._sampling = dict(sampling)
        self._post = post
        self._keep = keep
        self._keep_end = keep_end
        self._live: dict[int, _Live] = {}
        self._prompts: queue.SimpleQueue[Turn | _ToCount | int | None] = queue.SimpleQueue()
        """Turns to submit and to count, ids of chats to forget, and the end; in the order in which they came."""
        self._stopping: set[int] = set()
        threading.Thread(target=self._submit_prompts, name="nanochat-submit", daemon=True).start()

    @property
    def is_active(self) -> bool:
        """Whether any request is live."""
        return bool(self._live)

    def sampling_params(self, overrides: Mapping[str, Any]) -> SamplingParams:
        """A chat's settings over the user's and the backend's.

        Raises:
            InvalidOption: a value can't work.
        """
        return SamplingParams(**{**self.backend.about.default_sampling, **self._sampling, **overrides})

    def known_settings(self, overrides: Mapping[str, Any]) -> frozenset[str] | None:
        """Names of the settings whose value is known here; None: all, as a server keeps its own to itself."""
        known = self.backend.about.knows_defaults
        return None if known else frozenset({**self._sampling, **overrides})

    def submit(self, chat: Chat) -> None:
        """Send the chat's path up to its last question; :class:`AnswerStarted` or a refusal follows."""
        self._stopping.discard(chat.id)
        self._prompts.put(self._turn(chat, chat.live, chat.live.partial if chat.live is not None else None))

    def count(self, chat: Chat) -> None:
        """Have the context of a chat at rest be counted; :class:`ContextCounted` follows."""
        answer = chat.last_answer
        counted = chat.counted = Counted(chat.path[-1], chat.left_out)
        turn = self._turn(chat, answer, answer.output if answer is not None else None)
        self._prompts.put(_ToCount(turn, counted))

    def _turn(self, chat: Chat, answer: Message | None, partial: RequestOutput | None) -> Turn:
        return Turn(
            chat_id=chat.id,
            system=chat.system,
            started=chat.started,
            messages=tuple(message for message in chat.context if message is not answer),
            sampling={**self._sampling, **chat.sampling},
            enable_thinking=chat.enable_thinking,
            keep_reasoning=chat.keep_reasoning,
            partial=partial,
        )

    def track(self, chat_id: int, handle: AnswerHandle, partial: RequestOutput | None = None) -> None:
        """Poll this handle from now on; its output goes on from ``partial``."""
        self._live[chat_id] = _Live(handle, Sanitizer(), partial)
        if chat_id in self._stopping:
            self._stopping.discard(chat_id)
            handle.cancel()

    def stop(self, chat_id: int) -> None:
        """End the chat's answer early, also one that is still being submitted."""
        if (live := self._live.get(chat_id)) is not None:
            live.handle.cancel()
            live.is_stopped = True
        else:
            self._stopping.add(chat_id)

    def forget(self, chat_id: int) -> None:
        """The chat was closed: end its answer, of which what has come is kept, and drop the rest."""
        if (live := self._live.pop(chat_id, None)) is not None:
            self._finish(chat_id, live)
        self._prompts.put(chat_id)  # behind its prompts that still wait, which would bring it back

    def request_ids(self) -> dict[int, int]:
        """Live request ids, each with its chat's id."""
        return {live.handle.request_id: chat_id for chat_id, live in self._live.items()}

    def poll(self, now_s: float | None = None) -> None:
        """Post what has come since the last call. ``now_s``: the monotonic clock."""
        now_s = time.monotonic() if now_s is None else now_s
        grown: list[Grown] = []
        ended: list[TextualMessage] = []
        for chat_id, live in list(self._live.items()):
            is_done = live.handle.done  # before poll: nothing comes after the end
            if now_s < live.not_before_s and not is_done:
                continue
            if text := self._take(chat_id, live):
                grown.append(text)
                live.begin_rest(now_s)
            if is_done:
                del self._live[chat_id]
                ended.append(self._end(chat_id, live))
        if grown:
            self._post(AnswersGrew(grown))
        for message in ended:
            self._post(message)

    def _end(self, chat_id: int, live: _Live) -> AnswerEnded | AnswerRefused:
        """What has become of an answer that is done."""
        try:
            output = live.handle.result(timeout=0)
        except NanochatError as error:
            return _refusal(chat_id, error)
        if live.partial is not None:
            output = joined_outputs(live.partial, output)
        self._keep_end(chat_id, output)
        return AnswerEnded(chat_id, output)

    def _finish(self, chat_id: int, live: _Live) -> None:
        """End an answer that nobody waits for any more; what has come of it is kept."""
        is_done = live.handle.done  # before taking: nothing comes after the end
        self._take(chat_id, live)
        if is_done:
            self._end(chat_id, live)
        else:
            live.handle.cancel()

    def rest_s(self, now_s: float | None = None) -> float:
        """Seconds until anything of any chat may be passed on; 0 or less: it may be now."""
        now_s = time.monotonic() if now_s is None else now_s
        times = (now_s if live.is_stopped else live.not_before_s for live in self._live.values())
        return min(times, default=now_s) - now_s

    def _take(self, chat_id: int, live: _Live) -> Grown | None:
        events = live.handle.poll()
        if not events:
            return None
        raw = "".join(event.text for event in events)
        token_ids = [token_id for event in events for token_id in event.token_ids]
        num_tokens = sum(event.num_tokens for event in events)
        self._keep(chat_id, raw, token_ids)
        return Grown(chat_id, live.sanitizer.feed(raw), num_tokens)

    def report_cost(self, chat_id: int, cost_s: float | None, now_s: float | None = None) -> None:
        """Showing the chat's texts takes so much processor time each; dear ones come seldom, and more at once.

        Args:
            cost_s: None: the chat is out of view.
            now_s: when its last text was passed on, if not by :meth:`poll`.
        """
        if (live := self._live.get(chat_id)) is not None:
            live.rest_s = None if cost_s is None else min(MAX_DELTA_INTERVAL_S, COST_FACTOR * cost_s)
            live.begin_rest(live.passed_on_s if now_s is None else now_s)

    def stop_all(self) -> None:
        """End every request. What has come until now is kept; nobody is told any more."""
        for chat_id, live in self._live.items():
            self._finish(chat_id, live)
        self._live.clear()

    def release(self) -> Backend:
        """End every request and the submitting thread, so that nothing here holds the backend; returns it."""
        self.stop_all()
        self._prompts.put(None)
        return self.backend

    def _count(self, wanted: _ToCount) -> None:
        """Runs on the submitting thread."""
        try:
            num_tokens = self.backend.count(wanted.turn)
        except (
            Exception
        ) as error:  # the template may raise anything; whoever sends the prompt will hear of it
            logger.info("a context could not be counted: %s", type(error).__name__)
        else:
            self._post(ContextCounted(wanted.turn.chat_id, replace(wanted.counted, num_tokens=num_tokens)))

    def _submit_prompts(self) -> None:
        """Runs on the submitting thread, a daemon that ends with the process or when it is released."""
        while (prompt := self._prompts.get()) is not None:
            if isinstance(prompt, int):
                self.backend.forget(prompt)
                continue
            if isinstance(prompt, _ToCount):
                self._count(prompt)
                continue
            try:
                started = self.backend.start(prompt)
            except NanochatError as error:
                self._post(_refusal(prompt.chat_id, error))
            except Exception as error:  # a chat template may raise anything; the chat must hear of it
                logger.exception("submitting failed")
                problem = f"The prompt could not be prepared ({type(error).__name__}: {error})."
                self._post(AnswerRefused(prompt.chat_id, problem))
            else:
                self._post(
                    AnswerStarted(
                        prompt.chat_id,
                        started.handle,
                        started.reasoning_tags,
                        started.opens_reasoning,
                        started.partial,
                    )
                )


@dataclass(frozen=True, slots=True)
class _ToCount:
    turn: Turn
    counted: Counted


def _refusal(chat_id: int, error: NanochatError) -> AnswerRefused:
    return AnswerRefused(chat_id, str(error), error.offer if isinstance(error, Refused) else None)
