"""Every way in which a server can fail, or lie."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.backend.interface import Refused
from nanochat.backend.opening import open_backend
from nanochat.backend.remote import client, stream
from nanochat.backend.remote.backend import RemoteBackend
from nanochat.backend.remote.config import RemoteConfig
from nanochat.backend.remote.handle import RemoteHandle
from nanochat.backend.remote.stream import Answer
from nanochat.errors import NanochatError
from tests.backend.fake_server import (
    Asked,
    FakeServer,
    Reply,
    break_off,
    refuse,
    say,
    talk_on,
)
from tests.backend.turns import answer, connect, refusal

FIELDS = (
    *("choices", "usage", "delta", "content", "reasoning_content", "reasoning", "finish_reason"),
    *("prompt_tokens", "completion_tokens", "prompt_tokens_details", "cached_tokens"),
)


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
        server.chat = [refuse(400, {"error": {"message": "Too many tokens for the context window."}})]
        error = refusal(backend, "One", "two", "three")
        assert isinstance(error, Refused)
        assert str(error).endswith("/drop 1 leaves out the oldest turn.")

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


class TestOtherServers:
    """What answers is a server, but not of this API."""

    @pytest.mark.parametrize(
        "models",
        ["<html>hi", "null", "[1, 2]", '{"data": {"a": 1}}', "{}", "7", "[" * 100_000, "9" * 100_000],
    )
    @pytest.mark.parametrize(
        "kind", ["application/json", "text/html; charset=hex", "text/plain; charset=idna"]
    )
    def test_a_list_of_models_that_is_none(self, server: FakeServer, models: str, kind: str) -> None:
        server.models, server.models_kind = models, kind
        with pytest.raises(NanochatError) as caught:
            connect(server)
        assert str(caught.value) == (
            f"127.0.0.1:{server.port} doesn't answer as an OpenAI-compatible server does "
            "(its /v1/models is not a list of models); check the address."
        )

    def test_an_answer_that_is_no_http(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client, "MAX_RETRIES", 0)
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def greet() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65_536)
                    connection.sendall(b"\x00\xff\x1b[31mgarbage\r\n\r\n")

            threading.Thread(target=greet, daemon=True).start()
            with pytest.raises(NanochatError, match=r"what it sends is not HTTP\); check the address\.$"):
                open_backend(RemoteConfig(url=f"http://127.0.0.1:{listener.getsockname()[1]}"))

    def test_a_path_without_an_api(self, server: FakeServer) -> None:
        server.models = None
        with pytest.raises(NanochatError, match=r"most addresses end in /v1 or in nothing"):
            open_backend(RemoteConfig(url=f"{server.url}/v2"))
        with pytest.raises(NanochatError, match=r"doesn't list its models; name one"):
            connect(server)

    @pytest.mark.parametrize(
        ("body", "kind", "said"),
        [
            ("<html><body>hi", "text/html", "it sends a web page"),
            ("<html><body>hi", "application/json", "something else than an answer"),
            ("null", "application/json; charset=hex", "something else than an answer"),
            ("9" * 100_000, "application/json", "something else than an answer"),
            ('data: {"choices": 9' + "9" * 100_000 + "}\n\n", "text/event-stream", "it sends no answer"),
        ],
    )
    def test_a_chat_that_is_none(
        self, server: FakeServer, backend: RemoteBackend, body: str, kind: str, said: str
    ) -> None:
        server.chat = [lambda asked, reply: reply.whole(200, body, kind)]
        sentence = str(refusal(backend))
        assert "doesn't answer as an OpenAI-compatible server does" in sentence
        assert said in sentence

    def test_a_whole_answer_where_a_stream_was_asked_for(
        self, server: FakeServer, backend: RemoteBackend
    ) -> None:
        usage = {"prompt_tokens": 5, "completion_tokens": 2}
        for message, text in (
            ({"content": "All of it"}, "All of it"),
            ({"content": "So", "reasoning_content": "Hm"}, "<think>\nHm\n</think>\n\nSo"),
        ):
            whole = {"choices": [{"message": message}], "usage": usage}
            server.chat = [lambda asked, reply, whole=whole: reply.whole(200, whole)]
            output = answer(backend)
            assert (output.text, output.finish_reason, output.error) == (text, "stop", None)
            assert output.metrics.prompt_tokens == 5
        for odd in ([], [None], [{}], [{"message": 7}], [{"message": {"content": 7}}]):
            server.chat = [lambda asked, reply, odd=odd: reply.whole(200, {"choices": odd, "usage": 3})]
            assert answer(backend).text == ""

    def test_a_stream_under_a_wrong_name(self, server: FakeServer, backend: RemoteBackend) -> None:
        events = (
            'data: {"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
        )
        server.chat = [lambda asked, reply: reply.whole(200, events)]
        assert answer(backend).text == "Hi"


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
