"""The app over a server instead of an engine of its own."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanochat.backend.remote import backend as remote
from nanochat.backend.remote import client
from nanochat.backend.remote.config import RemoteConfig
from nanochat.settings import Preset
from nanochat.ui.message import AnswerMessage
from nanochat.ui.reasoning_view import ReasoningView
from tests.backend.fake_server import Asked, FakeServer, Reply, break_off, fake_server, refuse, say, talk_on
from tests.backend.test_metrics import recorded
from tests.terminal import until
from tests.ui.driver import Driver, plain, started


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(client, "MAX_RETRIES", 0)
    with fake_server() as running:
        yield running


def at(server: FakeServer, **options: Any) -> RemoteConfig:
    return RemoteConfig(url=server.url, **options)


def footer(driver: Driver) -> str:
    return plain(list(driver.pane.query(AnswerMessage))[-1].query_one(".answer-footer"))


async def until_noted(driver: Driver, text: str) -> None:
    """Until a sentence stands in the chat in view."""
    await driver.until(lambda: any(text in noted for noted in driver.notices()))


async def test_a_chat_goes_on_over_several_turns(server: FakeServer) -> None:
    async with started(at(server), sampling={}, system="Be brief.") as driver:
        await driver.until_seen(f"fake · 127.0.0.1:{server.port}")
        assert await driver.ask("Hi") == "Hello there."
        server.chat = [say("And", " more")]
        assert await driver.ask("Go on") == "And more"
        assert [message["content"] for message in server.chats()[-1]["messages"]] == [
            "Be brief.", "Hi", "Hello there.", "Go on",
        ]  # fmt: skip
        text = footer(driver)
        assert "TTFT" in text
        assert "prompt 20 (8 cached)" in text
        await driver.until_seen("22 / 2,048")  # the context of this chat
        await driver.say("/model")
        await until_noted(driver, f"fake on the server at http://127.0.0.1:{server.port}/v1")


async def test_tabs_answer_at_once_and_one_stops(server: FakeServer) -> None:
    server.chat = [talk_on]
    async with started(at(server), sampling={}) as driver:
        await driver.say("first")
        first = driver.chat
        await driver.press("ctrl+n")
        await driver.say("second")
        chats = driver.app.main_screen.workspace.chats
        await driver.until(lambda: all(chat.live and len(chat.live.answer.text) > 30 for chat in chats))
        await driver.until_seen("2 running")
        await driver.press("escape")
        await driver.until(lambda: not driver.chat.is_busy)
        assert server.hung_up.wait(10)
        assert first.is_busy
        assert "stopped" in footer(driver)
        await driver.press("alt+1")
        (shown,) = driver.pane.query(AnswerMessage)
        await driver.until(lambda: "word word" in shown._text.source)
        await driver.press("escape")
        await driver.until_idle()


async def test_a_server_that_restarts_in_mid_answer(server: FakeServer, tmp_path: Path) -> None:
    server.chat = [talk_on]
    file = tmp_path / "history.db"
    async with started(at(server), sampling={}, history=file) as driver:
        await driver.say("Tell me")
        await driver.until(lambda: driver.chat.live and len(driver.chat.live.answer.text) > 30)
        server.stop()
        await driver.until_idle()
        kept = driver.answer_text()
        assert kept.startswith("word word")
        assert "interrupted · answer again" in footer(driver)
        await until_noted(driver, "mid-answer")
        await driver.say("Are you there?")
        await until_noted(driver, "is the server running there?")
        assert driver.prompt.text == "Are you there?"  # given back
        assert len(driver.chat.path) == 2
        server.chat = [say("I am back")]
        server.start()
        await driver.press("enter")
        await driver.until_idle()
        assert driver.answer_text() == "I am back"
        assert server.chats()[-1]["messages"][1]["content"] == kept
    async with started(at(server), sampling={}, history=file) as driver:
        assert [message.answer.text for message in driver.chat.path[1::2]] == [kept, "I am back"]


async def test_after_a_restart_a_server_is_not_said_to_go_on(server: FakeServer, tmp_path: Path) -> None:
    server.chat = [talk_on]
    file = tmp_path / "history.db"
    async with started(at(server), sampling={}, history=file, hold=True) as driver:
        await driver.until_seen("many chats at once, one server")
        await driver.until_seen("Statistics appear here")
        assert "loaded" not in driver.screen_text()
        driver.load()
        await driver.until_ready()
        await driver.say("Go")
        await driver.until(lambda: driver.chat.live and len(driver.chat.live.answer.text) > 30)
        await driver.press("ctrl+q")
        await driver.until(lambda: not driver.app.is_running)
    async with started(at(server), sampling={}, history=file) as driver:
        await driver.until_seen("interrupted")
        assert driver.chat.path[1].is_interrupted
        assert "interrupted · answer again (/again)" in footer(driver)


async def test_answering_again_after_an_interruption_makes_a_branch(server: FakeServer) -> None:
    server.chat = [break_off("Half"), say("Whole")]
    async with started(at(server), sampling={}) as driver:
        await driver.ask("Question")
        await driver.until_seen("interrupted")
        await driver.press("ctrl+r")
        await driver.until_idle()
        assert driver.answer_text() == "Whole"
        await driver.until_seen("‹ 2/2 ›")
        assert server.chats()[0]["messages"] == server.chats()[1]["messages"]
        await driver.press("alt+left")
        assert driver.answer_text() == "Half"
        await driver.say("/continue")  # what broke off with an error has nothing to go on with
        assert not driver.chat.is_busy


async def test_an_answer_that_was_stopped_can_not_go_on_and_stays(server: FakeServer) -> None:
    server.chat = [talk_on]
    async with started(at(server), sampling={}) as driver:
        await driver.say("Go")
        await driver.until(lambda: driver.chat.live and driver.chat.live.answer.text)
        await driver.press("escape")
        await driver.until_idle()
        kept = driver.answer_text()
        await driver.say("/continue")
        await until_noted(driver, "/again asks anew")
        assert driver.answer_text() == kept


async def test_the_same_refusal_stands_there_once(server: FakeServer) -> None:
    async with started(at(server), sampling={}) as driver:
        await driver.ask("Hi")
        server.chat = [refuse(400, {"error": {"message": "not like this"}}), refuse(400, {"error": "nor so"})]
        for _ in range(3):
            await driver.say("And now?")
            await driver.until(lambda: not driver.chat.is_busy and driver.prompt.text == "And now?")
            driver.prompt.text = ""
        assert [note.text.rpartition(": ")[2] for note in driver.chat.notes] == ["not like this.", "nor so."]


async def test_refusals_give_the_question_back_and_an_offer_is_made(server: FakeServer) -> None:
    async with started(at(server), sampling={}) as driver:
        for number in range(4):
            await driver.ask(f"Question {number} " + "x" * 100)
        said = "This model's maximum context length is 2048 tokens and your request has 2500 input tokens."
        server.chat = [refuse(400, {"error": {"message": said}}), say("It fits")]
        await driver.say("One more")
        await driver.until_seen("The context is full.")
        await driver.until_seen("to about")
        await driver.press("enter")
        await driver.until(lambda: driver.chat.left_out is not None and not driver.chat.is_busy)
        assert driver.answer_text() == "It fits"
        assert len(server.chats()[-1]["messages"]) < len(server.chats()[-2]["messages"])


async def test_reasoning_is_folded_and_not_sent_back(server: FakeServer) -> None:
    def think(asked: Asked, reply: Reply) -> None:
        reply.begin_stream()
        reply.piece(reasoning_content="Let me ")
        reply.piece(reasoning_content="see.")
        reply.piece("It is **four**.")
        reply.end()

    server.chat = [think]
    async with started(at(server), sampling={}) as driver:
        await driver.ask("Two and two?")
        (view,) = driver.pane.query(ReasoningView)
        assert view.display
        await driver.until_seen("▸ Thought")
        assert driver.chat.path[-1].answer.answer == "It is **four**."
        await driver.ask("Sure?")
        assert server.chats()[-1]["messages"][1]["content"] == "It is **four**."
        await driver.say("/think off")
        await driver.ask("And now?")
        assert server.chats()[-1]["chat_template_kwargs"] == {"enable_thinking": False}


async def test_settings_and_presets_are_sent_and_the_rest_is_the_servers(server: FakeServer) -> None:
    presets = {"precise": Preset("Exactly.", {"temperature": 0.0, "top_k": 5})}
    async with started(at(server), sampling={"top_p": 0.8}, presets=presets) as driver:
        await driver.say("/set")
        await until_noted(driver, "top_p 0.8 · the rest as the server has it")
        await driver.say("/preset precise")
        await driver.ask("Hi")
        body = server.chats()[-1]
        assert (body["temperature"], body["top_p"], body["top_k"]) == (0.0, 0.8, 5)
        assert body["messages"][0] == {"role": "system", "content": "Exactly."}
        assert "max_tokens" not in body
        await driver.say("/settings")
        await driver.until_seen("the server's")


async def test_hostile_text_reaches_no_terminal(server: FakeServer) -> None:
    evil = "a\x1b]52;c;ZXZpbA==\x07b\x1b[2J\u202ec [bold]d[/bold] \x9b31m"

    def attack(asked: Asked, reply: Reply) -> None:
        if len(server.chats()) > 1:
            reply.whole(500, {"error": {"message": evil}})
            return
        reply.begin_stream()
        reply.piece(reasoning_content=evil)
        reply.piece(evil)
        reply.end()

    server.chat = [attack]
    server.models = {"data": [{"id": f"model {evil}"}]}
    async with started(at(server), sampling={}) as driver:
        await driver.ask("Hi")
        await driver.say("More")
        await driver.until(lambda: driver.notices())
        await driver.until_seen("␛]52;c;")
        text = driver.screen_text()
        assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(text)
        assert "[bold]d[/bold]" in text


async def test_the_panel_shows_the_servers_figures_also_while_idle(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "METRICS_INTERVAL_S", 0.1)
    server.metrics = recorded("vllm")
    async with started(at(server), sampling={}) as driver:
        await driver.until_seen("28,350 / 54,000")
        await driver.until_seen("Prefix hits  73 %")
        await driver.until_seen("41 running · 3 queued")
        await driver.until_seen("figures of the whole server")
        server.metrics = recorded("sglang_ranks")
        await driver.until_seen("10,000 / 20,000")
        await driver.until_seen("KV tokens")


async def test_without_a_page_the_panel_shows_what_is_measured_here(server: FakeServer) -> None:
    async with started(at(server), sampling={}) as driver:
        await driver.ask("Hi")
        await driver.until_seen("KV cache")
        screen = driver.screen_text()
        assert "your own; the server tells none" in screen
        assert "Prefix hits  —" in screen
        assert "Preempted  —" in screen
        line = next(line for line in screen.split("\n") if "TTFT p50" in line)
        assert "ms" in line or " s" in line


async def test_a_start_without_a_server_can_be_tried_again(server: FakeServer) -> None:
    server.stop()
    async with started(at(server), sampling={}, hold=True) as driver:
        driver.load()
        await driver.until_seen("There is no server to answer")
        await driver.until_seen("is the server running there?")
        assert "no server" in driver.screen_text().split("\n")[0]
        await driver.say("Hello?")
        assert "/model NAME asks the server for another." in driver.notices()[-1]
        assert driver.prompt.text == "Hello?"
        server.start()
        driver.prompt.text = ""
        await driver.say("/model")
        await driver.until_ready()
        assert await driver.ask("Hello?") == "Hello there."


async def test_leaving_while_a_server_says_nothing_takes_no_time(server: FakeServer) -> None:
    """The app is left while it connects; see ``started`` for how its threads must end."""
    silent = socket.create_server(("127.0.0.1", 0))
    config = RemoteConfig(url=f"http://127.0.0.1:{silent.getsockname()[1]}")
    async with started(config, hold=True) as driver:
        driver.load()
        await driver.until_seen("Connecting to 127.0.0.1")
        until(driver.app.close_engine)  # each call waits for a moment only
    silent.close()


async def test_another_of_the_servers_models(server: FakeServer) -> None:
    server.models = {"data": [{"id": "small"}, {"id": "large", "max_model_len": 9_000}]}
    async with started(at(server, model="small"), sampling={}) as driver:
        await driver.ask("Hi")
        await driver.say("/model huge")
        await until_noted(driver, "it has: small, large")
        await driver.until_ready()
        await driver.say("/model large")
        await driver.until_seen("large · 127.0.0.1")
        await driver.until_ready()
        await driver.ask("And you?")
        assert [body["model"] for body in server.chats()] == ["small", "large"]


async def test_the_key_is_nowhere_to_be_seen_or_found(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = "sk-do-not-tell-7788"
    monkeypatch.setenv("NANOCHAT_TEST_KEY", key)
    server.chat = [say("Fine"), refuse(400, {"error": {"message": f"bad key {key}"}})]
    with caplog.at_level("DEBUG"):
        async with started(
            at(server, api_key_env="NANOCHAT_TEST_KEY"), sampling={}, history=tmp_path / "history.db"
        ) as driver:
            await driver.ask("Hi")
            await driver.say("Again")
            await until_noted(driver, "bad key •••")
            assert key not in driver.screen_text()
    assert {asked.headers["authorization"] for asked in server.asked} == {f"Bearer {key}"}
    assert key not in json.dumps(caplog.messages)
    for file in tmp_path.iterdir():
        assert key.encode() not in file.read_bytes()
