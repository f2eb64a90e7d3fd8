"""The HTTP routes, and the only place where a `ServingError` becomes a status."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from finback.services.gateway.docs_page import DOCS_HTML
from finback.services.gateway.error_envelope import envelope, error_document, retry_after
from finback.services.gateway.front import Front, check_body_size, root_span
from finback.services.gateway.http_sink import HttpSink
from finback.services.gateway.openapi import openapi_document
from finback.services.gateway.text_tools import TextTools
from finback.shared.errors import InvalidRequest, InvariantViolated, ServingError
from finback.shared.telemetry.metrics import Metrics

Readiness = Callable[[], dict[str, bool]]
_WANTED: Final = frozenset(
    {
        b"authorization",
        b"idempotency-key",
        b"x-request-id",
        b"traceparent",
        b"tracestate",
        b"content-length",
    }
)


BODY_TIMEOUT_S: Final = 30.0


class BodyTimeout(InvalidRequest):
    """A client began a request and does not send the rest of it."""

    http_status = 408


class AnswerEndpoint:
    """A POST endpoint that generates; an ASGI application of its own, for speed."""

    def __init__(self, endpoint: str, front: Front, metrics: Metrics, log: Any) -> None:
        self._endpoint = endpoint
        self._front = front
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _WANTED
        }
        request_id = self._front.request_ids.choose(headers.get("x-request-id"))
        sink = HttpSink(send, request_id)
        model = self._front.exchange.model.name
        try:
            with root_span(self._endpoint, request_id, headers, model) as span:
                await self._answer(headers, request_id, receive, sink)
                span.set_attribute("http.response.status_code", sink.status)
        except ServingError as error:
            await self._reply_error(sink, error)
        except Exception:  # noqa: BLE001 -- the edge: a bug in one request must not end others
            self._log.exception("request failed", request_id=request_id)
            await self._reply_error(sink, InvariantViolated("the server failed; see its log"))
        status = "499" if not sink.is_complete else str(sink.status)
        if sink.outcome == "error":
            status = "stream_error"
        self._metrics.count("finback.gateway.requests", endpoint=self._endpoint, status=status)

    async def _answer(
        self, headers: dict[str, str], request_id: str, receive: Receive, sink: HttpSink
    ) -> None:
        body = await read_body(headers.get("content-length"), receive)
        if body is None:
            return
        answer = self._front.answer(
            self._endpoint,
            body,
            sink,
            request_id=request_id,
            authorization=headers.get("authorization"),
            idempotency_key=headers.get("idempotency-key"),
        )
        parent = asyncio.current_task()
        is_gone = False

        async def watch() -> None:
            """A client that leaves before the end cancels its request."""
            nonlocal is_gone
            while (await receive())["type"] != "http.disconnect":
                continue
            if not sink.is_complete and parent is not None:
                is_gone = True
                parent.cancel()

        watcher = asyncio.create_task(watch())
        try:
            await answer
        except asyncio.CancelledError:
            if not is_gone or parent is None or parent.uncancel() > 0:
                raise
            self._metrics.count("finback.gateway.disconnects")
        finally:
            watcher.cancel()

    async def _reply_error(self, sink: HttpSink, error: ServingError) -> None:
        if sink.is_complete:
            return
        if sink.status:
            await sink.send([error_document(error)])
            await sink.close_stream("error")
            return
        wait = retry_after(error)
        headers = {"retry-after": wait} if wait is not None else None
        await sink.reply(error.http_status, error_document(error), headers)


async def read_body(content_length: str | None, receive: Receive) -> bytes | None:
    """The whole body, refused as soon as it is known to be too large; None if the client left."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read_body(content_length, receive)
    except TimeoutError as error:
        raise BodyTimeout("the body did not come in time", reason="request_timeout") from error


async def _read_body(content_length: str | None, receive: Receive) -> bytes | None:
    if content_length is not None and content_length.isdigit():
        check_body_size(int(content_length))
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        check_body_size(size)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def make_app(
    front: Front, text_tools: TextTools, metrics: Metrics, readiness: Readiness, log: Any
) -> Starlette:
    """The ASGI application of a gateway."""
    model = front.exchange.model

    def authorized(request: Request) -> None:
        front.keys.tenant_of(request.headers.get("authorization"))

    async def models(request: Request) -> Response:
        authorized(request)
        names = [model.name, *(name for name in model.aliases if name != model.name)]
        return JSONResponse({"object": "list", "data": [model.card(name) for name in names]})

    async def one_model(request: Request) -> Response:
        authorized(request)
        model.check_name(request.path_params["name"])
        return JSONResponse(model.card(request.path_params["name"]))

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        checks = readiness()
        is_ready = all(checks.values())
        status = "ready" if is_ready else "not ready"
        return JSONResponse({"status": status, "checks": checks}, 200 if is_ready else 503)

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    async def openapi(request: Request) -> Response:
        return JSONResponse(openapi_document(model.name))

    async def docs(request: Request) -> Response:
        return HTMLResponse(DOCS_HTML)

    async def tokenize(request: Request) -> Response:
        authorized(request)
        return JSONResponse(await text_tools.tokenize(await _limited(request)))

    async def detokenize(request: Request) -> Response:
        authorized(request)
        return JSONResponse(text_tools.detokenize(await _limited(request)))

    chat = AnswerEndpoint("chat.completions", front, metrics, log)
    completions = AnswerEndpoint("completions", front, metrics, log)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", show_metrics),
            Route("/openapi.json", openapi),
            Route("/docs", docs),
        ],
        exception_handlers={ServingError: _serving_error, HTTPException: _http_error},
    )
    # A path with a slash too many is unknown; a redirected POST would lose its body in many clients.
    app.router.redirect_slashes = False
    return app


async def _limited(request: Request) -> bytes:
    body = await read_body(request.headers.get("content-length"), request.receive)
    return body if body is not None else b""


async def _serving_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ServingError):
        raise error
    wait = retry_after(error)
    headers = {"retry-after": wait} if wait is not None else None
    document = error_document(error)
    return Response(document, error.http_status, headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """No such route, or a method that a route does not know."""
    if not isinstance(error, HTTPException):
        raise error
    where = f"{request.method} {request.url.path}"
    text = f"Unknown request URL: {where}. See /docs for what is served."
    if error.status_code == 405:
        text = f"{where}: this method is not allowed here."
    code = "unknown_url" if error.status_code == 404 else None
    body = envelope(text, error.status_code, code=code)
    return JSONResponse(body, error.status_code, headers=dict(error.headers or {}))
