"""The errors that cross a service boundary, and the two that only stop a start.

Codes are the canonical gRPC ones, so that operators already know them. A `ServingError` travels as
a code and a public message (never a repr); `from_code` rebuilds it on the other side.
"""

from typing import Final


class ServingError(Exception):
    """A request failed in a way that its caller may be told about."""

    code: str = "internal"
    http_status: int = 500
    retryable: bool = False

    def __init__(
        self,
        public_message: str,
        *,
        param: str | None = None,
        reason: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """`param` names the offending request field, `reason` is a machine-readable detail."""
        super().__init__(public_message)
        self.public_message = public_message
        self.param = param
        self.reason = reason
        self.retry_after_s = retry_after_s


class InvalidRequest(ServingError):
    """The caller's input is wrong; sending it again cannot help."""

    code = "invalid_argument"
    http_status = 400


class Unauthenticated(ServingError):
    """No key, or one that is unknown or revoked."""

    code = "unauthenticated"
    http_status = 401


class PermissionDenied(ServingError):
    """The key is good, but not for this."""

    code = "permission_denied"
    http_status = 403


class NotFound(ServingError):
    """The named model, route or object does not exist."""

    code = "not_found"
    http_status = 404


class PayloadTooLarge(ServingError):
    """A body is above a stated limit."""

    code = "out_of_range"
    http_status = 413


class Overloaded(ServingError):
    """A bounded queue is full, or admission refused; try again after `retry_after_s`."""

    code = "resource_exhausted"
    http_status = 429
    retryable = True


class DeadlineExceeded(ServingError):
    """The request's own time ran out."""

    code = "deadline_exceeded"
    http_status = 504


class Cancelled(ServingError):
    """The client went away, or cancelled."""

    code = "cancelled"
    http_status = 499


class Unavailable(ServingError):
    """No instance, a lost peer, or one that drains: another try may succeed."""

    code = "unavailable"
    http_status = 503
    retryable = True


class WireError(ServingError):
    """A message that cannot be encoded or decoded."""

    code = "failed_precondition"
    http_status = 500


class InvariantViolated(ServingError):
    """A bug: the actor that raises it dies and is started again."""

    code = "internal"
    http_status = 500
    retryable = True


class ConfigError(Exception):
    """A start that cannot go on: one line that says what is wrong and how to mend it."""


class BackendUnavailable(ConfigError):
    """A kernel backend was asked for by name and cannot run on this machine."""


_BY_CODE: Final[dict[str, type[ServingError]]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        Unauthenticated,
        PermissionDenied,
        NotFound,
        PayloadTooLarge,
        Overloaded,
        DeadlineExceeded,
        Cancelled,
        Unavailable,
        WireError,
        InvariantViolated,
    )
}


def from_code(
    code: str,
    public_message: str,
    *,
    param: str | None = None,
    reason: str | None = None,
    retry_after_s: float | None = None,
) -> ServingError:
    """Rebuild the error that a peer raised; an unknown code becomes a plain `ServingError`."""
    cls = _BY_CODE.get(code, ServingError)
    return cls(public_message, param=param, reason=reason, retry_after_s=retry_after_s)
