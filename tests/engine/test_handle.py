"""The mailbox between the step thread and a caller."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from nanochat.engine.handle import RequestHandle, take_events
from nanochat.engine.outputs import Event, RequestMetrics, RequestOutput


def make_output(text: str = "ab") -> RequestOutput:
    return RequestOutput(text, [1, 2], "stop", None, None, RequestMetrics())


def make_handle() -> tuple[RequestHandle, list[int]]:
    cancelled: list[int] = []
    return RequestHandle(7, cancelled.append), cancelled


def finish(handle: RequestHandle) -> None:
    handle.push(Event("a", (1,)))
    handle.push(Event("b", (2,), "stop"), make_output())


class TestTakingEvents:
    def test_poll_gives_each_event_once_and_never_blocks(self) -> None:
        handle, _ = make_handle()
        assert handle.poll() == []
        handle.push(Event("a", (1,)))
        assert [event.text for event in handle.poll()] == ["a"]
        assert handle.poll() == []

    def test_iteration_blocks_until_the_end(self) -> None:
        handle, _ = make_handle()
        thread = threading.Thread(target=lambda: (time.sleep(0.02), finish(handle)))
        thread.start()
        assert "".join(event.text for event in handle) == "ab"
        thread.join()

    def test_iterating_a_finished_handle_gives_what_is_left(self) -> None:
        handle, _ = make_handle()
        finish(handle)
        assert [event.text for event in handle] == ["a", "b"]
        assert list(handle) == []

    async def test_async_iteration_is_woken_from_another_thread(self) -> None:
        handle, _ = make_handle()
        thread = threading.Thread(target=lambda: (time.sleep(0.02), finish(handle)))
        thread.start()
        texts = [event.text async for event in handle]
        assert "".join(texts) == "ab"
        thread.join()

    async def test_those_of_several_come_as_they_are_made_and_together_for_the_slow(self) -> None:
        handles = [make_handle()[0] for _ in range(3)]
        finish(handles[1])
        taken = take_events(handles)
        assert await anext(taken) == (1, [Event("a", (1,)), Event("b", (2,), "stop")])
        for handle in (handles[2], handles[0]):
            threading.Timer(0.02, finish, [handle]).start()
        texts = {0: "", 2: ""}
        async for index, events in taken:
            texts[index] += "".join(event.text for event in events)
        assert texts == {0: "ab", 2: "ab"}
        assert not any(handle._wakers for handle in handles)

    async def test_async_iteration_of_a_finished_handle_ends(self) -> None:
        handle, _ = make_handle()
        finish(handle)
        async with asyncio.timeout(5):
            assert [event.text async for event in handle] == ["a", "b"]

    def test_nothing_is_delivered_after_the_end(self) -> None:
        handle, _ = make_handle()
        finish(handle)
        handle.push(Event("c", (3,)))
        assert [event.text for event in handle.poll()] == ["a", "b"]


class TestResult:
    def test_waits_for_the_output(self) -> None:
        handle, _ = make_handle()
        finish(handle)
        assert handle.done
        assert handle.result().text == "ab"

    def test_times_out_without_ending_the_request(self) -> None:
        handle, cancelled = make_handle()
        with pytest.raises(TimeoutError, match="still running"):
            handle.result(timeout=0.01)
        assert cancelled == []


class TestCancel:
    def test_asks_once_it_runs_and_not_when_it_has_ended(self) -> None:
        handle, cancelled = make_handle()
        handle.cancel()
        finish(handle)
        handle.cancel()
        assert cancelled == [7]
