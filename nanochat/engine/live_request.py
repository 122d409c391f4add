"""A request on its way to its caller: turns accepted tokens into text, events and a final output.

Sits between the scheduler's :class:`Request` and the caller's :class:`RequestHandle`; decides nothing
about who runs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from nanochat.engine.detokenizer import Detokenizer
from nanochat.engine.handle import RequestHandle
from nanochat.engine.outputs import Event, RequestMetrics, RequestOutput, TokenLogprobs, decode_rate
from nanochat.engine.request import FinishReason, Request, RequestStatus

logger = logging.getLogger(__name__)


class LiveRequest:
    """One request between submission and its last event. Used on the step thread only."""

    def __init__(self, request: Request, handle: RequestHandle, detokenizer: Detokenizer) -> None:
        self.request = request
        self.handle = handle
        self.last_token_s: float | None = None
        self._detokenizer = detokenizer
        self._logprobs: list[TokenLogprobs] = []
        self._num_accepted = 0
        self._new_text: list[str] = []
        self._new_ids: list[int] = []

    def accept(self, token_id: int, logprobs: TokenLogprobs | None, now_s: float) -> bool:
        """Take a token the scheduler has accepted; True if a stop text is now complete."""
        self._num_accepted += 1
        self._new_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self.last_token_s = now_s
        # The token that ends an answer is no part of its text, be it special in the tokenizer or not.
        if token_id not in self.request.eos_token_ids or self.request.params.ignore_eos:
            self._new_text.append(self._detokenizer.push([token_id]))
        return self._detokenizer.stopped

    def emit(self) -> None:
        """Send what has gathered since the last event."""
        if self._new_ids:
            self.handle.push(self._take_event())

    def end(self, error: str | None = None) -> None:
        """Send the last event and the output. The request must have a finish reason."""
        try:
            self._new_text.append(self._detokenizer.flush())
        except Exception:  # what can't be made into text must not keep the end from its caller
            logger.exception("the end of request %d could not be turned into text", self.request.request_id)
        if self._detokenizer.stopped and self.request.finish_reason == "length":
            self.request.finish_reason = "stop"  # by the last token that was allowed
        output = self._output(error)
        self.handle.push(self._take_event(output.finish_reason), output)

    def metrics(self) -> RequestMetrics:
        """What the request has cost so far."""
        request = self.request
        scheduled, first = request.first_scheduled_s, request.first_token_s
        until_scheduled = scheduled if scheduled is not None else request.finished_s
        return RequestMetrics(
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=request.num_cached_tokens,
            completion_tokens=request.num_generated_tokens,
            queue_s=until_scheduled - request.arrival_s if until_scheduled is not None else 0.0,
            ttft_s=first - request.arrival_s if first is not None else None,
            decode_tok_s=self.decode_tok_s,
            preemptions=request.num_preemptions,
        )

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens after the first, per second."""
        request = self.request
        return decode_rate(request.num_generated_tokens, request.first_token_s, self.last_token_s)

    def _take_event(self, finish_reason: FinishReason | None = None) -> Event:
        text, ids = "".join(self._new_text), tuple(self._new_ids)
        # There is one for each token, or there are none at all.
        logprobs = tuple(self._logprobs[len(self._logprobs) - len(ids) :]) if self._logprobs else ()
        self._new_text, self._new_ids = [], []
        return Event(text, ids, finish_reason, logprobs, self.last_token_s)

    def _output(self, error: str | None) -> RequestOutput:
        request, begin = self.request, self.request.num_prompt_tokens
        if request.finish_reason is None:
            raise RuntimeError(f"request {request.request_id} was ended without a finish reason")
        return RequestOutput(
            text=self._detokenizer.text,
            token_ids=request.token_ids[
                begin : begin + self._num_accepted
            ],  # as many as callers have heard of
            finish_reason=request.finish_reason,
            error=error,
            logprobs=self._logprobs if request.params.logprobs is not None else None,
            metrics=self.metrics(),
        )


def end_abandoned(requests: Sequence[LiveRequest], because: str) -> None:
    """Give callers their end while the step thread computes; whatever it delivers later reaches nobody."""
    for live in requests:
        request = live.request
        is_finished = request.status is RequestStatus.FINISHED
        if not is_finished and request.finish_reason is None:
            request.finish_reason = "cancelled"
        try:
            live.end(None if is_finished and request.finish_reason != "error" else because)
        except Exception:  # the step thread was in the midst of its text
            logger.exception("request %d could not be ended in order", request.request_id)
