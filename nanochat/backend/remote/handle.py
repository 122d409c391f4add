"""The asker's end of a remote answer."""

from __future__ import annotations

from nanochat.engine.handle import RequestHandle
from nanochat.engine.outputs import Event, RequestMetrics, RequestOutput
from nanochat.errors import NanochatError


class RemoteHandle(RequestHandle):
    """As the engine's, but that a turn may also be refused after it was sent."""

    _refusal: NanochatError | None = None

    def refuse(self, error: NanochatError) -> None:
        """End as if it had never begun; :meth:`result` raises the error."""
        if self.done:
            return
        self._refusal = error
        self.push(Event("", (), "error"), RequestOutput("", [], "error", str(error), None, RequestMetrics()))

    def result(self, timeout: float | None = None) -> RequestOutput:
        output = super().result(timeout)
        if self._refusal is not None:
            raise self._refusal
        return output
