"""What came instead of a stream: some servers answer whole, whatever they were asked; others are no such servers."""

from __future__ import annotations

import json
from typing import Any

import httpx2
from openai.types.chat import ChatCompletionChunk


class NoAnswer(Exception):
    """What came is neither a stream nor a whole answer; the message says what it is, as a part of a sentence."""


async def whole_answer(response: httpx2.Response) -> ChatCompletionChunk | None:
    """The answer as one chunk of a stream, not checked any further; None where a stream comes, as was asked.

    Raises:
        NoAnswer: neither comes.
    """
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "text/html":
        raise NoAnswer("it sends a web page")
    if not kind.endswith("json"):
        return None
    body = await response.aread()
    if body.lstrip().startswith((b"data:", b":")):  # a stream under a wrong name
        return None
    try:
        told: Any = json.loads(body.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        told = None
    choices = told.get("choices") if isinstance(told, dict) else None
    if not isinstance(choices, list):
        raise NoAnswer("it sends something else than an answer")
    chunks = [
        {**choice, "delta": choice.get("message"), "finish_reason": choice.get("finish_reason") or "stop"}
        for choice in choices[:1]
        if isinstance(choice, dict)
    ]
    return ChatCompletionChunk.construct(choices=chunks, usage=told.get("usage"))
