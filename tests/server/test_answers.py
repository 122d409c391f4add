"""What the official client gets: the engine's own answers, whole and streamed, with usage and log-probabilities."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from nanochat.engine.config import SamplingParams
from nanochat.engine.detokenizer import TokenSpeller
from nanochat.engine.handle import RequestHandle
from nanochat.engine.outputs import Event, RequestMetrics, RequestOutput, TokenLogprobs
from nanochat.server import answer as answer_module
from nanochat.server.answer import Answer, Choice
from nanochat.server.formats import ChatFormat, Piece, TextFormat
from nanochat.server.parsing import parse_text
from nanochat.server.reasoning import ReasoningSplitter
from nanochat.server.wire import to_json
from nanochat.settings import Settings
from tests.server.conftest import MakeServer, Running
from tests.tiny_model import write_thinker, write_zoo_llama
from tests.tokenizer_zoo import NAMES, make_tokenizer

HI = [{"role": "user", "content": "Hi there"}]


def alone(api: Running, prompt: Any, **options: Any) -> RequestOutput:
    return api.engine.submit(prompt, SamplingParams(**options)).result(30)


class TestChat:
    def test_whole(self, api: Running) -> None:
        expected = alone(api, HI, temperature=0, max_tokens=20)
        answer = api.client().chat.completions.create(
            model=api.model, messages=HI, temperature=0, max_tokens=20
        )
        (choice,) = answer.choices
        assert choice.message.role == "assistant"
        assert (choice.message.content, choice.finish_reason) == (expected.text, expected.finish_reason)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == expected.metrics.prompt_tokens
        assert answer.usage.completion_tokens == len(expected.token_ids)
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 16

    def test_streamed_with_usage(self, api: Running) -> None:
        expected = alone(api, HI, temperature=0, max_tokens=20)
        stream = api.client().chat.completions.create(
            model=api.model,
            messages=HI,
            temperature=0,
            max_completion_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, last = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
        assert [chunk.choices[0].delta.role for chunk in chunks][:2] == ["assistant", None]
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons[-1] == expected.finish_reason
        assert not any(reasons[:-1])
        assert all(chunk.usage is None for chunk in chunks)
        assert (last.choices, last.usage and last.usage.completion_tokens) == ([], len(expected.token_ids))

    @pytest.mark.parametrize("seed", [7, 2**63 - 1])
    def test_a_seed_gives_the_same_again(self, api: Running, seed: int) -> None:
        expected = alone(api, HI, temperature=1.5, top_p=0.95, seed=seed, max_tokens=30)
        for _ in range(2):
            answer = api.client().chat.completions.create(
                model=api.model, messages=HI, temperature=1.5, top_p=0.95, seed=seed, max_tokens=30
            )
            assert answer.choices[0].message.content == expected.text

    def test_stop_texts_never_leak(self, api: Running) -> None:
        plain = alone(api, HI, temperature=1, seed=5, max_tokens=40).text
        stop = plain[9:11]
        for stream in (False, True):
            text, reason = _text_of(api, stop=["never there", stop], seed=5, max_tokens=40, stream=stream)
            assert (text, reason) == (plain[: plain.index(stop)], "stop")

    def test_several_answers_differ_and_count_the_prompt_once(self, api: Running) -> None:
        expected = [alone(api, HI, temperature=1.5, seed=3 + n, max_tokens=12).text for n in range(3)]
        options: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 12, "n": 3}
        answer = api.client().chat.completions.create(model=api.model, messages=HI, **options)
        assert [choice.message.content for choice in answer.choices] == expected
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(api.engine.encode(HI))
        texts = ["", "", ""]
        for chunk in api.client().chat.completions.create(
            model=api.model, messages=HI, stream=True, **options
        ):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == expected

    def test_log_probabilities(self, api: Running) -> None:
        expected = alone(api, HI, temperature=0, max_tokens=10, logprobs=3)
        assert expected.logprobs is not None
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "logprobs": True, "top_logprobs": 3}
        answer = api.client().chat.completions.create(model=api.model, messages=HI, **options)
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.content or []
        assert [entry.logprob for entry in content] == [entry.logprob for entry in expected.logprobs]
        assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [
            [logprob for _, logprob in entry.top] for entry in expected.logprobs
        ]
        spelled = b"".join(bytes(entry.bytes or []) for entry in content)
        assert spelled.decode("utf-8", errors="replace") == expected.text
        streamed = []
        for chunk in api.client().chat.completions.create(
            model=api.model, messages=HI, stream=True, **options
        ):
            assert chunk.choices[0].logprobs is not None
            streamed += chunk.choices[0].logprobs.content or []
        assert streamed == content

    def test_many_log_probabilities_for_a_slow_client_come_in_parts(
        self, api: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def all_at_once(handles: list[RequestHandle]) -> AsyncGenerator[tuple[int, list[Event]]]:
            for index, handle in enumerate(handles):
                await asyncio.to_thread(handle.result, 30)
                yield index, handle.poll()

        monkeypatch.setattr(answer_module, "take_events", all_at_once)
        monkeypatch.setattr(answer_module, "MAX_EVENTS", 4)
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "logprobs": True, "top_logprobs": 2}
        whole = api.client().chat.completions.create(model=api.model, messages=HI, **options).choices[0]
        assert whole.logprobs is not None
        streamed, text, sizes = [], "", []
        for chunk in api.client().chat.completions.create(
            model=api.model, messages=HI, stream=True, **options
        ):
            assert chunk.choices[0].logprobs is not None
            sizes.append(len(chunk.choices[0].logprobs.content or []))
            streamed += chunk.choices[0].logprobs.content or []
            text += chunk.choices[0].delta.content or ""
        assert streamed == whole.logprobs.content
        assert text == whole.message.content
        assert len(sizes) > 2
        assert max(sizes) <= 4

    def test_parts_of_text_and_the_newer_name_of_the_system_role(self, api: Running) -> None:
        messages = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]},
        ]
        same = [{"role": "system", "content": "Be brief."}, *HI]
        expected = alone(api, same, temperature=0, max_tokens=10)
        answer = api.client().chat.completions.create(
            model=api.model, messages=messages, temperature=0, max_tokens=10
        )
        assert answer.choices[0].message.content == expected.text

    def test_half_a_surrogate_pair_breaks_nothing(self, api: Running) -> None:
        body = b'{"model":"%s","max_tokens":3,"messages":[{"role":"user","content":"\\ud83d"}]}'
        for model, status in ((api.model, 200), ("\\ud83d", 404)):
            reply = api.client()._client.post(
                f"{api.url}/v1/chat/completions",
                content=body % model.encode(),
                headers={"content-type": "application/json"},
            )
            assert reply.status_code == status
            reply.json()


def _text_of(api: Running, *, stream: bool, **options: Any) -> tuple[str, str | None]:
    made = api.client().chat.completions.create(
        model=api.model, messages=HI, temperature=1, stream=stream, **options
    )
    if not stream:
        return made.choices[0].message.content, made.choices[0].finish_reason
    chunks = list(made)
    return "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason


class TestText:
    def test_a_text_and_its_token_ids(self, api: Running) -> None:
        expected = alone(api, "Once upon", temperature=0, max_tokens=16)
        for prompt in ("Once upon", api.engine.encode("Once upon")):
            answer = api.client().completions.create(model=api.model, prompt=prompt, temperature=0)
            assert answer.choices[0].text == expected.text
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 16  # what the API gives if nobody asks for more

    def test_a_list_of_prompts(self, api: Running) -> None:
        prompts = ["Once upon", "A", "B" * 40]
        expected = [alone(api, prompt, temperature=0, max_tokens=8).text for prompt in prompts]
        answer = api.client().completions.create(
            model=api.model, prompt=prompts, temperature=0, max_tokens=8, n=2
        )
        assert [choice.text for choice in answer.choices] == [text for text in expected for _ in range(2)]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(len(api.engine.encode(prompt)) for prompt in prompts)

    def test_log_probabilities_in_the_older_form(self, api: Running) -> None:
        answer = api.client().completions.create(
            model=api.model, prompt="Once upon", temperature=0, max_tokens=12, logprobs=2
        )
        choice = answer.choices[0]
        logprobs = choice.logprobs
        assert logprobs is not None
        assert len(logprobs.tokens or []) == len(logprobs.token_logprobs or []) == 12
        for token, value, top in zip(
            logprobs.tokens or [], logprobs.token_logprobs or [], logprobs.top_logprobs or [], strict=True
        ):
            assert top[token] >= value
        offsets = logprobs.text_offset or []
        assert offsets == sorted(offsets)
        assert 0 <= offsets[-1] <= len(choice.text)

    @pytest.mark.parametrize("name", ["llama2", "mistral", "metaspace"])
    def test_it_goes_on_from_the_prompt_with_the_space_between(
        self, make_server: MakeServer, tmp_path: Path, name: str
    ) -> None:
        api = make_server(write_zoo_llama(tmp_path / name, name))
        prompt = "The capital of France"
        ids = api.engine.encode(prompt)
        decode = partial(
            api.engine.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        options: dict[str, Any] = {"temperature": 2.0, "max_tokens": 2, "ignore_eos": True}
        words = 0
        for seed in range(20):
            output = alone(api, prompt, **options, seed=seed)
            assert output.text == decode(ids + output.token_ids)[len(prompt) :]
            words += output.text.startswith(" ")
        assert words
        for given in (prompt, ids):
            body = {"model": api.model, "prompt": given, **options, "seed": 19}
            assert api.post("/v1/completions", body).json()["choices"][0]["text"] == output.text

    @pytest.mark.parametrize("name", NAMES)
    def test_offsets_are_where_the_tokens_begin(self, name: str) -> None:
        tokenizer = make_tokenizer(name)
        ids = tokenizer.encode("The capital of France is Paris", add_special_tokens=False)
        entries = [TokenLogprobs(token, -1.0, ()) for token in ids]
        prompt, rest = ids[: len(ids) // 2], entries[len(ids) // 2 :]
        text = "".join(TokenSpeller(tokenizer).spell(entry.token_id).decode() for entry in rest)
        told = TextFormat(tokenizer, prompt).chunk(0, Piece("", text, rest))["logprobs"]
        assert told["text_offset"][0] == 0
        for offset, token in zip(told["text_offset"], told["tokens"], strict=True):
            assert text.startswith(token, offset)

    def test_usage_in_every_event(self, api: Running) -> None:
        stream = api.client().completions.create(
            model=api.model,
            prompt="Once",
            stream=True,
            max_tokens=6,
            extra_body={
                "ignore_eos": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
        )
        counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
        assert counts == sorted(counts)
        assert counts[-1] == 6


async def test_a_hundred_chats_at_once_are_all_right(api: Running) -> None:
    """Each as if it were alone; none is lost."""
    chats = [
        (
            [{"role": "user", "content": f"Question {index % 40}: " + "why? " * (index % 13)}],
            {"temperature": (0, 0.8, 1.2)[index % 3], "seed": index, "max_tokens": 3 + index % 8},
        )
        for index in range(100)
    ]
    expected = [alone(api, messages, **options).text for messages, options in chats]
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(messages: Any, options: dict[str, Any]) -> str:
            stream = await client.chat.completions.create(
                model=api.model, messages=messages, stream=True, **options
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        got = await asyncio.gather(*(ask(*chat) for chat in chats))
    assert got == expected


def test_defaults_are_those_of_the_settings_file_and_the_context(make_server: MakeServer) -> None:
    settings = Settings(sampling={"temperature": 0.0, "stop": ("zz",)})
    api = make_server(settings=settings, system="Be brief.", max_model_len=64)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = alone(api, messages, temperature=0, stop=("zz",), max_tokens=64)
    for given in (messages, messages[1:]):
        answer = api.client().chat.completions.create(model=api.model, messages=given)
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].finish_reason == expected.finish_reason


@pytest.mark.parametrize(("file", "longest"), [({"max_tokens": 21}, 21), ({}, 16)])
def test_the_settings_file_says_how_long_a_text_may_be(
    make_server: MakeServer, file: dict[str, int], longest: int
) -> None:
    api = make_server(settings=Settings(sampling=file))
    body: dict[str, Any] = {"model": api.model, "prompt": "Once", "ignore_eos": True}
    for given, expected in (({}, longest), ({"max_tokens": 3}, 3)):
        reply = api.post("/v1/completions", body | given).json()
        assert reply["usage"]["completion_tokens"] == expected


async def test_text_that_came_just_before_a_failure_is_not_lost(api: Running) -> None:
    """Both may be taken from the engine at once."""
    handle = RequestHandle(1, lambda _: None)
    handle.push(Event("so far", (1, 2)))
    output = RequestOutput("so far", [1, 2], "error", "Out of memory.", None, RequestMetrics())
    handle.push(Event("", (), "error"), output)
    choice = Choice(
        0, 3, handle, ReasoningSplitter(None, is_opened=False), TextFormat(api.engine.tokenizer, ()), False
    )
    job = parse_text({"model": "m", "prompt": "a", "stream": True})
    answer = Answer(job, "m", [choice], TextFormat, api.service.metrics, 0.0, lambda _: None)
    text, error, done = [event async for event in answer.events()]
    assert b'"text":"so far"' in text
    assert b'"message":"Out of memory."' in error
    assert done == b"data: [DONE]\n\n"


def test_minus_infinity_is_a_number_in_json(api: Running) -> None:
    piece = Piece("", "a", [TokenLogprobs(70, -math.inf, ((70, -math.inf), (71, -1.0)))])
    for wire in (ChatFormat(api.engine.tokenizer), TextFormat(api.engine.tokenizer, ())):
        assert b"-9999.0" in to_json(wire.chunk(0, piece))


class TestReasoning:
    @pytest.fixture
    def thinking(self, make_server: MakeServer, tmp_path: Any) -> Running:
        """A model whose chat template opens the reasoning itself."""
        return make_server(write_thinker(tmp_path / "thinker"))

    def test_it_is_kept_apart(self, thinking: Running) -> None:
        """The random model never closes its reasoning, so all of it is that."""
        text = alone(thinking, HI, temperature=0, max_tokens=12).text
        answer = thinking.client().chat.completions.create(
            model=thinking.model, messages=HI, temperature=0, max_tokens=12
        )
        message = answer.choices[0].message
        assert message.content == ""
        assert message.reasoning_content == text.strip()  # type: ignore[attr-defined]
        stream = thinking.client().chat.completions.create(
            model=thinking.model, messages=HI, temperature=0, max_tokens=12, stream=True
        )
        deltas = [chunk.choices[0].delta for chunk in stream]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == text.strip()
        assert not any(delta.content for delta in deltas)
