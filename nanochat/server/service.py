"""From a job to an answer under way: who may come in, the prompt's tokens, the sampling, the engine's requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from nanochat.engine.chat_template import ChatTemplate
from nanochat.engine.config import SamplingParams
from nanochat.engine.engine import Engine
from nanochat.errors import NanochatError, PromptTooLong, UnsupportedModel, one_line
from nanochat.server.answer import Answer, Choice
from nanochat.server.errors import ApiError, invalid, shutting_down
from nanochat.server.formats import ChatFormat, TextFormat
from nanochat.server.limits import MAX_REQUESTS
from nanochat.server.metrics import ServerMetrics
from nanochat.server.parsing import COMPLETION_TOKENS, Job, Messages, Prompt
from nanochat.server.reasoning import ReasoningSplitter
from nanochat.settings import Settings

_ENCODERS = 2
"""Threads that turn prompts into tokens: a long one must not hold up a short one."""
_SHRINK = 4
"""A normalizer makes a text shorter by no more than this."""


class Service:
    """An engine's answers to API requests. Used on one event loop."""

    def __init__(
        self,
        engine: Engine,
        *,
        settings: Settings | None = None,
        system: str | None = None,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        """``settings`` say how to sample where a request doesn't; ``system`` goes before chats that have none."""
        self.engine = engine
        self.model_name = engine.model_name
        self.created = int(time.time())
        self.metrics = ServerMetrics(engine, engine.model_name)
        self.names = {engine.model_name, engine.config.model}
        """What requests may call the model: also by what the server was started with, such as a Hub id."""
        self._settings = settings or Settings()
        self._system = system
        self._max_requests = max_requests
        self._template = ChatTemplate(engine.tokenizer)
        self._max_characters = _max_characters(engine)
        self._executor = ThreadPoolExecutor(_ENCODERS, thread_name_prefix="nanochat-encode")
        self._answers: set[Answer] = set()
        self._num_choices = 0
        self._is_closing = False

    async def start(self, job: Job, arrival_s: float) -> Answer:
        """Submit a job; the answer is the caller's to close.

        Raises:
            ApiError: it can't be answered; the message says why.
        """
        if job.model not in self.names:
            message = f"There is no model {job.model[:100]!r} here; this server has {self.model_name}."
            raise ApiError(404, message, param="model", code="model_not_found")
        if self._is_closing:
            raise shutting_down()
        self._admit(job)
        try:
            loop = asyncio.get_running_loop()
            choices = await loop.run_in_executor(self._executor, self._submit, job)
        except BaseException as error:
            self._num_choices -= job.num_choices
            if isinstance(error, UnsupportedModel) and job.template_kwargs:
                why = one_line(error.__cause__ or error)
                message = f"The model's chat template fails with these chat_template_kwargs: {why}."
                raise invalid(message, "chat_template_kwargs") from error
            if isinstance(error, NanochatError):
                raise ApiError.of(error, "messages" if job.kind == "chat" else "prompt") from error
            raise
        wire = ChatFormat if job.kind == "chat" else TextFormat
        answer = Answer(job, self.model_name, choices, wire, self.metrics, arrival_s, self._closed)
        self._answers.add(answer)
        if self._is_closing:  # meanwhile
            self._cancel(answer)
        return answer

    def close(self) -> None:
        """Take no more requests, and end those under way with an error."""
        self._is_closing = True
        for answer in list(self._answers):
            self._cancel(answer)
        self._executor.shutdown(wait=False)

    def _cancel(self, answer: Answer) -> None:
        answer.cancelled_because = shutting_down()
        answer.cancel()

    def _admit(self, job: Job) -> None:
        if job.num_choices > self._max_requests:
            raise invalid(f"This server gives {self._max_requests} answers at once at most.", "n")
        if self._num_choices + job.num_choices > self._max_requests:
            message = f"All {self._max_requests} places of this server are taken; try again later."
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"retry-after": "1"})
        self._num_choices += job.num_choices

    def _closed(self, answer: Answer) -> None:
        if answer in self._answers:
            self._answers.remove(answer)
            self._num_choices -= answer.job.num_choices

    # Everything below runs on a thread of the executor.

    def _submit(self, job: Job) -> list[Choice]:
        params = self._params(job)
        prompts = [ids for prompt in job.prompts for ids in [self._encode(prompt, job)] * job.n]
        tags, is_opened = None, False
        if job.kind == "chat" and (tags := self._template.reasoning_tags) is not None:
            is_opened = self._template.opens_reasoning(**job.template_kwargs)
        choices: list[Choice] = []
        try:
            for index, token_ids in enumerate(prompts):
                # A text goes on in the answer; a chat's prompt ends where one begins.
                continues = 0 if job.kind == "chat" else len(token_ids)
                handle = self.engine.submit(token_ids, _numbered(params, index % job.n), continues=continues)
                splitter = ReasoningSplitter(tags, is_opened=is_opened)
                tokenizer = self.engine.tokenizer
                wire = ChatFormat(tokenizer) if job.kind == "chat" else TextFormat(tokenizer, token_ids)
                has_logprobs = params.logprobs is not None
                choices.append(Choice(index, len(token_ids), handle, splitter, wire, has_logprobs))
        except BaseException:
            for choice in choices:
                choice.handle.cancel()
            raise
        return choices

    def _encode(self, prompt: Prompt, job: Job) -> list[int]:
        if job.kind == "chat":
            return self._encode_chat(prompt, job.template_kwargs)  # type: ignore[arg-type]
        if isinstance(prompt, str):
            self._check_length(len(prompt))
        return self.engine.encode(prompt)

    def _encode_chat(self, messages: Messages, template_kwargs: Mapping[str, Any]) -> list[int]:
        limit = self.engine.max_model_len
        if len(messages) >= limit:  # templates write at least a token for each
            raise PromptTooLong(
                f"The prompt has {len(messages):,} messages but at most {limit - 1:,} tokens fit."
            )
        self._check_length(sum(len(message["content"]) for message in messages))
        if self._system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        text = self._template.render(messages, **template_kwargs)
        self._check_length(len(text))  # the template may have written more, such as what it was told
        return self._template.encode(text)

    def _check_length(self, characters: int) -> None:
        """Refuse what can't possibly fit before it is turned into tokens, which holds up everything else."""
        if characters > self._max_characters:
            limit = self.engine.max_model_len
            raise PromptTooLong(
                f"The prompt has {characters:,} characters but at most {limit - 1:,} tokens fit."
            )

    def _params(self, job: Job) -> SamplingParams:
        """The request's sampling over the settings file's over the model's."""
        chosen = dict(job.sampling)
        if "max_tokens" not in self._settings.sampling:
            longest = self.engine.max_model_len if job.kind == "chat" else COMPLETION_TOKENS
            chosen.setdefault("max_tokens", longest)
        return self._settings.sampling_params(self.engine.default_sampling, chosen)


def _numbered(params: SamplingParams, number: int) -> SamplingParams:
    """Answers to one prompt differ, and are the same again for the same seed."""
    if params.seed is None or not number:
        return params
    return replace(params, seed=(params.seed + number + 2**63) % 2**64 - 2**63)


def _max_characters(engine: Engine) -> int:
    """No prompt of more characters fits: every token stands for so many at most."""
    backend = engine.tokenizer.backend_tokenizer
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
    return engine.max_model_len * longest * (1 if backend.normalizer is None else _SHRINK)
