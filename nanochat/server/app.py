"""The routes: ``/v1/chat/completions``, ``/v1/completions``, ``/v1/models``, ``/health``, ``/metrics``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nanochat.server.answer import Answer
from nanochat.server.errors import ApiError, invalid
from nanochat.server.guard import Guard
from nanochat.server.parsing import Job, parse_chat, parse_text
from nanochat.server.service import Service
from nanochat.server.wire import from_json, to_json, to_json_by_pieces

MAX_BODY_BYTES = 8 * 2**20
"""Of a request: some million tokens of text."""
MAX_BODIES_BYTES = 256 * 2**20
"""Of all requests that are being read: every connection may be sending one, and may take its time."""
LARGE_BODY_BYTES = 64 * 2**10
"""Larger ones are parsed on a thread, since all else on the event loop would wait."""
BODY_S = 30.0
"""A body must have come by then."""
DISCARD_S = 2.0
"""How long the rest of a body that is refused is read, so that its sender hears why it is refused."""
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Routes:
    """One service over HTTP."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._bodies: dict[int, bytearray] = {}
        """What has come of requests that are being read, by id."""

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, parse_chat)

    async def text(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, parse_text)

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        if request.path_params["name"] not in self._service.names:
            raise ApiError(404, "There is no such model here.", param="model", code="model_not_found")
        return _json(self._model())

    async def health(self, _: Request) -> Response:
        """GET /health: 200 while the engine runs."""
        if (reason := self._service.engine.closed_because) is not None:
            raise ApiError(503, reason)
        return _json({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        """GET /metrics."""
        return Response(self._service.metrics.page(), media_type="text/plain; version=0.0.4")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._service.model_name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "nanochat",
            "max_model_len": self._service.engine.max_model_len,
        }

    async def _answer(self, request: Request, parse: Callable[[Any], Job]) -> Response:
        body = bytearray()
        self._bodies[id(body)] = body
        try:
            await self._read(request, body)
            arrival_s = time.monotonic()
            if len(body) <= LARGE_BODY_BYTES:
                job = parse(_json_of(body))
            else:
                job = await asyncio.to_thread(lambda: parse(_json_of(body)))
        finally:
            del self._bodies[id(body)]
        return AnswerResponse(await self._service.start(job, arrival_s))

    async def _read(self, request: Request, body: bytearray) -> None:
        """Append what the request brings to its entry of ``_bodies``."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "The body must be JSON: send the header Content-Type: application/json.")
        length = request.headers.get("content-length", "")
        refusal = _too_large() if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES else None
        if (
            refusal is not None and "expect" in request.headers
        ):  # its sender waits for a word before sending it
            raise refusal
        try:
            async with asyncio.timeout(BODY_S if refusal is None else DISCARD_S) as limit:
                async for part in request.stream():
                    if refusal is not None:
                        continue
                    body += part
                    refusal = self._why_refused(body)
                    if refusal is not None:
                        body.clear()
                        limit.reschedule(asyncio.get_running_loop().time() + DISCARD_S)
        except TimeoutError:
            if refusal is None:
                message = f"The body hasn't come within {BODY_S:.0f} s."
                refusal = ApiError(408, message, headers={"connection": "close"})
        if refusal is not None:
            raise refusal

    def _why_refused(self, body: bytearray) -> ApiError | None:
        if len(body) > MAX_BODY_BYTES:
            return _too_large()
        if sum(map(len, self._bodies.values())) > MAX_BODIES_BYTES:
            message = "Others are sending too much at the moment; try again later."
            return ApiError(503, message, headers={"retry-after": "1", "connection": "close"})
        return None


class AnswerResponse(Response):
    """An answer, whole or as a stream; it is cancelled as soon as its client has gone."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive))
        try:
            if self._answer.job.stream:
                await self._stream(scope, receive, send)
            else:
                await (await self._whole())(scope, receive, send)
        finally:
            watch.cancel()
            self._answer.close()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._answer.cancel()

    async def _whole(self) -> Response:
        try:
            whole = await self._answer.whole()
        except ApiError as error:
            return error.response()
        if not self._answer.has_logprobs:
            return _json(whole)
        body = await asyncio.to_thread(to_json_by_pieces, whole)
        return Response(body, media_type="application/json")

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = Response(headers=_STREAM_HEADERS, media_type="text/event-stream")
        del head.headers["content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": head.raw_headers})
        async for event in self._answer.events():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def make_app(service: Service, *, api_key: str | None = None, any_host: bool = False) -> Starlette:
    """The ASGI application.

    Args:
        api_key: what requests must bring; None: nothing.
        any_host: whether requests may name any host as theirs; else only this machine's own names.
    """
    routes = Routes(service)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/completions", routes.text, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
        ],
        middleware=[Middleware(Guard, api_key=api_key, any_host=any_host)],
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_client_gone,
            Exception: _on_failure,
        },
    )
    # A redirect has no body, and clients that don't follow it see nothing.
    app.router.redirect_slashes = False
    return app


def _json_of(body: bytes | bytearray) -> Any:
    try:
        return from_json(body)
    except ValueError as error:
        raise invalid(f"The body isn't valid JSON: {error!s:.200}.") from error


def _too_large() -> ApiError:
    message = f"The body has more than {MAX_BODY_BYTES:,} bytes."
    return ApiError(413, message, headers={"connection": "close"})


def _json(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")


async def _on_api_error(_: Request, error: Exception) -> Response:
    return error.response() if isinstance(error, ApiError) else Response(status_code=500)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, or not with that method."""
    status, headers = 500, None
    if isinstance(error, HTTPException):
        status, headers = error.status_code, error.headers
    path = request.url.path[:100]
    if allowed := Headers(headers).get("allow"):
        message = f"{path} takes {' or '.join(sorted(allowed.split(', ')))}, not {request.method[:20]}."
        return ApiError(status, message, code="method_not_allowed", headers=headers).response()
    known = ", ".join(route.path for route in request.app.routes if "{" not in route.path)
    message = f"There is nothing at {path}; this server has {known}."
    return ApiError(status, message, code="unknown_url", headers=headers).response()


async def _on_client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_failure(_: Request, __: Exception) -> Response:
    return ApiError(500, "The server failed on this request; its log says how.").response()
