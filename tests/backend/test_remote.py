"""A server as a backend: what is sent, what comes of it, and every way in which it can fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.backend.interface import Refused, Started
from nanochat.backend.opening import open_backend
from nanochat.backend.remote import backend as remote
from nanochat.backend.remote import client, stream
from nanochat.backend.remote.backend import RemoteBackend
from nanochat.backend.remote.config import RemoteConfig
from nanochat.backend.remote.handle import RemoteHandle
from nanochat.backend.remote.stream import Answer
from nanochat.engine.outputs import RequestOutput
from nanochat.errors import EngineClosed, InvalidOption, ModelNotFound, NanochatError
from tests.backend.fake_server import (
    Asked,
    FakeServer,
    Reply,
    break_off,
    fake_server,
    refuse,
    say,
    talk_on,
)
from tests.backend.turns import turn_of

FIELDS = (
    *("choices", "usage", "delta", "content", "reasoning_content", "reasoning", "finish_reason"),
    *("prompt_tokens", "completion_tokens", "prompt_tokens_details", "cached_tokens"),
)
KEY = "sk-very-secret-123"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


@pytest.fixture
def backend(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteBackend]:
    monkeypatch.setattr(client, "MAX_RETRIES", 0)
    opened = connect(server)
    yield opened
    opened.close()


def connect(server: FakeServer, **options: Any) -> RemoteBackend:
    opened = open_backend(RemoteConfig(url=server.url, **options))
    assert isinstance(opened, RemoteBackend)
    return opened


def answer(backend: RemoteBackend, *texts: str, **options: Any) -> RequestOutput:
    return backend.start(turn_of(*(texts or ("Hi",)), **options)).handle.result(30)


def refusal(backend: RemoteBackend, *texts: str, **options: Any) -> NanochatError:
    with pytest.raises(NanochatError) as caught:
        answer(backend, *texts, **options)
    message = str(caught.value)
    assert message.endswith((".", "?"))
    assert "\n" not in message
    assert len(message) < 600
    return caught.value


class TestAnswers:
    def test_an_answer_streams_and_says_what_it_cost(
        self, server: FakeServer, backend: RemoteBackend
    ) -> None:
        started = backend.start(turn_of("Hi"))
        output = started.handle.result(30)
        events = started.handle.poll()
        assert "".join(event.text for event in events) == output.text == "Hello there."
        assert sum(event.num_tokens for event in events) == 3
        assert (output.finish_reason, output.error, output.token_ids) == ("stop", None, [])
        metrics = output.metrics
        assert (metrics.prompt_tokens, metrics.cached_tokens, metrics.completion_tokens) == (20, 8, 3)
        assert metrics.ttft_s is not None
        assert backend.stats().ttft_p50_s == pytest.approx(metrics.ttft_s)

    def test_a_chat_is_sent_whole_and_only_what_was_set_goes_with_it(
        self, server: FakeServer, backend: RemoteBackend
    ) -> None:
        answer(backend, "One", "<think>hm</think>Two", "Three\ud800", system="Be brief.")
        (body,) = server.chats()
        assert body["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "Two"},
            {"role": "user", "content": "Three\ufffd"},
        ]
        assert set(body) == {"model", "messages", "stream", "stream_options"}
        answer(backend, "One", "<think>hm</think>Two", "Three", keep_reasoning=True)
        assert server.chats()[-1]["messages"][1]["content"] == "<think>hm</think>Two"

    def test_settings_go_where_servers_read_them(self, server: FakeServer, backend: RemoteBackend) -> None:
        sampling = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 3, "stop": ("END",)}
        extra = {"top_k": 0, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True}
        answer(backend, sampling=sampling | extra, enable_thinking=False)
        (body,) = server.chats()
        sent = (
            sampling
            | extra
            | {"stop": ["END"], "top_k": -1, "chat_template_kwargs": {"enable_thinking": False}}
        )
        assert {name: body[name] for name in sent} == sent

    def test_reasoning_comes_as_the_apps_own_whatever_the_field(
        self, server: FakeServer, backend: RemoteBackend
    ) -> None:
        for field in ("reasoning_content", "reasoning"):

            def think(asked: Asked, reply: Reply, field: str = field) -> None:
                reply.begin_stream()
                reply.piece(role="assistant", content="")
                reply.piece(**{field: "First "})
                reply.piece(**{field: "this."})
                reply.piece("So")
                reply.piece(" that.")
                reply.end()

            server.chat = [think]
            started = backend.start(turn_of("Hi"))
            assert started.reasoning_tags == ("<think>", "</think>")
            assert started.handle.result(30).text == "<think>\nFirst this.\n</think>\n\nSo that."

    def test_a_cut_answer_says_so(self, server: FakeServer, backend: RemoteBackend) -> None:
        def cut(asked: Asked, reply: Reply) -> None:
            reply.begin_stream()
            reply.piece("cut")
            reply.end(finish="length")

        server.chat = [cut]
        assert answer(backend).finish_reason == "length"

    def test_cancelling_hangs_up_and_keeps_the_text(self, server: FakeServer, backend: RemoteBackend) -> None:
        server.chat = [talk_on]
        handle = backend.start(turn_of("Hi")).handle
        while not handle.poll():
            time.sleep(0.01)
        assert backend.stats().running == 1
        handle.cancel()
        handle.cancel()
        output = handle.result(10)
        assert output.finish_reason == "cancelled"
        assert output.text.startswith("word ")
        assert server.hung_up.wait(10)
        assert backend.stats().requests == ()

    def test_cancelling_before_anything_was_sent(self, server: FakeServer, backend: RemoteBackend) -> None:
        handle = backend.start(turn_of("Hi")).handle
        handle.cancel()
        assert handle.result(10).finish_reason == "cancelled"

    def test_a_hundred_at_once(self, server: FakeServer, backend: RemoteBackend) -> None:
        server.chat = [say(*map(str, range(20)), pause_s=0.001)]
        handles = [backend.start(turn_of(f"Question {number}")).handle for number in range(100)]
        texts = {handle.result(60).text for handle in handles}
        assert texts == {"".join(map(str, range(20)))}
        assert {body["messages"][0]["content"] for body in server.chats()} == {
            f"Question {number}" for number in range(100)
        }

    def test_closing_ends_what_runs_and_refuses_what_comes(
        self, server: FakeServer, backend: RemoteBackend
    ) -> None:
        server.chat = [talk_on]
        handle = backend.start(turn_of("Hi")).handle
        while not handle.poll():
            time.sleep(0.01)
        backend.close()
        backend.close()
        assert handle.result(10).finish_reason == "cancelled"
        assert not backend._thread.is_alive()
        with pytest.raises(EngineClosed):
            backend.start(turn_of("Hi"))

    def test_no_answer_goes_on_and_a_wrong_setting_is_refused_here(self, backend: RemoteBackend) -> None:
        with pytest.raises(Refused, match="/again"):
            backend.start(turn_of("Hi", partial=answer(backend)))
        with pytest.raises(InvalidOption, match="temperature"):
            backend.start(turn_of("Hi", sampling={"temperature": -1}))


class TestFailures:
    @pytest.mark.parametrize(
        ("status", "body", "said"),
        [
            (401, {"error": {"message": "Incorrect API key"}}, "--api-key-env"),
            (403, {"error": {"message": "not for you"}}, "forbids this (403): not for you"),
            (404, {"error": {"message": "The model `x` does not exist."}}, "does not have this model"),
            (404, {"detail": "Not Found"}, "is the path of the address right?"),
            (429, {"error": {"message": "Rate limit"}}, "too much to do"),
            (500, {"error": {"message": "CUDA error"}}, "has failed (500): CUDA error"),
            (502, "<html><h1>Bad Gateway</h1></html>", "has failed (502)."),
            (400, {"error": "just words"}, "refuses the request (400): just words"),
            (422, {"detail": [{"loc": ["body"], "msg": "bad"}]}, "refuses the request (422)"),
            (418, "\x1b[31mteapot", "␛[31mteapot"),
            (400, "x" * 100_000, "xxx"),
            (400, ["odd", None], "refuses the request"),
        ],
    )
    def test_what_a_server_refuses_ends_in_a_sentence(
        self, server: FakeServer, backend: RemoteBackend, status: int, body: Any, said: str
    ) -> None:
        server.chat = [refuse(status, body)]
        assert said in str(refusal(backend))
        server.chat = [say("well")]
        assert answer(backend).text == "well"

    @pytest.mark.parametrize(
        "said",
        [
            "This model's maximum context length is 1000 tokens. However, you requested 1350 tokens "
            "(1200 in the messages, 150 in the completion). Please reduce the length.",
            "This model's maximum context length is 1000 tokens and your request has 1200 input tokens.",
            "The input (1200 tokens) is longer than the model's context length (1000 tokens).",
            "Requested token count exceeds the model's maximum context length of 1000 tokens. You requested a "
            "total of 1300 tokens: 1200 tokens from the input messages and 100 tokens for the completion.",
            "The prompt has 1200 tokens but at most 1000 fit; shorten it, or start with --max-model-len 1201 or more.",
            "This model's maximum context length is 1000 tokens, however your messages resulted in 1200 tokens.",
        ],
    )
    def test_a_prompt_that_is_too_long_comes_with_an_offer(self, server: FakeServer, said: str) -> None:
        server.models = {"data": [{"id": "fake"}]}  # its limit is in its words only
        opened = connect(server)
        server.chat = [refuse(400, {"error": {"message": said, "code": "context_length_exceeded"}})]
        error = refusal(opened, *["x" * 50] * 21)
        opened.close()
        assert isinstance(error, Refused)
        assert error.offer is not None
        assert (error.offer.tokens_before, error.offer.limit, error.offer.is_estimate) == (1200, 1000, True)
        assert error.offer.turns == 3  # 100 characters each, of 1,050: about 114 tokens
        assert error.offer.tokens_after == 1200 - round(1200 * 300 / 1050)

    def test_a_single_question_that_is_too_long_comes_without(
        self, server: FakeServer, backend: RemoteBackend
    ) -> None:
        said = "This model's maximum context length is 1000 tokens. You requested 1350 tokens."
        server.chat = [refuse(400, {"error": {"message": said}})]
        error = refusal(backend)
        assert isinstance(error, Refused)
        assert error.offer is None
        assert "/drop 1" in str(error)

    def test_a_connection_lost_in_mid_answer_keeps_what_came(
        self, server: FakeServer, backend: RemoteBackend
    ) -> None:
        for script in (
            break_off("Half", " of it"),
            lambda _, reply: (reply.begin_stream(), reply.piece("Half of it")),
        ):
            server.chat = [script]
            output = answer(backend)
            assert (output.text, output.finish_reason) == ("Half of it", "error")
            assert output.error is not None
            assert "mid-answer" in output.error
        server.chat = [say("back")]
        assert answer(backend).text == "back"

    def test_an_error_in_the_midst_of_a_stream(self, server: FakeServer, backend: RemoteBackend) -> None:
        def fail(asked: Asked, reply: Reply) -> None:
            reply.begin_stream()
            if len(server.chats()) == 1:
                reply.piece("Half")
            reply.event({"error": {"message": "out of memory", "code": 500}})

        server.chat = [fail]
        output = answer(backend)
        assert (output.text, output.finish_reason) == ("Half", "error")
        assert output.error is not None
        assert "out of memory" in output.error
        assert "out of memory" in str(refusal(backend))

    def test_a_server_that_is_gone_and_comes_back(self, server: FakeServer, backend: RemoteBackend) -> None:
        server.stop()
        assert "is the server running there?" in str(refusal(backend))
        server.start()
        assert answer(backend).text == "Hello there."

    def test_a_start_is_waited_for_a_little(
        self, server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Connections that fail are tried again before anything was said."""
        opened = connect(server)
        server.stop()
        threading.Timer(0.3, server.start).start()
        assert answer(opened).text == "Hello there."
        server.chat = [refuse(503, {"error": {"message": "loading"}}), say("now")]
        assert answer(opened).text == "now"
        opened.close()

    def test_what_a_server_does_not_know_is_left_out(
        self, server: FakeServer, backend: RemoteBackend
    ) -> None:
        def old(asked: Asked, reply: Reply) -> None:
            for name in ("stream_options", "max_tokens"):
                if name in asked.body:
                    hint = " Use 'max_completion_tokens' instead." if name == "max_tokens" else ""
                    reply.whole(400, {"error": {"message": f"Unsupported parameter: '{name}'.{hint}"}})
                    return
            say("fine")(asked, reply)

        server.chat = [old]
        assert answer(backend, sampling={"max_tokens": 9}).text == "fine"
        assert server.chats()[-1]["max_completion_tokens"] == 9


class TestHostileServers:
    @pytest.mark.parametrize(
        "chunk",
        [
            "{not json",
            "[]",
            "null",
            '"text"',
            "{}",
            '{"choices": null}',
            '{"choices": 7}',
            '{"choices": [null]}',
            '{"choices": [{"delta": null}]}',
            '{"choices": [{"delta": {"content": 7, "reasoning_content": []}, "finish_reason": 3}]}',
            '{"choices": [], "usage": {"prompt_tokens": "many", "completion_tokens": -4}}',
            '{"choices": [], "usage": 3}',
            '{"choices": [{"delta": {"content": "\\ud83d"}}]}',
        ],
    )
    def test_odd_chunks_end_the_answer_or_are_passed_over(
        self, server: FakeServer, backend: RemoteBackend, chunk: str
    ) -> None:
        def odd(asked: Asked, reply: Reply) -> None:
            reply.begin_stream()
            reply.piece("a")
            reply.event(chunk)
            reply.piece("b")
            reply.end()

        server.chat = [odd]
        output = answer(backend)
        assert output.text.replace("\ufffd", "") in ("a", "ab")
        output.text.encode()  # so that it can be saved
        assert output.metrics.prompt_tokens >= 0
        server.chat = [say("well")]
        assert answer(backend).text == "well"

    @given(
        st.lists(
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4).map(
                        lambda fields: SimpleNamespace(**fields)
                    )
                ),
                max_leaves=20,
            ),
            max_size=5,
        )
    )
    def test_no_chunk_breaks_an_answer(self, chunks: list[Any]) -> None:
        going = Answer(RemoteHandle(1, lambda _: None))
        for chunk in chunks:
            going.take(chunk)
            going.row()
        going.end()
        output = going.handle.result(0)
        output.text.encode()
        assert "".join(event.text for event in going.handle.poll()) == output.text
        assert 0 <= output.metrics.cached_tokens <= output.metrics.prompt_tokens

    def test_endless_answers_and_bodies_are_not_taken(
        self, server: FakeServer, backend: RemoteBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def flood(asked: Asked, reply: Reply) -> None:
            reply.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: ")
            while True:
                reply.raw(b"x" * 65_536)

        def big_error(asked: Asked, reply: Reply) -> None:
            reply.whole(400, "y" * (client.MAX_BODY_BYTES + 1))

        monkeypatch.setattr(client, "MAX_STREAM_BYTES", 2**20)
        server.chat = [flood]
        assert "sends more than 1 MB" in str(refusal(backend))
        server.chat = [big_error]
        assert "sends more than 4 MB" in str(refusal(backend))
        monkeypatch.setattr(stream, "MAX_CHARACTERS", 100)
        server.chat = [talk_on]
        output = answer(backend)
        assert len(output.text) == 100
        assert output.finish_reason == "error"

    def test_a_compressed_body_is_not_taken(self, server: FakeServer, backend: RemoteBackend) -> None:
        server.chat = [refuse(200, "{}", headers="Content-Encoding: gzip\r\n")]
        assert "compressed" in str(refusal(backend))

    def test_a_redirect_is_not_followed(self, server: FakeServer, backend: RemoteBackend) -> None:
        server.chat = [refuse(307, "", headers="Location: http://169.254.169.254/v1\r\n")]
        assert "sends us on to http://169.254.169.254/v1" in str(refusal(backend))
        assert len(server.chats()) == 1


class TestModels:
    def test_the_only_one_is_meant_and_its_limit_known(self, backend: RemoteBackend) -> None:
        assert (backend.about.model, backend.about.context_limit) == ("fake", 2048)
        assert backend.about.place == f"127.0.0.1:{backend._config.url.rpartition(':')[2]}"

    def test_of_several_one_must_be_named(self, server: FakeServer) -> None:
        server.models = {"data": [{"id": f"model-{number}"} for number in range(20)]}
        with pytest.raises(ModelNotFound, match=r"several .* --model: model-0, model-1, .* and 12 more\."):
            connect(server)
        with pytest.raises(ModelNotFound, match="no model other; it has: model-0"):
            connect(server, model="other")
        opened = connect(server, model="model-3")
        assert opened.about.model == "model-3"
        assert opened.about.context_limit is None
        opened.close()

    @pytest.mark.parametrize(
        "models",
        [
            {"data": []},
            {"data": None},
            [],
            "text",
            {"data": [None, 7, {"id": ""}, {"id": 3}, {"id": "x" * 10_000}]},
        ],
    )
    def test_a_list_that_is_none_ends_in_a_sentence(self, server: FakeServer, models: Any) -> None:
        server.models = models
        with pytest.raises(NanochatError):
            connect(server)

    def test_a_hostile_name_is_sent_as_it_is_and_shown_clean(self, server: FakeServer) -> None:
        name = "evil\x1b]52;c;x\x07\u202ename"
        server.models = {"data": [{"id": name, "max_model_len": "long"}]}
        opened = connect(server)
        assert opened.about.model == "evil␛]52;c;x␇name"
        answer(opened)
        assert server.chats()[0]["model"] == name
        opened.close()

    def test_a_server_that_lists_none(self, server: FakeServer) -> None:
        server.models = None
        with pytest.raises(ModelNotFound, match="name one with --model"):
            connect(server)
        opened = connect(server, model="fake")
        assert answer(opened).text == "Hello there."
        opened.close()


class TestKeys:
    def test_the_key_goes_to_the_server_and_nowhere_else(
        self, server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MY_KEY", f"{KEY}\n")
        opened = connect(server, api_key_env="MY_KEY")
        answer(opened)
        assert {asked.headers["authorization"] for asked in server.asked} == {f"Bearer {KEY}"}
        server.chat = [refuse(400, {"error": {"message": f"what is {KEY}?"}})]
        assert KEY not in str(refusal(opened))
        server.chat = [refuse(400, {"error": {"message": "\u200b".join(KEY)}})]
        assert KEY not in str(refusal(opened))
        assert KEY not in repr(vars(opened.about) if hasattr(opened.about, "__dict__") else opened.about)
        server.chat = [refuse(401, {"error": {"message": "no"}})]
        assert "the key in MY_KEY is not the right one" in str(refusal(opened))
        opened.close()

    def test_nothing_else_of_the_environment_is_sent(
        self, server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
            monkeypatch.setenv(name, "leak")
        monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Custom: leak")
        monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/leak")
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
        opened = connect(server)
        answer(opened)
        opened.close()
        for asked in server.asked:
            assert "leak" not in json.dumps(asked.headers)
            assert "authorization" not in asked.headers


class TestFigures:
    def test_the_page_is_read_while_it_is_shown(
        self, server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote, "METRICS_INTERVAL_S", 0.05)
        monkeypatch.setattr(remote, "SHOWN_S", 0.3)
        server.metrics = "vllm:num_requests_running 7\nvllm:kv_cache_usage_perc 0.5\n"
        opened = connect(server)

        def read() -> int:
            return sum(asked.path == "/metrics" for asked in server.asked)

        for _ in range(20):
            assert opened.stats(is_shown=False).running == 0
            time.sleep(0.01)
        assert read() == 0
        end_s = time.monotonic() + 10
        while opened.stats().running != 7 and time.monotonic() < end_s:
            time.sleep(0.02)
        told = opened.stats()
        assert (told.running, told.kv_share, told.kv_total) == (7, 0.5, None)
        time.sleep(0.5)  # nobody looks any more
        before = read()
        time.sleep(0.3)
        assert read() <= before + 1
        opened.close()

    def test_a_server_without_a_page_is_not_asked_again_and_again(
        self, server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote, "METRICS_INTERVAL_S", 0.02)
        opened = connect(server)
        for _ in range(20):
            opened.stats()
            time.sleep(0.02)
        assert sum(asked.path == "/metrics" for asked in server.asked) == 1
        opened.close()


def test_both_are_backends(backend: RemoteBackend) -> None:
    assert isinstance(backend.start(turn_of("Hi")), Started)
    assert backend.block_map() is None
    backend.forget(1)
