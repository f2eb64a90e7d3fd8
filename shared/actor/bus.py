"""What a service needs from a message bus. `NatsBus` is the real one, `LocalBus` serves unit tests."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from finback.shared.errors import PayloadTooLarge, WireError

# The server counts headers and protocol overhead as well; nats-py looks at the body only, and a
# server that sees too much closes the connection for good.
FRAME_RESERVE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Message:
    """One message as it came: `reply` is the subject an answer goes to, None for publishes."""

    subject: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    reply: str | None = None


MessageCallback = Callable[[Message], None]


class Subscription(Protocol):
    """Interest in a subject."""

    async def drain(self) -> None:
        """Stop new messages; deliver the ones that are already here, then end."""

    async def unsubscribe(self) -> None:
        """End at once; what is still queued is dropped."""


class Bus(Protocol):
    """Publish, request, subscribe. Every wait is bounded, every failure a `ServingError`."""

    @property
    def max_payload(self) -> int:
        """Largest body in bytes, headers included."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def is_closed(self) -> bool:
        """Closed for good: the process must end."""

    @property
    def url(self) -> str: ...

    async def publish(
        self,
        subject: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        reply: str | None = None,
    ) -> None:
        """Send without knowing whether anybody listens. Raises `PayloadTooLarge`."""

    async def request(
        self,
        subject: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
    ) -> Message:
        """Send and await one answer.

        Raises `Unavailable` if nobody listens, `DeadlineExceeded` after `timeout_s`, and the peer's
        own `ServingError` if the answer is one.
        """

    async def subscribe(
        self, subject: str, callback: MessageCallback, *, queue: str | None = None
    ) -> Subscription:
        """Deliver to `callback`, which must not block; every publish after this returns is seen."""

    async def flush(self) -> None:
        """Return when the server has taken everything sent so far."""

    async def close(self) -> None: ...

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call after each reconnect: leases and watches have to be made anew."""

    def on_closed(self, callback: Callable[[str], None]) -> None:
        """Call with a reason once the connection is gone for good."""

    def new_inbox(self) -> str:
        """A subject that only this connection listens to."""


def check_message(
    subject: str, body: bytes, headers: Mapping[str, str] | None, max_payload: int
) -> None:
    """Refuse what the server would answer by closing the connection, or misunderstand."""
    if not subject or " " in subject or ".." in subject:
        raise WireError(f"cannot publish on {subject!r}")
    size = len(body) + sum(len(k) + len(v) + 4 for k, v in (headers or {}).items())
    limit = max_payload - FRAME_RESERVE_BYTES
    if size > limit:
        raise PayloadTooLarge(
            f"message of {size} bytes for {subject} is above the bus limit of {limit} bytes",
            reason="payload_too_large",
        )
