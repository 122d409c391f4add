"""What goes wrong, in the API's own format: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from nanochat.errors import EngineClosed, InvalidOption, NanochatError, PromptTooLong
from nanochat.server.wire import to_json

_STATUS_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is answered with an error; ``message`` is a sentence for the program's author."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, error: NanochatError, param: str) -> ApiError:
        """The engine's own errors: those of the prompt are the client's, all others the server's.

        ``param``: the option that holds the prompt.
        """
        if isinstance(error, PromptTooLong):
            return cls(400, str(error), param=param, code="context_length_exceeded")
        if isinstance(error, InvalidOption):
            return cls(400, str(error), param=param)
        return cls(503 if isinstance(error, EngineClosed) else 500, str(error))

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": _STATUS_TYPES.get(self.status, fallback),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The same over HTTP."""
        return Response(to_json(self.body()), self.status, self.headers, "application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Status 400: the request itself holds the mistake."""
    return ApiError(400, message, param=param, code=code)


def shutting_down() -> ApiError:
    """Status 503, for whatever comes or is still running when the server ends."""
    return ApiError(503, "The server is shutting down; try again later.", code="shutting_down")
