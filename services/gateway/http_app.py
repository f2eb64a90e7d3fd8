"""The HTTP routes: the table of public endpoints, and pages that tell about this process."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from finback.services.gateway.docs_page import DOCS_HTML
from finback.services.gateway.error_envelope import anthropic_envelope, dialect_of, envelope
from finback.services.gateway.front import Front
from finback.services.gateway.http_endpoint import HttpEndpoint
from finback.services.gateway.openapi import openapi_document
from finback.shared.telemetry.metrics import Metrics

Readiness = Callable[[], dict[str, bool]]


def make_app(front: Front, metrics: Metrics, readiness: Readiness, log: Any) -> Starlette:
    """The ASGI application of a gateway."""
    public = [
        Route(
            endpoint.path,
            HttpEndpoint(endpoint, front, metrics, log),
            methods=[endpoint.method],
        )
        for endpoint in front.endpoints.values()
    ]
    document = openapi_document(front.exchange.model.name, front.endpoints.values())
    own = _own_routes(document, metrics, readiness)
    app = Starlette(
        routes=[*public, *own],
        exception_handlers={HTTPException: _route_errors(front)},
    )
    # A path with a slash too many is unknown; a redirected POST would lose its body in many clients.
    app.router.redirect_slashes = False
    return app


def _own_routes(
    document: dict[str, Any], metrics: Metrics, readiness: Readiness
) -> list[BaseRoute]:
    """What needs no key: health, metrics, documents."""

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
        return JSONResponse(document)

    async def docs(request: Request) -> Response:
        return HTMLResponse(DOCS_HTML)

    return [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", show_metrics),
        Route("/openapi.json", openapi),
        Route("/docs", docs),
    ]


def _route_errors(front: Front) -> Callable[[Request, Exception], Awaitable[Response]]:
    """No such route, or a method that a route does not know: told as other errors are."""

    async def answer(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        status = error.status_code
        where = f"{request.method} {request.url.path}"
        text = f"Unknown request URL: {where}. See /docs for what is served."
        if status == 405:
            text = f"{where}: this method is not allowed here."
        request_id = front.request_ids.choose(request.headers.get("x-request-id"))
        headers = dict(error.headers or {})
        if dialect_of(request.url.path, request.headers) == "anthropic":
            headers["request-id"] = request_id
            body = anthropic_envelope(text, status, request_id=request_id)
        else:
            headers["x-request-id"] = request_id
            body = envelope(text, status, code="unknown_url" if status == 404 else None)
        return JSONResponse(body, status, headers=headers)

    return answer
