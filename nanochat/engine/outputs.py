"""What a caller gets back: events while a request runs, and its output once it has ended."""

from __future__ import annotations

from dataclasses import dataclass

from nanochat.engine.request import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log, after temperature-free softmax) at one generated position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and theirs, best first."""


@dataclass(frozen=True, slots=True)
class Event:
    """New text and token ids of one request; the last event carries the finish reason."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token id, if they were asked for."""
    time_s: float | None = None
    """When its last token came, on the monotonic clock; None before any has."""
    tokens_without_ids: int = 0
    """Tokens that another engine made, which tells text alone; an estimate."""

    @property
    def num_tokens(self) -> int:
        """How many tokens the text came from."""
        return len(self.token_ids) + self.tokens_without_ids


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """What one request cost. Times in seconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose K/V came from the prefix cache."""
    completion_tokens: int = 0
    queue_s: float = 0.0
    """From submission until first scheduled."""
    ttft_s: float | None = None
    """From submission until the first token; None if none came."""
    decode_tok_s: float | None = None
    """Tokens after the first, per second; None below two tokens."""
    preemptions: int = 0


def decode_rate(num_tokens: int, first_s: float | None, last_s: float | None) -> float | None:
    """Tokens after the first, per second; None below two tokens, or as long as no time has passed.

    Args:
        num_tokens: all that have come.
        first_s: when the first came; None before it.
        last_s: when the last came, or what the time is now, on the same clock.
    """
    if first_s is None or last_s is None or num_tokens < 2 or last_s <= first_s:
        return None
    return (num_tokens - 1) / (last_s - first_s)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The whole of a finished request."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    error: str | None
    logprobs: list[TokenLogprobs] | None
    metrics: RequestMetrics
