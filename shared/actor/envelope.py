"""What surrounds a body: request headers, error headers, and back. Pure but for the clock."""

import math
from collections.abc import Mapping
from urllib.parse import quote, unquote

from finback.shared.actor.deadline import Deadline
from finback.shared.errors import ServingError, from_code
from finback.shared.wire import headers as h

_MAX_ERROR_TEXT = 2048
# Printable ASCII but for "%": a header value must hold no line break, and nats-py reads it as text.
_SAFE = "".join(chr(c) for c in range(0x20, 0x7F) if chr(c) != "%")


def request_headers(
    schema: str, *, timeout_s: float, request_id: str = "", attempt: int = 1, epoch: int = 0
) -> dict[str, str]:
    """The envelope of a request; `epoch` other than 0 means that only this epoch may take it."""
    headers = {h.SCHEMA: schema, h.ATTEMPT: str(attempt)}
    if request_id:
        headers[h.REQUEST_ID] = clean(request_id)
    if not math.isinf(timeout_s):
        headers[h.DEADLINE_MS] = str(max(0, round(timeout_s * 1000)))
    if epoch:
        headers[h.EPOCH] = str(epoch)
    return headers


def deadline_of(headers: Mapping[str, str]) -> Deadline:
    """The deadline that came in the headers, from now on; none if absent or unreadable."""
    try:
        return Deadline.after(int(headers[h.DEADLINE_MS]) / 1000)
    except (KeyError, ValueError):
        return Deadline()


def int_header(headers: Mapping[str, str], name: str, default: int) -> int:
    """A whole number from a header, or `default` if it is absent or unreadable."""
    try:
        return int(headers[name])
    except (KeyError, ValueError):
        return default


def error_headers(error: ServingError) -> dict[str, str]:
    """An error reply's headers, readable by any client of the NATS service protocol."""
    headers = {
        h.ERROR: clean(error.public_message[:_MAX_ERROR_TEXT]),
        h.ERROR_CODE: str(error.http_status),
        h.ERROR_NAME: error.code,
    }
    if error.param is not None:
        headers[h.ERROR_PARAM] = clean(error.param[:_MAX_ERROR_TEXT])
    if error.reason is not None:
        headers[h.ERROR_REASON] = clean(error.reason[:_MAX_ERROR_TEXT])
    if error.retry_after_s is not None:
        headers[h.RETRY_AFTER_S] = f"{error.retry_after_s:.3f}"
    return headers


def error_of(headers: Mapping[str, str]) -> ServingError | None:
    """The error that a reply carries, or None."""
    if h.ERROR_CODE not in headers and h.ERROR_NAME not in headers:
        return None
    try:
        retry_after_s = float(headers[h.RETRY_AFTER_S])
    except (KeyError, ValueError):
        retry_after_s = None
    param, reason = headers.get(h.ERROR_PARAM), headers.get(h.ERROR_REASON)
    return from_code(
        headers.get(h.ERROR_NAME, "internal"),
        unquote(headers.get(h.ERROR, "error")),
        param=None if param is None else unquote(param),
        reason=None if reason is None else unquote(reason),
        retry_after_s=retry_after_s,
    )


def clean(text: str) -> str:
    """Percent-encode what may not stand in a header value."""
    return quote(text, safe=_SAFE)
