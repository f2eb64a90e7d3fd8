"""Errors as OpenAI's clients know them. The only place where an error becomes an HTTP status."""

import math
from typing import Any, Final

from finback.services.gateway.openai_format import to_json
from finback.shared.errors import ServingError

_TYPES: Final = {
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
_CODES: Final = {401: "invalid_api_key", 413: "request_too_large", 429: "rate_limit_exceeded"}


def envelope(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """`code` is a word, never a number; typed clients fail on numbers."""
    return {
        "error": {
            "message": message,
            "type": _TYPES.get(status, "server_error"),
            "param": param,
            "code": code or _CODES.get(status),
        }
    }


def error_document(error: ServingError) -> bytes:
    """The JSON of an error, as a body or as a record in a stream."""
    code = error.reason or error.code if error.http_status >= 500 else error.reason
    return to_json(envelope(error.public_message, error.http_status, param=error.param, code=code))


def retry_after(error: ServingError) -> str | None:
    """The `Retry-After` header: whole seconds, at least one. Always there on a 429."""
    seconds = error.retry_after_s
    if seconds is None:
        return "1" if error.http_status == 429 else None
    return str(max(1, math.ceil(seconds)))
