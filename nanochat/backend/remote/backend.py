"""A server as a backend: its answers stream on an event loop with a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import httpx2
import openai

from nanochat.backend.interface import About, Refused, Started, Turn
from nanochat.backend.remote.client import TooMuch, make_client, make_http
from nanochat.backend.remote.config import RemoteConfig
from nanochat.backend.remote.errors import Explainer, message_of
from nanochat.backend.remote.handle import RemoteHandle
from nanochat.backend.remote.metrics import read_page
from nanochat.backend.remote.models import ServedModel, choose, served_models
from nanochat.backend.remote.monitor import Monitor, OwnFigures
from nanochat.backend.remote.request import REASONING_TAGS, adapted, num_characters, request_of
from nanochat.backend.remote.stream import Answer, ChatContext
from nanochat.backend.remote.whole import whole_answer
from nanochat.backend.stats import BackendStats
from nanochat.engine.config import SamplingParams
from nanochat.engine.progress import Progress, ProgressCallback, ignore_progress
from nanochat.engine.stats import BlockMap
from nanochat.errors import EngineClosed, NanochatError

logger = logging.getLogger(__name__)

THEIRS = "figures of the whole server"
OURS = "your own; the server tells none"
METRICS_INTERVAL_S = 1.0
LOOK_AGAIN_S = 30.0
"""Where there was no page of metrics, it is looked for so much later."""
METRICS_TIMEOUT_S = 5.0
SHOWN_S = 2.5
"""Whoever shows the figures asks for them at least this often."""
CLOSE_TIMEOUT_S = 2.0
WAIT_S = 0.05
MAX_ADAPTIONS = 2


class RemoteBackend:
    """Chat completions of one model. Methods are for any thread."""

    def __init__(self, config: RemoteConfig, progress: ProgressCallback = ignore_progress) -> None:
        """Connect; blocks until the model is known.

        Args:
            progress: told again and again while it takes long; what it raises ends the attempt.

        Raises:
            NanochatError: there is no such server or model, it lets nobody in, or the key isn't where it should be.
        """
        key = config.key()
        self._explain = Explainer(config, key)
        self._config = config
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._answers: dict[int, Answer] = {}
        self._contexts: dict[int, ChatContext] = {}
        """By chat id. Answers hold their own, so that what ends after its chat was closed brings none back."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Of the answers, by request id; event loop only, as is the next."""
        self._running: set[asyncio.Task[Any]] = set()
        self._monitor, self._own = Monitor(), OwnFigures()
        self._shown_s = 0.0
        self._is_closed = False
        self._http = make_http(config, key)
        self._client = make_client(config, self._http)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="nanochat-remote", daemon=True)
        self._thread.start()
        try:
            self._model: ServedModel = self._wait(self._call(self._find_model()), progress)
        except BaseException:
            self.close()
            raise
        self.about = self._describe()
        self._watching = self._call(self._watch())

    # The interface

    def start(self, turn: Turn) -> Started:
        """Send the turn; what comes of it is the handle's to tell.

        Raises:
            Refused: an answer that ended early can't go on here.
            InvalidOption: a setting can't work.
            EngineClosed: the connection was closed.
        """
        if turn.partial is not None:
            raise Refused("A server can't go on with an answer that ended early; /again asks anew.")
        SamplingParams(**turn.sampling)
        request = request_of(turn, self._model.id)
        handle = RemoteHandle(next(self._ids), self._cancel)
        context = self._contexts.setdefault(turn.chat_id, ChatContext())
        answer = Answer(handle, context, self._own.tokens)
        with self._lock:
            if self._is_closed:
                raise EngineClosed(f"The connection to {self._explain.place} has been closed.")
            self._answers[handle.request_id] = answer
            self._loop.call_soon_threadsafe(self._begin, answer, turn, request)
        return Started(handle, REASONING_TAGS)

    def count(self, turn: Turn) -> None:
        return None  # the server alone could tell

    def forget(self, chat_id: int) -> None:
        self._contexts.pop(chat_id, None)

    def stats(self, *, is_shown: bool = True) -> BackendStats:
        """The server's figures where it has any; of our own answers else."""
        now_s = time.monotonic()
        if is_shown:
            self._shown_s = now_s
        with self._lock:
            rows = tuple(answer.row() for answer in self._answers.values() if not answer.handle.done)
        begun = sum(row.state == "decode" for row in rows)
        own = replace(
            self._own.figures(now_s), running=begun, waiting=len(rows) - begun, requests=rows, source=OURS
        )
        told = self._monitor.figures(now_s)
        return own if told is None else completed(replace(told, source=THEIRS), own)

    def block_map(self) -> BlockMap | None:
        """A server doesn't tell."""
        return None

    def close(self, wait_s: float = 0.0) -> None:
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._shut_down()))
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S + wait_s)

    # Connecting

    async def _find_model(self) -> ServedModel:
        try:
            models = await served_models(self._client)
        except openai.NotFoundError:
            models = None  # it doesn't list them
        except (openai.APIError, httpx2.HTTPError, TooMuch) as error:
            raise NanochatError(self._explain.sentence(error)) from error
        except Exception as error:  # whatever a server can cause is to end in a sentence
            raise NanochatError(
                self._explain.no_such_server("its /v1/models is not a list of models")
            ) from error
        return choose(models, self._config.model, self._explain)

    def _describe(self) -> About:
        model, limit = self._explain.words(self._model.id, 200), self._model.context_limit
        known = f"at most {limit:,} tokens a chat" if limit else "its context limit is not told"
        return About(
            model=model,
            place=self._explain.place,
            description=(
                f"{model} on the server at {self._explain.words(self._config.base_url, 200)}; {known}. "
                "/model NAME chooses another of the server's models."
            ),
            context_limit=limit,
            reasoning_tags=REASONING_TAGS,
            knows_defaults=False,
            tells_tokens=False,
            refresh_s=METRICS_INTERVAL_S,
        )

    def _wait(self, future: Future[Any], progress: ProgressCallback) -> Any:
        stage = Progress(f"Connecting to {self._explain.place}")
        while True:
            progress(stage)
            with suppress(TimeoutError):  # it may have ended just now, or with that error of its own
                return future.result(WAIT_S)
            if future.done():
                return future.result()

    # Answering: all that follows runs on the event loop

    def _begin(self, answer: Answer, turn: Turn, request: dict[str, Any]) -> None:
        task = self._loop.create_task(self._answer(answer, turn, request))
        request_id = answer.handle.request_id
        self._tasks[request_id] = task
        self._running.add(task)

        def done(_: asyncio.Task[None]) -> None:
            if not answer.handle.done:  # it was cancelled before it had begun
                answer.end("cancelled")
            self._tasks.pop(request_id, None)
            self._running.discard(task)
            with self._lock:
                self._answers.pop(request_id, None)

        task.add_done_callback(done)

    async def _answer(self, answer: Answer, turn: Turn, request: dict[str, Any]) -> None:
        try:
            await self._stream(answer, request)
        except asyncio.CancelledError:
            answer.end("cancelled")
        except Exception as error:  # whatever it is, who waits for the answer must hear of it
            if answer.has_begun:
                answer.end("error", self._explain.lost(error))
            elif isinstance(error, openai.APIError) and not isinstance(error, openai.APIConnectionError):
                limit = self._model.context_limit
                answer.handle.refuse(self._explain.refusal(error, turn, num_characters(request), limit))
            else:
                answer.handle.refuse(NanochatError(self._explain.sentence(error)))
        else:
            self._end(answer)
        usage = answer.usage
        if usage is not None:
            answer.context.num_tokens = usage[0] + usage[2]

    async def _stream(self, answer: Answer, request: dict[str, Any]) -> None:
        for _ in range(MAX_ADAPTIONS + 1):
            try:
                stream = await self._client.chat.completions.create(**request)
                break
            except openai.APIStatusError as error:
                other = adapted(request, message_of(error)) if error.status_code in (400, 422) else None
                if other is None:
                    raise
                request = other
        async with stream:
            whole = await whole_answer(stream.response)
            if whole is not None:
                answer.take(whole)
                return
            async for chunk in stream:
                had_begun = answer.has_begun
                answer.take(chunk)
                if answer.has_begun and not had_begun and answer.first_s is not None:
                    self._own.first_token(answer.first_s - answer.started_s)
                if answer.is_full:
                    return

    def _end(self, answer: Answer) -> None:
        """The stream has ended without an error."""
        if answer.is_full:
            answer.end("error", "The answer has become too long to be taken; it was ended here.")
        elif answer.wants_tool and not answer.has_begun:
            answer.handle.refuse(
                NanochatError(
                    f"{self._explain.place} calls a tool instead of answering; there are none here."
                )
            )
        elif answer.is_complete:
            answer.end()
        elif answer.has_begun:
            answer.end("error", self._explain.lost(None))
        else:
            answer.handle.refuse(
                NanochatError(
                    f"{self._explain.place} has ended the answer before it began; its log may say why."
                )
            )

    def _cancel(self, request_id: int) -> None:
        """Called on any thread."""

        def cancel() -> None:
            if (task := self._tasks.get(request_id)) is not None:
                task.cancel()

        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(cancel)

    # The page of metrics

    async def _watch(self) -> None:
        next_s = 0.0
        while True:
            now_s = time.monotonic()
            if now_s - self._shown_s < SHOWN_S and now_s >= next_s:
                next_s = now_s + (0.0 if await self._look() else LOOK_AGAIN_S)
            await asyncio.sleep(METRICS_INTERVAL_S)

    async def _look(self) -> bool:
        """As :meth:`_fetch`; a page that nobody has foreseen doesn't end the watch: the next may be a good one."""
        try:
            return await self._fetch()
        except Exception as error:  # its words are the server's, and are not repeated
            logger.warning("a page of metrics was passed over: %s", type(error).__name__)
            return False

    async def _fetch(self) -> bool:
        """Read the page; False if the server has none."""
        try:
            response = await self._http.get(self._config.metrics_url, timeout=METRICS_TIMEOUT_S)
        except (httpx2.HTTPError, TooMuch):
            return True  # it may be starting
        if response.status_code != 200:
            return response.status_code >= 500  # it may be starting; else it has none, or none for us
        # Not by the charset that the server names: of Python's, some decode to no text at all.
        page = read_page(response.content.decode("utf-8", errors="replace"), self._model.id)
        if page is not None:
            self._monitor.feed(page, time.monotonic())
        return page is not None

    # The loop and its thread

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run it on the loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(self._tracked(coroutine), self._loop)

    async def _tracked(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.create_task(coroutine)
        self._running.add(task)
        try:
            return await task
        finally:
            self._running.discard(task)

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    async def _shut_down(self) -> None:
        for task in self._running:  # ours only: the libraries' own tasks end with them, in good order
            task.cancel()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(others, timeout=CLOSE_TIMEOUT_S / 2) if others else None
        try:
            await self._http.aclose()
        finally:
            self._loop.stop()


def completed(told: BackendStats, own: BackendStats) -> BackendStats:
    """The server's figures; where it tells none, those measured here."""
    unknown = [field.name for field in fields(told) if getattr(told, field.name) in (None, ())]
    return replace(told, **{name: getattr(own, name) for name in unknown})
