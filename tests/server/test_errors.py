"""Errors in the API's own format, as the official client raises them; and what goes wrong on the server's side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from nanochat.engine.scheduler import Scheduler
from tests.engine.conftest import wait_until
from tests.server.conftest import MakeServer, Running
from tests.tiny_model import write_tiny_llama

HI: list[Any] = [{"role": "user", "content": "Hi"}]


class TestTheClients:
    @pytest.mark.parametrize("text", ["a" * 2_100, "a" * 500_000])
    def test_a_context_too_long(self, api: Running, text: str) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            api.client().chat.completions.create(
                model=api.model, messages=[{"role": "user", "content": text}]
            )
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
        with pytest.raises(openai.BadRequestError) as caught:
            api.client().completions.create(model=api.model, prompt=["a", text])
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")

    def test_more_messages_than_tokens_fit(self, api: Running) -> None:
        with pytest.raises(openai.BadRequestError, match="2,048 messages but at most 2,047") as caught:
            api.client().chat.completions.create(
                model=api.model, messages=[{"role": "user", "content": ""}] * 2_048
            )
        assert caught.value.code == "context_length_exceeded"

    def test_another_model(self, api: Running) -> None:
        with pytest.raises(openai.NotFoundError, match="this server has tiny-llama") as caught:
            api.client().chat.completions.create(model="gpt-4", messages=HI)
        assert caught.value.code == "model_not_found"
        as_started = api.engine.config.model
        answer = api.client().chat.completions.create(model=as_started, messages=HI, max_tokens=1)
        assert answer.model == "tiny-llama"
        assert api.client().models.retrieve(as_started).id == "tiny-llama"

    def test_messages_that_no_template_takes(self, api: Running) -> None:
        messages = [*HI, {"role": "system", "content": "late"}]
        with pytest.raises(openai.BadRequestError, match="only the first one"):
            api.client().chat.completions.create(model=api.model, messages=messages)

    def test_what_a_template_is_told(self, make_server: MakeServer, tmp_path: Path) -> None:
        """Too long a text for the template to write, refused as one in a message is; and what it fails with."""
        folder = write_tiny_llama(tmp_path / "told")
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        settings["chat_template"] = "{{ note }}{{ month + 1 if month }}" + settings["chat_template"]
        file.write_text(json.dumps(settings))
        api = make_server(folder)

        def refusal(**told: Any) -> openai.BadRequestError:
            with pytest.raises(openai.BadRequestError) as caught:
                api.client().chat.completions.create(
                    model=api.model, messages=HI, extra_body={"chat_template_kwargs": told}
                )
            return caught.value

        assert refusal(note="a" * 500_000).code == "context_length_exceeded"
        failed = refusal(month="May")
        assert failed.param == "chat_template_kwargs"
        assert "another model" not in failed.message

    @pytest.mark.parametrize("prompt", ["", [320], [-1], [[0], [10**30]]])
    def test_a_prompt_that_is_none(self, api: Running, prompt: Any) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            api.client().completions.create(model=api.model, prompt=prompt)
        assert caught.value.param == "prompt"

    @pytest.mark.parametrize(
        ("content", "kind", "status"),
        [
            (b"{", "application/json", 400),
            (b"[]", "application/json; charset=utf-8", 400),
            (b"{}", "text/plain", 415),
            (b"{}", "application/x-www-form-urlencoded", 415),
            (b"[" * 50_000, "application/json", 400),
        ],
    )
    def test_a_body_that_is_none(self, api: Running, content: bytes, kind: str, status: int) -> None:
        for path in ("/v1/chat/completions", "/v1/completions"):
            reply = httpx2.post(api.url + path, content=content, headers={"content-type": kind})
            assert reply.status_code == status
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

    @pytest.mark.parametrize(
        ("method", "path", "status", "sentence"),
        [
            ("GET", "/", 404, "There is nothing at /; this server has /v1/chat/completions, "),
            ("GET", "/health/", 404, "There is nothing at /health/; this server has /v1/chat/completions, "),
            ("GET", "/v1/chat/completions", 405, "/v1/chat/completions takes POST, not GET."),
            ("GET", "/v1/completions", 405, "/v1/completions takes POST, not GET."),
            ("POST", "/v1/models", 405, "/v1/models takes GET or HEAD, not POST."),
            ("GET", "/v1/models/gpt-4", 404, "There is no such model here."),
            ("OPTIONS", "/v1/chat/completions", 405, "/v1/chat/completions takes POST, not OPTIONS."),
            ("GET", "/v1/" + "a" * 5_000, 404, "There is nothing at /v1/aaa"),
        ],
    )
    def test_nothing_there(self, api: Running, method: str, path: str, status: int, sentence: str) -> None:
        reply = httpx2.request(method, api.url + path)
        assert reply.status_code == status
        error = reply.json()["error"]
        assert error["message"].startswith(sentence)
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert len(reply.content) < 500
        assert (reply.headers.get("allow") is not None) == (status == 405)

    def test_more_than_there_are_places_for(self, make_server: MakeServer, long_llama: Any) -> None:
        api = make_server(long_llama, max_requests=2)
        body = {"model": api.model, "messages": HI, "stream": True, "max_tokens": 5_000, "ignore_eos": True}
        assert api.post("/v1/chat/completions", body | {"n": 3}).status_code == 400
        with httpx2.stream("POST", f"{api.url}/v1/chat/completions", json=body | {"n": 2}) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            refused = api.post("/v1/chat/completions", body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        wait_until(lambda: not api.service._num_choices)
        assert api.post("/v1/chat/completions", body | {"stream": False, "max_tokens": 2}).status_code == 200


class TestTheServers:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_step_that_fails(
        self, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, stream: bool
    ) -> None:
        api = make_server()
        runner = api.engine._model.runner
        monkeypatch.setattr(runner, "launch", lambda _: (_ for _ in ()).throw(ValueError("broken kernel")))
        if stream:
            with pytest.raises(openai.APIError, match="broken kernel"):
                list(api.client().chat.completions.create(model=api.model, messages=HI, stream=True))
        else:
            with pytest.raises(openai.InternalServerError, match="broken kernel"):
                api.client().chat.completions.create(model=api.model, messages=HI)
        monkeypatch.undo()
        assert api.client().chat.completions.create(model=api.model, messages=HI, max_tokens=2).choices

    def test_an_engine_that_has_died(self, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        api = make_server()
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "plan", lambda *_: (_ for _ in ()).throw(ValueError("broken plan")))
            with pytest.raises(openai.InternalServerError, match="broken plan"):
                api.client().chat.completions.create(model=api.model, messages=HI)
        with pytest.raises(openai.InternalServerError) as caught:
            api.client().chat.completions.create(model=api.model, messages=HI)
        assert caught.value.status_code == 503
        assert httpx2.get(f"{api.url}/health").status_code == 503

    def test_a_mistake_of_ours(self, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        """No trace of it reaches the client."""
        api = make_server()
        monkeypatch.setattr(api.service, "_submit", lambda _: 1 / 0)
        reply = api.post("/v1/chat/completions", {"model": api.model, "messages": HI})
        assert reply.status_code == 500
        assert reply.json()["error"]["type"] == "server_error"
        assert "division" not in reply.text
        assert not api.service._num_choices
