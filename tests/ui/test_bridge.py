"""Polling: one message a chat, in order, no sooner than a slow screen can take it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from textual.message import Message

from nanochat.backend.interface import About, DropOffer, Refused, Started, Turn
from nanochat.engine.handle import RequestHandle
from nanochat.engine.outputs import Event, RequestMetrics, RequestOutput
from nanochat.errors import InvalidOption
from nanochat.ui.bridge import (
    COST_FACTOR,
    MAX_DELTA_INTERVAL_S,
    AnswerEnded,
    AnswerRefused,
    AnswersGrew,
    Bridge,
    Grown,
)
from nanochat.ui.chat import Chat
from nanochat.ui.sampling_commands import describe, parse_setting

OUTPUT = RequestOutput("ab", [1, 2], "stop", None, None, RequestMetrics())


class IdleBackend:
    """Stands in for a backend where only polling is tested and time is given by hand."""

    about = About(
        model="none",
        place="nowhere",
        description="",
        context_limit=None,
        reasoning_tags=None,
        default_sampling={"temperature": 0.2},
    )

    def forget(self, chat_id: int) -> None:
        pass


@pytest.fixture
def posted() -> list[Message]:
    return []


@pytest.fixture
def bridge(posted: list[Message]) -> Bridge:
    return Bridge(IdleBackend(), {"top_p": 0.9}, posted.append)  # type: ignore[arg-type]


def handle(cancelled: list[int] | None = None) -> RequestHandle:
    return RequestHandle(5, (cancelled if cancelled is not None else []).append)


def test_events_of_one_poll_become_one_message(bridge: Bridge, posted: list[Message]) -> None:
    live = handle()
    bridge.track(1, live)
    live.push(Event("a\x1b", (1,)))
    live.push(Event("b", (2, 3)))
    bridge.poll()
    bridge.poll()
    (grew,) = posted
    assert isinstance(grew, AnswersGrew)
    assert grew.grown == [Grown(1, "a␛b", 3)]
    assert bridge.request_ids() == {5: 1}


def test_the_end_comes_after_the_last_text_and_ends_the_polling(
    bridge: Bridge, posted: list[Message]
) -> None:
    live = handle()
    bridge.track(1, live)
    live.push(Event("ab", (1, 2), "stop"), OUTPUT)
    bridge.poll()
    assert [type(message) for message in posted] == [AnswersGrew, AnswerEnded]
    assert not bridge.is_active


def test_drawing_takes_a_25th_of_the_time_up_to_4_ms_and_comes_ten_times_a_second() -> None:
    """What docs/architecture.md says."""
    assert pytest.approx(1 / 25) == 1 / COST_FACTOR
    assert pytest.approx(0.0036) == MAX_DELTA_INTERVAL_S / COST_FACTOR
    assert MAX_DELTA_INTERVAL_S < 0.1


def test_slow_drawing_delays_the_next_text_but_not_the_end(bridge: Bridge, posted: list[Message]) -> None:
    live = handle()
    bridge.track(1, live)
    bridge.report_cost(1, 0.002, now_s=100.0)
    live.push(Event("a", (1,)))
    bridge.poll(now_s=100.0 + 0.002 * COST_FACTOR - 0.001)
    assert posted == []
    bridge.poll(now_s=101.0)
    assert len(posted) == 1
    assert bridge.rest_s(now_s=101.0) == pytest.approx(0.002 * COST_FACTOR)  # also before it is drawn
    bridge.report_cost(1, 0.003)
    assert bridge.rest_s(now_s=101.0) == pytest.approx(0.003 * COST_FACTOR)
    bridge.report_cost(1, 60.0, now_s=101.0)
    live.push(Event("b", (2,)))
    bridge.poll(now_s=101.0 + MAX_DELTA_INTERVAL_S)
    assert len(posted) == 2
    bridge.report_cost(1, 60.0, now_s=102.0)
    live.push(Event("", (), "stop"), OUTPUT)
    bridge.poll(now_s=102.0)
    assert isinstance(posted[-1], AnswerEnded)


def test_chats_out_of_view_come_seldom_and_all_at_once(bridge: Bridge, posted: list[Message]) -> None:
    """Each time the app wakes up costs the engine time."""
    assert bridge.rest_s(now_s=100.0) == 0.0
    for chat_id, now_s in ((1, 100.1), (2, 100.3)):
        live = handle()
        bridge.track(chat_id, live)
        bridge.report_cost(chat_id, None, now_s=now_s)
        live.push(Event("a", (1,)))
    assert bridge.rest_s(now_s=100.3) == pytest.approx(0.2)
    bridge.poll(now_s=100.49)
    assert posted == []
    bridge.poll(now_s=100.51)
    (grew,) = posted
    assert isinstance(grew, AnswersGrew)
    assert [grown.chat_id for grown in grew.grown] == [1, 2]
    bridge.track(3, handle())  # its first words are waited for
    assert bridge.rest_s(now_s=100.51) < 0


def test_a_stop_while_submitting_cancels_as_soon_as_there_is_a_request(bridge: Bridge) -> None:
    cancelled: list[int] = []
    bridge.stop(1)
    bridge.track(1, handle(cancelled))
    assert cancelled == [5]
    bridge.track(2, handle(cancelled))
    assert cancelled == [5]


def test_a_closed_chat_is_cancelled_and_no_longer_polled(posted: list[Message]) -> None:
    kept: list[object] = []
    backend: Any = IdleBackend()
    bridge = Bridge(backend, {}, posted.append, lambda *what: kept.append(what))
    cancelled: list[int] = []
    live = handle(cancelled)
    bridge.track(1, live)
    live.push(Event("said", (7,)))
    bridge.forget(1)
    live.push(Event("a", (1,)))
    bridge.poll()
    assert (cancelled, posted) == ([5], [])
    assert kept == [(1, "said", [7])]


def test_a_chat_closed_while_its_turn_waits_is_forgotten_after_it(posted: list[Message]) -> None:
    done: list[tuple[str, int]] = []
    may_go_on, is_over = threading.Event(), threading.Event()

    class Slow(IdleBackend):
        def start(self, turn: Turn) -> Started:
            may_go_on.wait(60)
            done.append(("start", turn.chat_id))
            return Started(handle(), None)

        def forget(self, chat_id: int) -> None:
            done.append(("forget", chat_id))
            is_over.set()

    bridge = Bridge(Slow(), {}, posted.append)  # type: ignore[arg-type]
    chat = Chat()
    chat.ask("one")
    bridge.submit(chat)
    bridge.forget(chat.id)
    may_go_on.set()
    assert is_over.wait(60)
    assert done == [("start", chat.id), ("forget", chat.id)]


def test_whatever_goes_wrong_while_submitting_is_told_and_the_next_prompt_is_taken(
    bridge: Bridge, posted: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("in the template")

    monkeypatch.setattr(bridge.backend, "start", fail, raising=False)
    for number in (1, 2):
        chat = Chat()
        chat.ask("Hello")
        bridge.submit(chat)
        end_s = time.monotonic() + 60
        while len(posted) < number and time.monotonic() < end_s:
            time.sleep(0.01)
        refused = posted[number - 1]
        assert isinstance(refused, AnswerRefused)
        assert "in the template" in refused.error
        assert refused.chat_id == chat.id


def test_a_refusal_keeps_its_offer_whenever_it_comes(
    bridge: Bridge, posted: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = DropOffer(2, 900, 300, 512)

    def refuse(*_: object) -> None:
        raise Refused("too long", offer)

    monkeypatch.setattr(bridge.backend, "start", refuse, raising=False)
    chat = Chat()
    chat.ask("Hello")
    bridge.submit(chat)
    end_s = time.monotonic() + 60
    while not posted and time.monotonic() < end_s:
        time.sleep(0.01)

    class Late(RequestHandle):
        def result(self, timeout: float | None = None) -> RequestOutput:
            raise Refused("too late", offer)

    late = Late(6, lambda _: None)
    late.push(Event("", (), "error"), OUTPUT)
    bridge.track(7, late)
    bridge.poll()
    assert [(told.error, told.offer) for told in posted if isinstance(told, AnswerRefused)] == [
        ("too long", offer),
        ("too late", offer),
    ]
    assert not bridge.is_active


def test_settings_are_layered(bridge: Bridge) -> None:
    params = bridge.sampling_params({"max_tokens": 7})
    assert (params.temperature, params.top_p, params.max_tokens) == (0.2, 0.9, 7)


@pytest.mark.parametrize(
    ("written", "setting"),
    [
        ("temperature 0.2", ("temperature", 0.2)),
        ("Top-P=0.5", ("top_p", 0.5)),
        ("max_tokens 12", ("max_tokens", 12)),
        ("seed default", ("seed", None)),
        ("stop the end", ("stop", ("the end",))),
        ("stop \\n", ("stop", ("\n",))),
    ],
)
def test_settings_as_they_are_written(written: str, setting: tuple[str, Any]) -> None:
    assert parse_setting(written) == setting


@pytest.mark.parametrize(
    "written", ["", "temperature", "temperature warm", "max_tokens 1.5", "logprobs 3", "nonsense 1"]
)
def test_wrong_settings_are_refused_with_a_sentence(written: str) -> None:
    with pytest.raises(InvalidOption):
        parse_setting(written)


def test_settings_are_described(bridge: Bridge) -> None:
    text = describe(bridge.sampling_params({"seed": 1, "stop": ("\n",)}), {"seed": 1})
    assert "seed 1 (this chat)" in text
    assert "stop \\n ·" in text
    assert "top_p 0.9 ·" in text


@pytest.mark.parametrize("way", ["stop_all", "forget"])
def test_an_answer_that_has_ended_unseen_is_kept_as_ended(way: str, posted: list[Message]) -> None:
    ends: list[tuple[int, RequestOutput]] = []
    texts: list[str] = []
    bridge = Bridge(
        IdleBackend(),  # type: ignore[arg-type]
        {},
        posted.append,
        lambda chat_id, text, token_ids: texts.append(text),
        lambda *end: ends.append(end),
    )
    cancelled: list[int] = []
    live, running = handle(cancelled), handle(cancelled)
    bridge.track(1, live)
    bridge.track(2, running)
    live.push(Event("ab", (1, 2), "stop"), OUTPUT)
    running.push(Event("c", (3,)))
    if way == "stop_all":
        bridge.stop_all()
    else:
        bridge.forget(1)
        bridge.forget(2)
    assert (ends, texts, cancelled, posted) == ([(1, OUTPUT)], ["ab", "c"], [5], [])
