"""From a turn to the body of a request for chat completions, and what to change when a server refuses a part.

What the user has set is sent; what isn't set is left to the server, which knows its model. Options that
OpenAI's API lacks go beside the others, as vLLM, SGLang and nanochat's own server read them.
"""

from __future__ import annotations

from typing import Any

from nanochat.backend.interface import Said, Turn
from nanochat.sanitize import encodable

REASONING_TAGS = ("<think>", "</think>")
"""What reasoning is enclosed in here, whether the server sends it apart or within the text."""
_STANDARD = ("temperature", "top_p", "max_tokens", "seed")
_EXTRA = ("top_k", "min_p", "repetition_penalty", "ignore_eos")


def request_of(turn: Turn, model: str) -> dict[str, Any]:
    """Arguments of ``chat.completions.create``."""
    messages = [] if turn.system is None else [_message("system", turn.system)]
    for message in turn.messages:
        if message.role == "user":
            messages.append(_message("user", message.text))
        elif message.output is not None:
            messages.append(_message("assistant", _answer(message, turn.keep_reasoning)))
    request: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request |= {name: turn.sampling[name] for name in _STANDARD if turn.sampling.get(name) is not None}
    if stop := turn.sampling.get("stop"):
        request["stop"] = [stop] if isinstance(stop, str) else list(stop)
    extra = {name: turn.sampling[name] for name in _EXTRA if name in turn.sampling}
    if extra.get("top_k") == 0:
        extra["top_k"] = -1  # all of them, as servers write it
    if turn.enable_thinking is not None:
        extra["chat_template_kwargs"] = {"enable_thinking": turn.enable_thinking}
    if extra:
        request["extra_body"] = extra
    return request


def adapted(request: dict[str, Any], refusal: str) -> dict[str, Any] | None:
    """The request without what the server's own words refuse; None where that can't be helped."""
    if "max_completion_tokens" in refusal and "max_tokens" in request:  # OpenAI's newer models
        changed = dict(request)
        changed["max_completion_tokens"] = changed.pop("max_tokens")
        return changed
    if "stream_options" in refusal and "stream_options" in request:
        return {name: value for name, value in request.items() if name != "stream_options"}
    return None


def num_characters(request: dict[str, Any]) -> int:
    """Characters of all messages."""
    return sum(len(message["content"]) for message in request["messages"])


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": encodable(content)}


def _answer(message: Said, keep_reasoning: bool) -> str:
    """An answer as it goes back to the model: by the API's custom, without its reasoning."""
    text = message.output.text if message.output is not None else ""
    opening, closing = REASONING_TAGS
    if keep_reasoning or not text.lstrip().startswith(opening):
        return text
    return text.partition(closing)[2].lstrip()
