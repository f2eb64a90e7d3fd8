"""One public endpoint as an ASGI application of its own, for speed: body in, answer or error out."""

import asyncio
from typing import Any, Final

from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from finback.services.gateway.endpoints import Endpoint, with_parameters
from finback.services.gateway.error_envelope import (
    Dialect,
    dialect_of,
    error_document,
    error_headers,
    status_of,
)
from finback.services.gateway.front import Front, check_body_size, root_span
from finback.services.gateway.http_sink import HttpSink
from finback.shared.errors import InvalidRequest, InvariantViolated, ServingError
from finback.shared.telemetry.metrics import Metrics

_WANTED: Final = frozenset(
    {
        b"anthropic-version",
        b"authorization",
        b"content-length",
        b"idempotency-key",
        b"traceparent",
        b"tracestate",
        b"x-api-key",
        b"x-request-id",
    }
)
BODY_TIMEOUT_S: Final = 30.0


class BodyTimeout(InvalidRequest):
    """A client began a request and does not send the rest of it."""

    http_status = 408


class HttpEndpoint:
    """Answers one endpoint of the table."""

    def __init__(self, endpoint: Endpoint, front: Front, metrics: Metrics, log: Any) -> None:
        self._endpoint = endpoint
        self._front = front
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoint
        headers = wanted_headers(scope)
        request_id = self._front.request_ids.choose(headers.get("x-request-id"))
        dialect = dialect_of(scope["path"], headers)
        sink = HttpSink(send, request_id, dialect=dialect, names_events=endpoint.names_events)
        model = self._front.exchange.model.name
        try:
            with root_span(endpoint, request_id, headers, model) as span:
                await self._answer(scope, headers, request_id, receive, sink)
                if span is not None:
                    span.set_attribute("http.response.status_code", sink.status)
        except ServingError as error:
            await self._reply_error(sink, error, dialect, request_id)
        except Exception:  # noqa: BLE001 -- the edge: a bug in one request must not end others
            self._log.exception("request failed", request_id=request_id)
            bug = InvariantViolated("the server failed; see its log")
            await self._reply_error(sink, bug, dialect, request_id)
        status = "499" if not sink.is_complete else str(sink.status)
        if sink.outcome == "error":
            status = "stream_error"
        self._metrics.count("finback.gateway.requests", endpoint=endpoint.name, status=status)

    async def _answer(
        self,
        scope: Scope,
        headers: dict[str, str],
        request_id: str,
        receive: Receive,
        sink: HttpSink,
    ) -> None:
        body = await read_body(headers.get("content-length"), receive)
        if body is None:
            return
        answer = self._front.answer(
            self._endpoint,
            with_parameters(body, self._parameters(scope)),
            sink,
            request_id=request_id,
            authorization=authorization_of(headers),
            idempotency_key=headers.get("idempotency-key"),
            headers=sink.headers,
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

    def _parameters(self, scope: Scope) -> dict[str, Any]:
        """Of the path; and of the query, where there is no body. `?beta=true` is no field."""
        path = dict(scope.get("path_params") or {})
        if self._endpoint.method == "POST" or not scope["query_string"]:
            return path
        query = QueryParams(scope["query_string"])
        many = {name: query.getlist(name) for name in query}
        found: dict[str, Any] = {}
        for name, values in many.items():
            is_list = name.endswith("[]") or len(values) > 1
            found[name.removesuffix("[]")] = values if is_list else values[0]
        return {**found, **path}

    async def _reply_error(
        self, sink: HttpSink, error: ServingError, dialect: Dialect, request_id: str
    ) -> None:
        if sink.is_complete:
            return
        document = error_document(error, dialect, request_id=request_id)
        if sink.status:
            await sink.send_error(document)
            await sink.close_stream("error")
            return
        await sink.reply(status_of(error, dialect), document, error_headers(error))


def wanted_headers(scope: Scope) -> dict[str, str]:
    """The headers that mean something here."""
    return {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in _WANTED
    }


def authorization_of(headers: dict[str, str]) -> str | None:
    """The key as clients of either kind send it, in the form of `Authorization`."""
    if "authorization" not in headers and "x-api-key" in headers:
        return f"Bearer {headers['x-api-key']}"
    return headers.get("authorization")


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
