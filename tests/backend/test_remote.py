"""A server as a backend: what is sent, what comes of it, and every way in which it can fail."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from nanochat.backend.interface import Refused, Started
from nanochat.backend.remote import backend as remote
from nanochat.backend.remote.backend import RemoteBackend
from nanochat.errors import EngineClosed, InvalidOption, ModelNotFound, NanochatError
from tests.backend.fake_server import (
    Asked,
    FakeServer,
    Reply,
    refuse,
    say,
    talk_on,
)
from tests.backend.turns import answer, connect, refusal, turn_of

KEY = "sk-very-secret-123"


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

    def test_a_refusal_is_the_answer(self, server: FakeServer, backend: RemoteBackend) -> None:
        def refuse(asked: Asked, reply: Reply) -> None:
            reply.begin_stream()
            reply.piece(role="assistant", content=None, refusal=None)
            reply.piece(content=None, refusal="I can't ")
            reply.piece(content=None, refusal="help with that.")
            reply.end()

        server.chat = [refuse]
        assert answer(backend).text == "I can't help with that."

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
        output = handle.result(60)
        assert output.finish_reason == "cancelled"
        assert output.text.startswith("word ")
        assert server.hung_up.wait(60)
        assert backend.stats().requests == ()

    def test_cancelling_before_anything_was_sent(self, server: FakeServer, backend: RemoteBackend) -> None:
        handle = backend.start(turn_of("Hi")).handle
        handle.cancel()
        assert handle.result(60).finish_reason == "cancelled"

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
        assert handle.result(60).finish_reason == "cancelled"
        assert not backend._thread.is_alive()
        with pytest.raises(EngineClosed):
            backend.start(turn_of("Hi"))

    def test_no_answer_goes_on_and_a_wrong_setting_is_refused_here(self, backend: RemoteBackend) -> None:
        with pytest.raises(Refused, match="/again"):
            backend.start(turn_of("Hi", partial=answer(backend)))
        with pytest.raises(InvalidOption, match="temperature"):
            backend.start(turn_of("Hi", sampling={"temperature": -1}))


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
        self, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
            monkeypatch.setenv(name, "leak")
        monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Custom: leak")
        monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/leak")
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password leak\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
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
        end_s = time.monotonic() + 60
        while opened.stats().running != 7 and time.monotonic() < end_s:
            time.sleep(0.02)
        told = opened.stats()
        assert (told.running, told.kv_share, told.kv_total) == (7, 0.5, None)
        time.sleep(0.5)  # nobody looks any more
        before = read()
        time.sleep(0.3)
        assert read() <= before + 1
        opened.close()

    @pytest.mark.parametrize("charset", ["hex", "rot13", "idna", "undefined", "utf-16"])
    def test_a_charset_that_is_none(
        self, server: FakeServer, monkeypatch: pytest.MonkeyPatch, charset: str
    ) -> None:
        monkeypatch.setattr(remote, "METRICS_INTERVAL_S", 0.02)
        server.metrics, server.metrics_kind = (
            "vllm:num_requests_running 7\n",
            f"text/plain; charset={charset}",
        )
        opened = connect(server)
        end_s = time.monotonic() + 60
        while opened.stats().running != 7 and time.monotonic() < end_s:
            time.sleep(0.02)
        assert opened.stats().running == 7
        opened.close()

    def test_a_page_that_nobody_has_foreseen_does_not_end_the_watch(
        self, server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(remote, "METRICS_INTERVAL_S", 0.02)
        monkeypatch.setattr(remote, "LOOK_AGAIN_S", 0.1)
        read_page, texts = remote.read_page, []

        def read(text: str, model: str) -> object:
            texts.append(text)
            if len(texts) == 1:
                raise AssertionError(text)
            return read_page(text, model)

        monkeypatch.setattr(remote, "read_page", read)
        server.metrics = "vllm:num_requests_running 7\n"
        opened = connect(server)
        end_s = time.monotonic() + 60
        while opened.stats().running != 7 and time.monotonic() < end_s:
            time.sleep(0.02)
        opened.close()
        assert len(texts) > 1
        assert "passed over: AssertionError" in caplog.text

    def test_a_server_without_a_page_is_not_asked_again_and_again(
        self, server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote, "METRICS_INTERVAL_S", 0.02)
        opened = connect(server)

        def asked() -> int:
            return sum(asked.path == "/metrics" for asked in server.asked)

        end_s = time.monotonic() + 60
        while not asked() and time.monotonic() < end_s:
            opened.stats()
            time.sleep(0.02)
        for _ in range(20):
            opened.stats()
            time.sleep(0.02)
        assert asked() == 1
        opened.close()


def test_both_are_backends(backend: RemoteBackend) -> None:
    assert isinstance(backend.start(turn_of("Hi")), Started)
    assert backend.block_map() is None
    backend.forget(1)


def test_a_closed_chat_leaves_nothing_behind_though_its_answer_ends_later(
    server: FakeServer, backend: RemoteBackend
) -> None:
    server.chat = [say("a", "b", pause_s=0.05)]
    turn = turn_of("Hi")
    handle = backend.start(turn).handle
    backend.forget(turn.chat_id)
    handle.result(30)
    answer(backend, "another")  # its loop has come past the first one's end
    assert turn.chat_id not in backend._contexts
