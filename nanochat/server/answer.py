"""One request on its way through the engine: its choices, what is new of each, and what it all cost."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from nanochat.engine.handle import RequestHandle, take_events
from nanochat.engine.outputs import Event
from nanochat.server.errors import ApiError
from nanochat.server.formats import ChatFormat, Format, Piece, TextFormat
from nanochat.server.metrics import ServerMetrics
from nanochat.server.parsing import Job
from nanochat.server.reasoning import ReasoningSplitter
from nanochat.server.wire import DONE, to_event

MAX_EVENTS = 64
"""Events with log-probabilities that are put together into one piece."""


class Choice:
    """One of the answers to a request."""

    def __init__(
        self,
        index: int,
        prompt_tokens: int,
        handle: RequestHandle,
        splitter: ReasoningSplitter,
        wire: Format,
        has_logprobs: bool,
    ) -> None:
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.handle = handle
        self.is_counted = False
        """Whether its end is in the metrics."""
        self.completion_tokens = 0
        self.last_token_s: float | None = None
        self._splitter = splitter
        self._format = wire
        self._has_logprobs = has_logprobs
        self._pieces: list[Piece] = []

    def take(self, events: Sequence[Event]) -> Piece:
        """What these events bring, put together."""
        reasoning, answer = self._splitter.push("".join(event.text for event in events))
        finish_reason = events[-1].finish_reason
        if finish_reason is not None:
            last_reasoning, last_answer = self._splitter.flush()
            reasoning, answer = reasoning + last_reasoning, answer + last_answer
        self.completion_tokens += sum(len(event.token_ids) for event in events)
        logprobs = [entry for event in events for entry in event.logprobs] if self._has_logprobs else None
        return Piece(reasoning, answer, logprobs, finish_reason)

    def keep(self, piece: Piece) -> None:
        """For `whole`."""
        self._pieces.append(piece)

    def whole(self) -> dict[str, Any]:
        """All that was kept, as the API writes it."""
        pieces = self._pieces
        logprobs = [entry for piece in pieces for entry in piece.logprobs or ()]
        everything = Piece(
            "".join(piece.reasoning for piece in pieces),
            "".join(piece.answer for piece in pieces),
            logprobs if self._has_logprobs else None,
            pieces[-1].finish_reason,
        )
        return self._format.whole(self.index, everything)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """A piece as the API writes it in a stream."""
        return self._format.chunk(self.index, piece)


class Answer:
    """All choices of one request. Belongs to the event loop; whoever takes it must :meth:`close` it."""

    def __init__(
        self,
        job: Job,
        model_name: str,
        choices: Sequence[Choice],
        wire: type[ChatFormat] | type[TextFormat],
        metrics: ServerMetrics,
        arrival_s: float,
        on_close: Callable[[Answer], None],
    ) -> None:
        self.job = job
        self.cancelled_because: ApiError | None = None
        """What its client is told if the server has cancelled it."""
        self._choices = choices
        self._wire = wire
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._on_close = on_close
        self._about = {"created": int(time.time()), "model": model_name}
        self._id = wire.id_prefix + uuid.uuid4().hex

    @property
    def has_logprobs(self) -> bool:
        """Whether it tells log-probabilities, whose spelling and writing may take seconds."""
        return "logprobs" in self.job.sampling

    def cancel(self) -> None:
        """End it early; its blocks are free within a step."""
        for choice in self._choices:
            choice.handle.cancel()

    def close(self) -> None:
        """Nobody wants more of it."""
        self.cancel()
        for choice in self._choices:
            if not choice.is_counted:
                self._metrics.ended("cancelled")
        self._on_close(self)

    async def whole(self) -> dict[str, Any]:
        """The answer once it is complete.

        Raises:
            ApiError: it has failed, or was cancelled.
        """
        async with aclosing(self._pieces()) as pieces:
            async for choice, piece in pieces:
                choice.keep(piece)

        def written() -> list[dict[str, Any]]:
            return [choice.whole() for choice in self._choices]

        # On the event loop, no stream would go on meanwhile.
        choices = await asyncio.to_thread(written) if self.has_logprobs else written()
        return {
            "id": self._id,
            "object": self._wire.object_name,
            **self._about,
            "choices": choices,
            "usage": self._usage(),
            "system_fingerprint": None,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events, the last of them ``[DONE]``; a failure is one of them."""
        try:
            async with aclosing(self._pieces()) as pieces:
                async for choice, piece in pieces:
                    is_empty = not (piece.reasoning or piece.answer or piece.logprobs)
                    if not is_empty or piece.finish_reason is not None:
                        yield self._chunk([choice.chunk(piece)])
        except ApiError as error:
            yield to_event(error.body())
        else:
            if self.job.include_usage:
                yield self._chunk([], is_last=True)
        yield DONE

    def _chunk(self, choices: list[dict[str, Any]], *, is_last: bool = False) -> bytes:
        chunk = {"id": self._id, "object": self._wire.chunk_name, **self._about, "choices": choices}
        if self.job.include_usage or self.job.continuous_usage:
            chunk["usage"] = self._usage() if is_last or self.job.continuous_usage else None
        return to_event(chunk)

    async def _pieces(self) -> AsyncGenerator[tuple[Choice, Piece]]:
        async with aclosing(take_events([choice.handle for choice in self._choices])) as taken:
            async for index, events in taken:
                choice = self._choices[index]
                self._measure(choice, events)
                # What a slow client has left lying may be much: other streams have their turn in between.
                most = MAX_EVENTS if self.has_logprobs else len(events)
                for first in range(0, len(events), most):
                    if first:
                        await asyncio.sleep(0)
                    piece = choice.take(events[first : first + most])
                    if piece.finish_reason not in ("cancelled", "error"):
                        yield choice, piece
                        continue
                    yield choice, replace(piece, finish_reason=None)
                    raise self._why_ended(choice)

    def _why_ended(self, choice: Choice) -> ApiError:
        if self.cancelled_because is not None:
            return self.cancelled_because
        return ApiError(500, choice.handle.result().error or "The answer was cancelled.")

    def _usage(self) -> dict[str, Any]:
        """Of several choices from one prompt, the prompt counts once."""
        firsts = self._choices[:: self.job.n]
        prompt_tokens = sum(choice.prompt_tokens for choice in firsts)
        completion_tokens = sum(choice.completion_tokens for choice in self._choices)
        details = None
        if all(choice.handle.done for choice in firsts):
            details = {"cached_tokens": sum(c.handle.result().metrics.cached_tokens for c in firsts)}
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": details,
        }

    def _measure(self, choice: Choice, events: Sequence[Event]) -> None:
        """By the engine's clock: how fast the client reads is no matter of the engine's latencies."""
        metrics = self._metrics
        for event in events:
            if event.token_ids and event.time_s is not None:
                if choice.last_token_s is None:
                    metrics.ttft_s.observe(event.time_s - self._arrival_s)
                    metrics.prompt_tokens.inc(choice.prompt_tokens)
                else:
                    for _ in event.token_ids:
                        metrics.itl_s.observe((event.time_s - choice.last_token_s) / len(event.token_ids))
                choice.last_token_s = event.time_s
            if event.finish_reason is not None:
                choice.is_counted = True
                metrics.ended(event.finish_reason)
                metrics.whole_s.observe(time.monotonic() - self._arrival_s)
                metrics.queue_s.observe(choice.handle.result().metrics.queue_s)
