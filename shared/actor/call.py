"""One request as a handler sees it, and what an endpoint is made of."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from finback.shared.actor.deadline import Deadline
from finback.shared.actor.fence import Fence

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request as the handler sees it. For publishes `wants_reply` is False.

    `asker`: the bus user to whose inbox the answer goes, "" if there is none. The server keeps users
    out of each other's inboxes, so whoever names another's gets no answer.
    """

    message: T
    request_id: str
    attempt: int
    headers: Mapping[str, str]
    deadline: Deadline
    wants_reply: bool = True
    asker: str = ""

    def remaining_s(self) -> float:
        return self.deadline.remaining_s()

    @property
    def is_expired(self) -> bool:
        return self.deadline.is_expired


Handler = Callable[[Call[Any]], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSpec:
    """`name` as in `<service> <verb>`; `request_type` bytes hands over the raw body.

    `refuse_when_draining`: new work is answered `Unavailable` while the service drains.
    """

    name: str
    request_type: type
    handler: Handler
    mailbox: int = 256
    workers: int = 8
    refuse_when_draining: bool = False
    is_traced: bool = True
    fence: Fence | None = None
    epoch: int = 0


@dataclass(slots=True)
class EndpointStats:
    """What `$SRV.STATS` tells."""

    num_requests: int = 0
    num_errors: int = 0
    last_error: str = ""
    processing_ns: int = 0
