"""A caller's end of one request: the step thread puts events in, any other thread takes them out.

Knows nothing of scheduling or models; it is a small thread-safe mailbox that ends with an output.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanochat.engine.outputs import Event, RequestOutput


class RequestHandle:
    """Events of one request, each delivered once, and its output.

    Take events by iterating (blocking), by ``async for``, or with :meth:`poll` (never blocks); mixing
    them splits the events between the takers. :meth:`result` is independent of all three.
    """

    def __init__(self, request_id: int, cancel: Callable[[int], None]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._condition = threading.Condition()
        self._events: deque[Event] = deque()
        self._output: RequestOutput | None = None
        self._wakers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @property
    def done(self) -> bool:
        """Whether the request has ended; events may still be waiting to be taken."""
        return self._output is not None

    def poll(self) -> list[Event]:
        """Events since the last call, oldest first; an empty list when there are none."""
        with self._condition:
            events = list(self._events)
            self._events.clear()
        return events

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end. ``timeout`` in seconds.

        Raises:
            TimeoutError: the request was still running when the time was up; it goes on.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: self._output is not None, timeout):
                raise TimeoutError(f"request {self.request_id} is still running after {timeout:g} s")
            output = self._output
        if output is None:  # wait_for has just seen it; this is for the type checker
            raise RuntimeError("the output disappeared")
        return output

    def cancel(self) -> None:
        """Ask for an early end; the text so far is kept. Harmless when repeated or too late."""
        if not self.done:
            self._cancel(self.request_id)

    def __iter__(self) -> Iterator[Event]:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._events or self._output is not None)
                if not self._events:
                    return
                event = self._events.popleft()
            yield event

    async def __aiter__(self) -> AsyncIterator[Event]:
        loop, wake = asyncio.get_running_loop(), asyncio.Event()
        waker = (loop, wake)
        with self._condition:
            self._wakers.append(waker)
        try:
            while True:
                wake.clear()
                for event in self.poll():
                    yield event
                with self._condition:
                    if self._output is not None and not self._events:
                        return
                    if self._events:
                        continue
                await wake.wait()
        finally:
            with self._condition:
                self._wakers.remove(waker)

    def push(self, event: Event, output: RequestOutput | None = None) -> None:
        """Deliver an event; with ``output``, the last one. Called by the engine only."""
        with self._condition:
            if self._output is not None:
                return
            self._events.append(event)
            self._output = output
            self._condition.notify_all()
            wakers = list(self._wakers)
        for loop, wake in wakers:
            try:
                loop.call_soon_threadsafe(wake.set)
            except RuntimeError:  # that event loop has closed: nobody is waiting on it any more
                continue
