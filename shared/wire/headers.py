"""Every header that Finback puts on a NATS message, by name. Bodies hold payload only."""

from typing import Final

SCHEMA: Final = "Finback-Schema"
REQUEST_ID: Final = "Finback-Request-Id"
# Remaining milliseconds, not a wall-clock time: hosts' clocks differ, monotonic clocks do not step.
DEADLINE_MS: Final = "Finback-Deadline-Ms"
ATTEMPT: Final = "Finback-Attempt"
EPOCH: Final = "Finback-Epoch"
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

# Public NATS request API
AUTHORIZATION: Final = "Authorization"
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
SEQ: Final = "Finback-Seq"
FINAL: Final = "Finback-Final"

# Errors, as the NATS service protocol (ADR-32) spells them, and what it has no word for
ERROR: Final = "Nats-Service-Error"
ERROR_CODE: Final = "Nats-Service-Error-Code"
ERROR_NAME: Final = "Finback-Error"
ERROR_PARAM: Final = "Finback-Error-Param"
ERROR_REASON: Final = "Finback-Error-Reason"
RETRY_AFTER_S: Final = "Finback-Retry-After-S"
