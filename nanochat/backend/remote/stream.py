"""One answer as it streams: from the API's chunks to events, and to an output at its end.

Whatever the chunks hold is looked at before it is used: the server may be broken, or hostile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanochat.backend.remote.handle import RemoteHandle
from nanochat.backend.remote.request import REASONING_TAGS
from nanochat.engine.outputs import Event, RequestMetrics, RequestOutput, decode_rate
from nanochat.engine.request import FinishReason
from nanochat.engine.stats import RequestRow
from nanochat.sanitize import encodable

MAX_CHARACTERS = 500_000
"""Of one answer, about 125,000 tokens; what comes after is not taken, and the screen could hardly draw it."""
_MAX_TOKENS = 2**40
_REASONS: dict[str, FinishReason] = {"length": "length", "max_tokens": "length"}
_BROKEN = frozenset({"abort", "error"})
"""With these, servers tell that they have given up."""


@dataclass(slots=True)
class ChatContext:
    """What is known of a chat's context."""

    num_tokens: int = 0
    """After its last answer, as the server told."""


@dataclass(slots=True)
class Answer:
    """What has come so far. Changed on the event loop only; rows may be read from any thread."""

    handle: RemoteHandle
    context: ChatContext = field(default_factory=ChatContext)
    """Of its chat."""
    report: Callable[[int, float], object] = lambda tokens, now_s: None
    """Called with every piece's number of tokens and the time."""
    started_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    """Pieces of text; servers send one for a token, or sometimes for a few."""
    finish_reason: str | None = None
    texts: list[str] = field(default_factory=list)
    usage: tuple[int, int, int] | None = None
    """Tokens of the prompt, of those the cached ones, and of the answer."""
    _num_characters: int = 0
    _is_reasoning: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether any text has come."""
        return bool(self.texts)

    @property
    def is_full(self) -> bool:
        """Whether no more text is taken."""
        return self._num_characters >= MAX_CHARACTERS

    @property
    def is_complete(self) -> bool:
        """Whether the server has said how it ended."""
        if self.finish_reason in _BROKEN:
            return False
        return self.finish_reason is not None or self.usage is not None

    @property
    def wants_tool(self) -> bool:
        """Whether the model has ended with a call of a tool."""
        return self.finish_reason in ("tool_calls", "function_call")

    def take(self, chunk: Any) -> None:
        """The next chunk of the stream."""
        self._take_usage(getattr(chunk, "usage", None))
        choices = getattr(chunk, "choices", None)
        if not isinstance(choices, list) or not choices:
            return
        choice = choices[0]
        delta = getattr(choice, "delta", None)
        reasoning = _text(delta, "reasoning_content") or _text(delta, "reasoning")
        if reasoning:
            self._say(reasoning if self._is_reasoning else f"{REASONING_TAGS[0]}\n{reasoning}")
            self._is_reasoning = True
        # A refusal comes instead of the content: the model's own words, which the user must see.
        if content := _text(delta, "content") or _text(delta, "refusal"):
            self._say(f"\n{REASONING_TAGS[1]}\n\n{content}" if self._is_reasoning else content)
            self._is_reasoning = False
        reason = getattr(choice, "finish_reason", None)
        if isinstance(reason, str):
            self.finish_reason = reason

    def end(self, reason: FinishReason | None = None, error: str | None = None) -> None:
        """No more will come. ``reason`` None: the one that the server gave."""
        if reason is None:
            reason = _REASONS.get(self.finish_reason or "", "stop")
            if self.finish_reason == "content_filter":
                reason, error = "error", "The server's content filter has ended this answer."
        output = RequestOutput("".join(self.texts), [], reason, error, None, self._metrics())
        self.handle.push(Event("", (), reason), output)

    def row(self) -> RequestRow:
        """As the panel shows it."""
        state: Any = "queued" if self.first_s is None else "decode"
        return RequestRow(
            request_id=self.handle.request_id,
            state=state,
            prompt_tokens=0,
            prefill_done=0,
            prefill_total=0,
            context_tokens=self.context.num_tokens + self.num_tokens,
            generated_tokens=self.num_tokens,
            cached_tokens=0,
            preemptions=0,
            blocks=0,
            ttft_s=None if self.first_s is None else self.first_s - self.started_s,
            decode_tok_s=decode_rate(self.num_tokens, self.first_s, self.last_s),
        )

    def _say(self, text: str) -> None:
        text = encodable(text)[: MAX_CHARACTERS - self._num_characters]
        if not text:
            return
        now_s = time.monotonic()
        if self.first_s is None:
            self.first_s = now_s
        self.last_s = now_s
        self.num_tokens += 1
        self._num_characters += len(text)
        self.texts.append(text)
        self.report(1, now_s)
        self.handle.push(Event(text, (), tokens_without_ids=1))

    def _take_usage(self, usage: Any) -> None:
        if usage is None:
            return
        details = getattr(usage, "prompt_tokens_details", None)
        self.usage = (
            _number(usage, "prompt_tokens"),
            _number(details, "cached_tokens"),
            _number(usage, "completion_tokens"),
        )

    def _metrics(self) -> RequestMetrics:
        prompt, cached, completion = self.usage or (0, 0, self.num_tokens)
        return RequestMetrics(
            prompt_tokens=prompt,
            cached_tokens=min(cached, prompt),
            completion_tokens=completion,
            ttft_s=None if self.first_s is None else self.first_s - self.started_s,
            decode_tok_s=decode_rate(completion, self.first_s, self.last_s),
        )


def _text(delta: Any, name: str) -> str:
    value = getattr(delta, name, None)
    return value if isinstance(value, str) else ""


def _number(usage: Any, name: str) -> int:
    value: Any = getattr(usage, name, None)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return int(value) if is_number and 0 <= value < _MAX_TOKENS else 0
