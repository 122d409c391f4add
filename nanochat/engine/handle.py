"""A caller's end of one request: the step thread puts events in, any other thread takes them out.

Knows nothing of scheduling or models; it is a small thread-safe mailbox that ends with an output.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
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
        return self._take()[0]

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
        async with aclosing(take_events([self])) as taken:
            async for _, events in taken:
                for event in events:
                    yield event

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

    def _take(self) -> tuple[list[Event], bool]:
        """New events, and whether they are the last."""
        with self._condition:
            events = list(self._events)
            self._events.clear()
            return events, self._output is not None


async def take_events(handles: Sequence[RequestHandle]) -> AsyncGenerator[tuple[int, list[Event]]]:
    """Events of several requests as they come: the index of a handle, and all that is new of it.

    Whoever is slow to ask for more gets more at once. Ends when all requests have.
    """
    wake = asyncio.Event()
    waker = (asyncio.get_running_loop(), wake)
    for handle in handles:
        with handle._condition:
            handle._wakers.append(waker)
    try:
        running = dict(enumerate(handles))
        while running:
            wake.clear()
            for index, handle in list(running.items()):
                events, is_done = handle._take()
                if is_done:
                    del running[index]
                if events:
                    yield index, events
            if running:
                await wake.wait()
    finally:
        for handle in handles:
            with handle._condition:
                handle._wakers.remove(waker)
