"""The engine: takes prompts from any thread, runs them together on one step thread, streams tokens back.

One thread repeats: take what has come in, plan and launch a step, commit an earlier one, deliver its text.
``submit``, ``cancel``, ``stats`` and ``block_map`` may be called from any other thread.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from nanochat.engine.config import EngineConfig, SamplingParams
from nanochat.engine.cpu_threads import ThreadGovernor, choose_threads
from nanochat.engine.detokenizer import Detokenizer
from nanochat.engine.device import dtype_name
from nanochat.engine.handle import RequestHandle
from nanochat.engine.live_request import LiveRequest, end_abandoned
from nanochat.engine.loading import load_model, make_scheduler
from nanochat.engine.memory import kv_bytes_per_token
from nanochat.engine.outputs import TokenLogprobs
from nanochat.engine.pipeline import GPU_STEPS_AHEAD, Outcome, Pipeline
from nanochat.engine.progress import ProgressCallback, ignore_progress
from nanochat.engine.prompt import Prompt, encode_prompt
from nanochat.engine.ranks import RankMemory
from nanochat.engine.recorder import Holdings, Recorder
from nanochat.engine.request import FinishReason, Request, RequestStatus
from nanochat.engine.stats import BlockMap, EngineStats
from nanochat.engine.watchdog import Watchdog
from nanochat.errors import DeviceLost, EngineClosed, InvalidOption

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 4.0
"""How long :meth:`Engine.close` waits for the step in progress, before it ends the requests all the same."""
EXIT_TIMEOUT_S = 30.0
"""How long Python's own end waits for it."""


class Engine:
    """A loaded model and the thread that steps it. Use as a context manager, or :meth:`close` it.

    Attributes:
        tokenizer: the model's tokenizer, as ``transformers`` loads it.
        model_dir: folder of the model in Hugging Face form.
        default_sampling: the sampling settings that the model's makers recommend, by parameter name.
        closed_because: why it takes no more requests; None while it does.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        progress: ProgressCallback = ignore_progress,
        debug: bool = False,
        max_steps_ahead: int | None = None,
    ) -> None:
        """Load the model and start the step thread; blocks until both are done.

        Args:
            config: what to load and how; the default model on the best device if left out.
            progress: told of each stage of loading, on the calling thread.
            debug: check every invariant of the scheduler and the block pool whenever the engine is idle.
            max_steps_ahead: most steps in flight while another is planned, for whoever compares; what suits
                the device if left out. It changes no token.

        Raises:
            NanochatError: a subclass whose message says what to do.
        """
        self.config = config or EngineConfig()
        self._model = model = load_model(self.config, progress)
        self.tokenizer: Any = model.tokenizer
        self.model_dir: Path = model.folder
        self.default_sampling = dict(model.default_sampling)
        self._scheduler = make_scheduler(self.config, model)
        self._recorder = Recorder()
        self._debug = debug
        self._request_ids = itertools.count(1)
        self._random = random.SystemRandom()
        self._live: dict[int, LiveRequest] = {}  # step thread only, as are the next two
        self._collected: Outcome | None = None
        # Guards the scheduler and the recorder: held for planning and committing, never while computing.
        self._lock = threading.Lock()
        if max_steps_ahead is None:
            max_steps_ahead = 0 if model.device.type == "cpu" else GPU_STEPS_AHEAD
        self._pipeline = Pipeline(self._scheduler, model.runner, self._lock, max_steps_ahead)
        self._watchdog = Watchdog(self._pipeline.describe)
        on_cpu = model.device.type == "cpu"
        self._governor: ThreadGovernor | None = None
        if on_cpu and model.ranks is None:
            self._governor = ThreadGovernor(choose_threads(self.config.threads))
        elif on_cpu:  # time spent waiting for other ranks would look like somebody else's
            torch.set_num_threads(max(1, choose_threads(self.config.threads) // len(model.memory)))
        self._inbox_condition = threading.Condition()
        self._submitted: list[LiveRequest] = []
        self._cancelled: list[int] = []
        self.closed_because: str | None = None
        self._thread = threading.Thread(target=self._run, name="nanochat-engine", daemon=True)
        if model.ranks is not None:
            model.ranks.on_lost = self._wake
        self._thread.start()
        self._watchdog.start(self._thread)
        # Python would tear itself down under a thread that computes, which ends in an abort.
        atexit.register(self._exit)

    @property
    def model_name(self) -> str:
        return self._model.name

    @property
    def device_name(self) -> str:
        return self._model.device.type

    @property
    def compute_name(self) -> str:
        """What computes, in a few words: `LoadedModel.compute_name`."""
        return self._model.compute_name

    @property
    def dtype_name(self) -> str:
        return dtype_name(self._model.dtype)

    @property
    def kv_dtype_name(self) -> str:
        return dtype_name(self._model.kv_dtype)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self._model.max_model_len

    @property
    def kv_bytes_per_token(self) -> int:
        """Of one device's cache: a divided model's ranks have as much each."""
        return kv_bytes_per_token(self._model.runner.decoder.local, self._model.kv_dtype)

    @property
    def rank_memory(self) -> list[RankMemory]:
        """What each device holds of the model and its cache."""
        return list(self._model.memory)

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, continues: int | None = None
    ) -> RequestHandle:
        """Queue a prompt and return at once.

        Args:
            continues: how many of the prompt's last tokens are of one text with the answer, so that a tokenizer
                which begins a text without a space doesn't take it from the answer. None: all of a prompt
                that is text; of token ids and messages none, as chat templates end where an answer begins.

        Raises:
            PromptTooLong: it can never run; both lengths are in the message.
            InvalidOption: it is empty, or not a prompt, or has fewer tokens than ``continues``.
            UnsupportedModel: the model's tokenizer or chat template fails on it.
            EngineClosed: the engine has been closed, or its thread has died.
        """
        arrival_s = time.monotonic()
        params = params if params is not None else SamplingParams()
        token_ids = self.encode(prompt)
        self._scheduler.check_fits(len(token_ids))
        request = Request(
            request_id=next(self._request_ids),
            token_ids=token_ids,
            params=params,
            eos_token_ids=self._model.eos_token_ids,
            sampling_seed=params.seed if params.seed is not None else self._random.getrandbits(63),
            arrival_s=arrival_s,
        )
        handle = RequestHandle(request.request_id, self._cancel)
        if continues is None:
            continues = len(token_ids) if isinstance(prompt, str) else 0
        if not 0 <= continues <= len(token_ids):
            raise InvalidOption(
                f"A prompt of {len(token_ids):,} tokens can't be continued from its last {continues:,}."
            )
        before = token_ids[len(token_ids) - continues :]
        live = LiveRequest(request, handle, Detokenizer(self.tokenizer, params.stop, after=before))
        with self._inbox_condition:
            if self.closed_because is not None:
                raise EngineClosed(self.closed_because)
            self._submitted.append(live)
            self._inbox_condition.notify()
        return handle

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt's token ids, as :meth:`submit` makes them; it raises the same of them."""
        return encode_prompt(self.tokenizer, prompt, self._model.config.vocab_size)

    def stats(self) -> EngineStats:
        """A snapshot of counters, recent latencies and live requests."""
        with self._lock:
            stats = self._recorder.snapshot(self._scheduler, time.monotonic())
        slow = self._watchdog.slow()
        return stats if slow is None else replace(stats, slow_step=slow)

    def block_map(self) -> BlockMap:
        """Who holds each KV block. A step never waits for more than the copying of lists."""
        with self._lock:
            holdings = Holdings.of(self._scheduler)
        return holdings.block_map()

    def close(self, wait_s: float = 0.0) -> None:
        """Stop after the step in progress; what still runs ends as cancelled. Harmless when repeated.

        If the step takes longer than ``CLOSE_TIMEOUT_S``, requests end while it goes on; then it is waited for
        ``wait_s`` more. The model's memory is in use as long as it takes.
        """
        with self._inbox_condition:
            if self.closed_because is None:
                self.closed_because = "The engine has been closed."
            self._inbox_condition.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                with self._inbox_condition:
                    abandoned = [*self._submitted, *list(self._live.values())]
                end_abandoned(abandoned, self.closed_because)
                self._thread.join(wait_s)
        self._watchdog.close()
        if self._model.ranks is not None:
            self._model.ranks.close()
        if not self._thread.is_alive():
            atexit.unregister(self._exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _exit(self) -> None:
        self.close(EXIT_TIMEOUT_S)

    def _cancel(self, request_id: int) -> None:
        with self._inbox_condition:
            self._cancelled.append(request_id)
            self._inbox_condition.notify()

    def _wake(self) -> None:
        with self._inbox_condition:
            self._inbox_condition.notify()

    # Everything below runs on the step thread.

    def _run(self) -> None:
        ending: tuple[FinishReason, str] = ("cancelled", "The engine has been closed.")
        try:
            with torch.inference_mode():
                while self._take_inbox() and self._why_lost() is None:
                    with self._watchdog.step():
                        self._step()
            if (why_lost := self._why_lost()) is not None:
                ending = ("error", why_lost)
        except DeviceLost as error:
            logger.exception("the device is lost")
            ending = ("error", str(error))
        except (
            BaseException
        ) as error:  # a panic in native code is no Exception, and callers wait all the same
            logger.exception("the step thread died")
            ending = ("error", f"The engine stopped on an internal error ({error}); restart nanochat.")
        self._end_everything(*ending)

    def _take_inbox(self) -> bool:
        """Wait until there is something to do, and take in what has come; False once closed."""
        if not self._scheduler.has_work:
            self._deliver_collected()  # no launch follows
            while not self._has_news():
                with self._watchdog.step("recording a kind of step in a pause"):
                    if not self._model.runner.record_ahead():
                        break
        with self._inbox_condition:
            if not self._has_news() and not self._scheduler.has_work:
                self._idle()
                self._inbox_condition.wait_for(self._has_news)
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, []
            closed = self.closed_because is not None
        # All first: whatever goes wrong from here on, every one of them gets its end.
        self._live.update((live.request.request_id, live) for live in submitted)
        for live in submitted:
            with self._lock:
                self._scheduler.add(live.request)
        if cancelled:
            self._deliver_collected()  # a token that came before the cancel is not lost
        for request_id in cancelled:
            if request_id in self._live:
                self._finish(self._live[request_id], "cancelled")
        return not closed

    def _has_news(self) -> bool:
        has_news = self._submitted or self._cancelled or self.closed_because is not None
        return bool(has_news or self._why_lost() is not None)

    def _why_lost(self) -> str | None:
        """Why nothing can be computed any more, if another rank of a divided model is gone."""
        return None if self._model.ranks is None else self._model.ranks.lost

    def _idle(self) -> None:
        if self._debug:
            with self._lock:
                self._scheduler.check_invariants()

    def _step(self) -> None:
        """Launch a step if the device has room for one, and collect the oldest if it is due.

        Where steps run ahead, tokens are delivered after the next launch: text can wait for that, the device
        can't.
        """
        if self._governor is not None:
            self._governor.step_begins()
        launched = self._pipeline.launch()
        if self._governor is not None:  # on a CPU the step is over
            self._governor.step_ends()
        self._deliver_collected()
        self._collected = self._pipeline.collect(wait=not launched)
        if self._collected is None and not launched:
            if self._scheduler.has_work:
                raise RuntimeError("requests wait, nothing is in flight, and none can run")
        elif not self._pipeline.max_steps_ahead:
            self._deliver_collected()

    def _deliver_collected(self) -> None:
        outcome, self._collected = self._collected, None
        if outcome is None:
            return
        with self._lock:
            if not outcome.why_failed:
                self._recorder.record_step(outcome.plan, outcome.started_s, outcome.ended_s)
            for request, _ in outcome.accepted:
                previous_s = self._live[request.request_id].last_token_s
                self._recorder.record_token(request, previous_s, outcome.ended_s)
        for request, token_id in outcome.accepted:
            live = self._live[request.request_id]
            self._deliver(live, token_id, outcome.logprobs.get(request), outcome.ended_s)
        for request in outcome.failed:
            self._deliver_end(self._live[request.request_id], outcome.why_failed)

    def _deliver(self, live: LiveRequest, token_id: int, logprobs: TokenLogprobs | None, now: float) -> None:
        try:
            stopped = live.accept(token_id, logprobs, now)
        except Exception as error:  # a token this request's text can't take concerns no other request
            logger.exception("request %d could not be turned into text", live.request.request_id)
            if live.request.status is not RequestStatus.FINISHED:
                self._finish(live, "error", f"The answer could not be turned into text: {error}.")
                return
            stopped = False
        if live.request.status is RequestStatus.FINISHED:
            self._deliver_end(live)
        elif stopped:
            self._finish(live, "stop")
        else:
            live.emit()

    def _finish(self, live: LiveRequest, reason: FinishReason, error: str | None = None) -> None:
        with self._lock:
            self._scheduler.finish(live.request, reason, time.monotonic())
        self._deliver_end(live, error)

    def _deliver_end(self, live: LiveRequest, error: str | None = None) -> None:
        del self._live[live.request.request_id]
        live.end(error)

    def _end_everything(self, reason: FinishReason, because: str) -> None:
        """No step will run any more: every handle gets its end, even if the scheduler is what broke."""
        with self._inbox_condition:
            self.closed_because = because
            submitted, self._submitted = self._submitted, []
        for live in submitted:
            live.request.finish_reason = reason
            live.end(because)
        try:
            self._deliver_collected()
        except Exception:
            logger.exception("the last tokens could not be delivered")
        for live in list(self._live.values()):
            try:
                self._finish(live, reason, because)
            except Exception:
                logger.exception("request %d could not be taken off the scheduler", live.request.request_id)
                live.request.finish_reason = reason
                live.end(because)
        try:
            with torch.inference_mode():
                while self._pipeline.collect(wait=True):
                    pass  # nobody wants their tokens, but their blocks go back
        except Exception:
            logger.exception("the last steps could not be collected")
