"""Bodies into jobs: what is taken, what is known to change nothing, what is refused and how."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.engine.chat_template import ChatTemplate
from nanochat.server import parsing, wire
from nanochat.server.errors import ApiError
from nanochat.server.parsing import MAX_CHOICES, MAX_STOP_CHARACTERS, parse_chat, parse_text
from nanochat.server.wire import PIECE, from_json, to_json, to_json_by_pieces

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "Hi"}


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}, "logit_bias": {}, "modalities": ["text"]},
        {"frequency_penalty": 0, "presence_penalty": 0.0},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"tools": None, "functions": None, "reasoning_effort": None, "anything": None},
        {"stream_options": None, "n": None, "stop": None, "logprobs": False},
    ],
)
def test_what_changes_nothing_is_taken(harmless: dict[str, Any]) -> None:
    assert parse_chat(CHAT | harmless) == parse_chat(CHAT)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": False}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"temprature": 1}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": MAX_CHOICES + 1}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * (MAX_STOP_CHARACTERS + 1)}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"verbatim": 1}}, "chat_template_kwargs.verbatim"),
        ({"model": None}, "model"),
        ({"model": 7}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"prompt": "Hi"}, "prompt"),
    ],
)
def test_what_cant_be_done_is_refused_by_name(options: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(CHAT | options)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert caught.value.message.endswith(".")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": ""}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * (MAX_CHOICES + 1)}, "n"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 99}, "logprobs"),
    ],
)
def test_text_completions(options: dict[str, Any], param: str | None) -> None:
    if param is None:
        parse_text(TEXT | options)  # the engine knows whether a text has tokens
        return
    with pytest.raises(ApiError) as caught:
        parse_text(TEXT | options)
    assert caught.value.param == param


def test_a_request_cant_name_what_templates_are_told_by_us() -> None:
    for name in inspect.signature(ChatTemplate.render).parameters:
        if name != "template_kwargs":
            with pytest.raises(ApiError):
                parse_chat(CHAT | {"chat_template_kwargs": {name: 1}})


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_a_body_that_is_no_object(body: Any) -> None:
    for parse in (parse_chat, parse_text):
        with pytest.raises(ApiError, match="must be a JSON object"):
            parse(body)


def test_what_is_asked_for_arrives() -> None:
    job = parse_chat(
        CHAT
        | {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1}
        | {"seed": 4, "stop": "a", "max_completion_tokens": 9, "n": 2, "ignore_eos": True}
        | {"logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"enable_thinking": False}}
        | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}}
    )
    assert job.sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "seed": 4,
        "stop": ("a",),
        "max_tokens": 9,
        "ignore_eos": True,
        "logprobs": 2,
    }
    assert (job.n, job.stream, job.include_usage, job.continuous_usage) == (2, True, True, False)
    assert job.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "a number in it has too many digits$"),
        (b'{"a": -Infinity}', "Infinity"),
        (b"\xff\xfe", "byte 0 isn't UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" + b"1" * 5_000 + b"]", "digits"),
    ],
)
def test_what_is_no_json(body: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        from_json(body)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@given(_VALUES, st.lists(st.integers() | st.text(max_size=2), max_size=3 * PIECE))
def test_json_by_pieces_is_the_same(value: Any, long: list[Any]) -> None:
    for whole in (value, [value, long], {"a": long, "b": [value]}):
        assert to_json_by_pieces(whole) == to_json(whole)


def test_pieces_of_json_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a piece is encoded, no other thread runs."""
    sizes: list[int] = []

    def watched(value: Any) -> bytes:
        encoded = to_json(value)
        sizes.append(len(encoded))
        return encoded

    token = {"token": " word", "logprob": -1.234567, "bytes": [32, 119, 111, 114, 100]}
    content = [{**token, "top_logprobs": [token] * 20} for _ in range(2_000)]
    answer = {"choices": [{"index": 0, "logprobs": {"content": content, "refusal": None}}]}
    monkeypatch.setattr(wire, "to_json", watched)
    assert len(to_json_by_pieces(answer)) > 2_000_000
    assert max(sizes) < 200_000


def test_json_is_valid_whatever_a_text_holds() -> None:
    text = 'a\ud83d\u2028\u2029\u0085\r\n\x1b"\\é😀'
    written = to_json({"a": text})
    assert len(written.decode("utf-8").splitlines()) == 1
    assert from_json(written) == {"a": text.replace("\ud83d", "?")}
    with pytest.raises(ValueError, match="float"):
        to_json(float("nan"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
OPTIONS = st.dictionaries(
    st.sampled_from(sorted(parsing._CHAT | parsing._TEXT | set(parsing._NEUTRAL) | parsing._REFUSED | {"x"})),
    JSON,
    max_size=6,
)
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "name", "tool_calls"]), JSON | st.just("user"), max_size=4
    )
    | JSON,
    max_size=3,
)


@given(st.booleans(), OPTIONS, MESSAGES | JSON)
def test_any_body_is_a_job_or_an_error_in_words(is_chat: bool, options: dict[str, Any], prompt: Any) -> None:
    body = {"model": "m"} | options | {"messages" if is_chat else "prompt": prompt}
    refused: ApiError | None = None
    try:
        assert (parse_chat(body) if is_chat else parse_text(body)).num_choices >= 1
    except ApiError as error:
        refused = error
    if refused is not None:
        assert refused.status == 400
        assert from_json(to_json(refused.body()))["error"]["message"].endswith(".")
        assert len(refused.message) < 400
