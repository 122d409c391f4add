"""Between a chat as it is saved and the tree that is shown. Knows nothing of widgets, threads or files.

What a file holds may be old, or have been imported, so nothing is taken over that couldn't have come from
this app.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, get_args

from nanochat.engine.config import SamplingParams
from nanochat.engine.outputs import RequestMetrics, RequestOutput
from nanochat.engine.request import FinishReason
from nanochat.errors import InvalidOption
from nanochat.history import records
from nanochat.sanitize import sanitize, sanitize_line
from nanochat.settings import SAMPLING_OPTIONS
from nanochat.ui.chat import Chat, Message, Note

_METRICS = frozenset(field.name for field in dataclasses.fields(RequestMetrics))


def settings_of(chat: Chat) -> dict[str, Any]:
    """A chat's own settings as they are saved, but for those that have a column of their own."""
    settings = dict(chat.sampling)
    if chat.enable_thinking is not None:
        settings["enable_thinking"] = chat.enable_thinking
    if chat.keep_reasoning:
        settings["keep_reasoning"] = True
    return settings


def metrics_of(message: Message, output: RequestOutput) -> dict[str, Any]:
    """What is saved beside an answer's text: what it cost, and how its reasoning is told from it."""
    metrics = dataclasses.asdict(output.metrics)
    answer = message.answer
    if answer.tags is not None:
        metrics["reasoning_tags"] = list(answer.tags)
        metrics["reasoning_opened"] = answer.is_opened
        metrics["reasoning_tokens"] = answer.reasoning_tokens
    if message.enable_thinking is not None:
        metrics["enable_thinking"] = message.enable_thinking
    return metrics


def restored_chat(record: records.Chat, messages: Sequence[records.Message]) -> Chat:
    """The chat with all its branches; ``messages`` as :meth:`History.tree` gives them."""
    chat = Chat(
        system=record.system,
        title=sanitize_line(record.title) or "Untitled",
        sampling=_usable(record.sampling),
        started=datetime.fromtimestamp(record.created_at).astimezone(),
        enable_thinking=_flag(record.sampling.get("enable_thinking")),
        keep_reasoning=record.sampling.get("keep_reasoning") is True,
        draft=sanitize(record.draft),
        store_id=record.id,
    )
    nodes: dict[int | None, Message] = {None: chat.root}
    for saved in messages:
        parent = nodes.get(saved.parent_id)
        if parent is None:
            continue
        chosen = parent.chosen
        node = nodes[saved.id] = parent.add(_restored_message(saved))
        if not saved.is_active:
            parent.chosen = min(chosen, len(parent.children) - 1)
        if saved.error:
            chat.notes.append(Note(node, sanitize_line(saved.error, 1_000), "error"))
    if record.left_out_id is not None:
        chat.left_out = nodes.get(record.left_out_id)
    return chat


def _restored_message(saved: records.Message) -> Message:
    message = Message(saved.role, saved.text, store_id=saved.id, model=saved.model)
    if saved.role == "user":
        return message
    message.text = ""
    message.is_interrupted = saved.state == "interrupted"
    message.is_elsewhere = saved.state == "streaming"
    message.enable_thinking = _flag(saved.metrics.get("enable_thinking"))
    tags = saved.metrics.get("reasoning_tags")
    if (
        isinstance(tags, (list, tuple))
        and len(tags) == 2
        and all(isinstance(tag, str) and tag for tag in tags)
    ):
        message.answer.tags = (tags[0], tags[1])
        message.answer.is_opened = saved.metrics.get("reasoning_opened") is True
        message.answer.reasoning_tokens = int(_number(saved.metrics.get("reasoning_tokens")))
    message.answer.replace(sanitize(saved.text))
    message.answer.num_tokens = len(saved.token_ids)
    message.output = RequestOutput(
        text=saved.text,
        token_ids=list(saved.token_ids),
        finish_reason=_finish_reason(saved),
        error=saved.error,
        logprobs=None,
        metrics=_metrics(saved),
    )
    return message


def _finish_reason(saved: records.Message) -> FinishReason:
    if saved.state == "error":
        return "error"
    if saved.state != "complete":
        return "cancelled"
    reasons: dict[str | None, FinishReason] = {reason: reason for reason in get_args(FinishReason)}
    return reasons.get(saved.finish_reason, "stop")


def _metrics(saved: records.Message) -> RequestMetrics:
    defaults = RequestMetrics()
    values: dict[str, Any] = {}
    for name in _METRICS:
        if value := _number(saved.metrics.get(name)):
            values[name] = int(value) if isinstance(getattr(defaults, name), int) else value
    return RequestMetrics(**{"completion_tokens": len(saved.token_ids), **values})


def _number(value: object) -> float:
    """The value if it is a number that can be shown, or else 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0
    return value if math.isfinite(value) and 0 <= value < 2**53 else 0


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _usable(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Of a chat's settings as saved, those that can work."""
    usable: dict[str, Any] = {}
    for name in SAMPLING_OPTIONS:
        if name in sampling:
            with suppress(InvalidOption):
                usable[name] = getattr(SamplingParams(**{name: sampling[name]}), name)
    return usable


def joined_outputs(partial: RequestOutput, rest: RequestOutput) -> RequestOutput:
    """An answer that was continued, as one."""
    prompt, cached = rest.metrics.prompt_tokens, rest.metrics.cached_tokens
    before = len(partial.token_ids)
    metrics = dataclasses.replace(
        rest.metrics,
        prompt_tokens=max(0, prompt - before),
        cached_tokens=min(cached, max(0, prompt - before)),
        completion_tokens=before + rest.metrics.completion_tokens,
    )
    return dataclasses.replace(
        rest,
        text=partial.text + rest.text,
        token_ids=[*partial.token_ids, *rest.token_ids],
        metrics=metrics,
    )
