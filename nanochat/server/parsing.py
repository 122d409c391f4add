"""Bodies of requests into jobs: every option is taken, known to change nothing, or refused by name.

An option that would change the answer and that the engine doesn't have is never ignored: its sender would take
the answer for what was asked. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nanochat.engine.config import SamplingParams, as_written
from nanochat.errors import InvalidOption
from nanochat.server.errors import ApiError, invalid

MAX_CHOICES = 128
"""Answers to one request: prompts times ``n``."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1_000
COMPLETION_TOKENS = 16
"""``max_tokens`` of a text completion where neither the request nor the settings file names one, as the API has it."""

Messages = list[dict[str, str]]
Prompt = str | list[int] | Messages

_IGNORED = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    )
)
"""About the sender or the server's housekeeping: no answer depends on them."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
}
"""Known options that the engine hasn't got, with the values that ask for nothing; so does null."""
_REFUSED = frozenset(("audio", "prediction", "reasoning_effort", "verbosity", "web_search_options"))
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "ignore_eos")
_COMMON = frozenset(("model", "stream", "stream_options", "n", "stop", "max_tokens", "logprobs", *_SAMPLING))
_CHAT = _COMMON | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}
_TEXT = _COMMON | {"prompt"}
_TEMPLATES_OWN = frozenset(("self", "messages", "add_generation_prompt", "verbatim", "now"))
"""What a request may not tell a chat template."""
_MESSAGE_KEYS = frozenset(("role", "content", "reasoning_content", "reasoning"))
"""Of these, earlier reasoning is left out, as chat templates do."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one request asks for."""

    kind: Literal["chat", "text"]
    model: str
    prompts: Sequence[Prompt]
    sampling: Mapping[str, Any]
    """Of `SamplingParams`, what the request says."""
    n: int = 1
    """Answers to each prompt."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """Whether every event tells the usage so far."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


def parse_chat(body: Any) -> Job:
    """The body of a request to ``/v1/chat/completions``.

    Raises:
        ApiError: it is none; the message says what is wrong with which option.
    """
    options = _options(body, _CHAT)
    sampling = _sampling(options)
    longest = options.get("max_completion_tokens")
    if longest is not None and sampling.setdefault("max_tokens", longest) != longest:
        raise invalid(
            "max_tokens and max_completion_tokens differ; give one of them.", "max_completion_tokens"
        )
    wants, top = _flag(options, "logprobs"), options.get("top_logprobs")
    if top is not None and not wants:
        raise invalid("top_logprobs needs logprobs to be true.", "top_logprobs")
    if wants:
        sampling["logprobs"] = 0 if top is None else top
    kwargs = _template_kwargs(options.get("chat_template_kwargs", {}))
    return _job("chat", options, [_messages(options.get("messages"))], sampling, "top_logprobs", kwargs)


def parse_text(body: Any) -> Job:
    """The body of a request to ``/v1/completions``; errors as in `parse_chat`."""
    options = _options(body, _TEXT)
    sampling = _sampling(options)
    if "logprobs" in options:
        sampling["logprobs"] = options["logprobs"]
    return _job("text", options, _prompts(options.get("prompt")), sampling, "logprobs", {})


def _job(
    kind: Literal["chat", "text"],
    options: Mapping[str, Any],
    prompts: Sequence[Prompt],
    sampling: Mapping[str, Any],
    logprobs_option: str,
    template_kwargs: Mapping[str, Any],
) -> Job:
    model = options.get("model")
    if not isinstance(model, str) or not model:
        raise invalid("model must name the model; GET /v1/models lists it.", "model")
    n = options.get("n", 1)
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise invalid(f"n must be a whole number of at least 1, not {as_written(n)}.", "n")
    if len(prompts) * n > MAX_CHOICES:
        raise invalid(f"A request may ask for {MAX_CHOICES} answers at most, not {len(prompts) * n:,}.", "n")
    _check_sampling(sampling, logprobs_option)
    stream = _flag(options, "stream")
    usage = options.get("stream_options", {})
    if not isinstance(usage, dict) or (usage and not stream):
        raise invalid("stream_options is an object, and needs stream to be true.", "stream_options")
    known = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    if unknown := sorted(set(usage) - known):
        raise _unknown(f"stream_options.{unknown[0]}")
    if _flag(usage, "include_obfuscation"):
        raise invalid("include_obfuscation isn't supported.", "stream_options.include_obfuscation")
    return Job(
        kind=kind,
        model=model,
        prompts=prompts,
        sampling=sampling,
        n=n,
        stream=stream,
        include_usage=_flag(usage, "include_usage"),
        continuous_usage=_flag(usage, "continuous_usage_stats"),
        template_kwargs=template_kwargs,
    )


def _options(body: Any, known: frozenset[str]) -> dict[str, Any]:
    """What the body says, without what says nothing."""
    if not isinstance(body, dict):
        raise invalid("The body must be a JSON object.")
    given = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
    for name in list(given):
        if name in known:
            continue
        if name in _REFUSED or name in _NEUTRAL:
            if not _is_neutral(given.pop(name), _NEUTRAL.get(name, ())):
                raise invalid(
                    f"{name} isn't supported by this server; leave it out.", name, "unsupported_parameter"
                )
        else:
            raise _unknown(name)
    return given


def _is_neutral(value: object, neutral: Sequence[object]) -> bool:
    """``True`` is no 1 here, nor ``False`` a 0."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def _unknown(name: str) -> ApiError:
    return invalid(f"There is no option {name[:60]!r}.", name[:60], "unknown_parameter")


def _flag(options: Mapping[str, Any], name: str) -> bool:
    value = options.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, not {as_written(value)}.", name)
    return bool(value)


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {name: options[name] for name in (*_SAMPLING, "max_tokens") if name in options}
    if sampling.get("top_k") == -1:  # as others write that all tokens are kept
        sampling["top_k"] = 0
    if "stop" in options:
        sampling["stop"] = _stops(options["stop"])
    return sampling


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise invalid("stop must be a text or a list of texts, none of them empty.", "stop")
    if len(stops) > MAX_STOPS or any(len(text) > MAX_STOP_CHARACTERS for text in stops):
        raise invalid(
            f"There may be {MAX_STOPS} stop texts of {MAX_STOP_CHARACTERS:,} characters at most.", "stop"
        )
    return tuple(stops)


def _check_sampling(sampling: Mapping[str, Any], logprobs_option: str) -> None:
    try:
        SamplingParams(**sampling)
    except InvalidOption as error:
        name, blank, rest = str(error).partition(" ")
        name = logprobs_option if name == "logprobs" else name
        raise invalid(name + blank + rest, name) from error


def _template_kwargs(kwargs: Any) -> dict[str, Any]:
    name = "chat_template_kwargs"
    if not isinstance(kwargs, dict) or not all(
        isinstance(v, (str, int, float, bool)) for v in kwargs.values()
    ):
        raise invalid(f"{name} must be an object of texts, numbers and truth values.", name)
    if taken := sorted(_TEMPLATES_OWN & set(kwargs)):
        raise invalid(f"{name} can't say what {taken[0]} is.", f"{name}.{taken[0]}")
    return kwargs


def _messages(messages: Any) -> Messages:
    if not isinstance(messages, list) or not messages:
        raise invalid("messages must be a list of at least one message.", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise invalid(f"{where} must be an object with role and content.", where)
    extra = sorted(name for name in set(message) - _MESSAGE_KEYS if message[name] not in (None, [], {}))
    if extra:
        name = f"{where}.{extra[0][:60]}"
        raise invalid(f"{name} isn't supported by this server; leave it out.", name, "unsupported_parameter")
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant"):
        raise invalid(
            f"{where}.role must be system, developer, user or assistant, not {as_written(role)}.",
            f"{where}.role",
        )
    return {"role": role, "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    """A text, or a list of parts that are texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where} must be a text, or a list of parts of the type text.", where)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(
                f"{where}[{index}] must be a part of the type text: this server reads no images, sounds or files.",
                f"{where}[{index}]",
            )
        texts.append(part["text"])
    return "".join(texts)


def _prompts(prompt: Any) -> list[Prompt]:
    """Of one text, a list of token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _is_ids(prompt):
            return [prompt]
        if all(isinstance(item, str) or (isinstance(item, list) and _is_ids(item)) for item in prompt):
            return list(prompt)
    raise invalid("prompt must be a text, a list of token ids, or a list of those, and not empty.", "prompt")


def _is_ids(items: list[Any]) -> bool:
    return bool(items) and all(isinstance(item, int) and not isinstance(item, bool) for item in items)
