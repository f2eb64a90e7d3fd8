"""Errors as the clients of each API know them: a dialect's status, body and headers.

The only place where an error becomes an HTTP status. `openai`: `{"error": {message, type, param,
code}}`. `anthropic`: `{"type": "error", "error": {type, message}, "request_id"}`; there an
overloaded server is a 529.
"""

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

from finback.services.gateway.openai_format import to_json
from finback.shared.errors import ServingError

Dialect = Literal["openai", "anthropic"]

_OPENAI_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    499: "invalid_request_error",
}
_OPENAI_CODES: Final = {
    401: "invalid_api_key",
    403: "permission_denied",
    413: "request_too_large",
    429: "rate_limit_exceeded",
}
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_ANTHROPIC_STATUS: Final = {503: 529}
_ANTHROPIC_DETAILS: Final = frozenset({"thread_unsupported_request"})


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """Which API a request speaks: by its path, or, where both share one, by its version header."""
    is_messages = path == "/v1/messages" or path.startswith("/v1/messages/")
    return "anthropic" if is_messages or "anthropic-version" in headers else "openai"


def status_of(error: ServingError, dialect: Dialect = "openai") -> int:
    """The HTTP status of an error."""
    status = error.http_status
    return _ANTHROPIC_STATUS.get(status, status) if dialect == "anthropic" else status


def envelope(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's. `code` is a word, never a number; typed clients fail on numbers."""
    return {
        "error": {
            "message": message,
            "type": _OPENAI_TYPES.get(status, "server_error"),
            "param": param,
            "code": code or _OPENAI_CODES.get(status),
        }
    }


def anthropic_envelope(message: str, status: int, *, request_id: str = "") -> dict[str, Any]:
    """Anthropic's; without an id none is named."""
    other = "invalid_request_error" if status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(status, other)
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    return {**body, "request_id": request_id} if request_id else body


def error_body(
    error: ServingError, dialect: Dialect = "openai", *, request_id: str = ""
) -> dict[str, Any]:
    """An error as a dialect's document."""
    status, text = status_of(error, dialect), error.public_message
    if dialect == "anthropic":
        named = f"{error.param}: {text}" if error.param and error.param not in text else text
        body = anthropic_envelope(named, status, request_id=request_id)
        if error.reason in _ANTHROPIC_DETAILS:
            # By this, clients know that they can do without.
            body["error"]["details"] = {"error_code": error.reason, "unsupported": []}
        return body
    code = error.reason or error.code if status >= 500 else error.reason
    return envelope(text, status, param=error.param, code=code)


def error_document(
    error: ServingError, dialect: Dialect = "openai", *, request_id: str = ""
) -> bytes:
    """The JSON of an error, as a body or as a record in a stream."""
    return to_json(error_body(error, dialect, request_id=request_id))


def error_headers(error: ServingError) -> dict[str, str]:
    """The HTTP headers that go with an error: when to come again, how to authenticate."""
    headers = {}
    wait = retry_after(error)
    if wait is not None:
        headers["retry-after"] = wait
    if error.retry_after_s is not None:
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1000)))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def retry_after(error: ServingError) -> str | None:
    """The `Retry-After` header: whole seconds, at least one. Always there on a 429."""
    seconds = error.retry_after_s
    if seconds is None:
        return "1" if error.http_status == 429 else None
    return str(max(1, math.ceil(seconds)))
