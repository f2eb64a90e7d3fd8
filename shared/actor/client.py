"""Typed requests and publishes over a bus."""

from typing import Any, TypeVar, cast

from finback.shared.actor.bus import Bus
from finback.shared.actor.envelope import request_headers
from finback.shared.telemetry import tracing
from finback.shared.wire import codec, headers
from finback.shared.wire.subjects import Subjects

T = TypeVar("T")


class Client:
    """Encodes, adds the envelope and the trace context, decodes the answer."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self.bus = bus
        self.subjects = subjects

    async def call(
        self,
        subject: str,
        message: Any,
        reply_type: type[T],
        *,
        timeout_s: float,
        request_id: str = "",
        attempt: int = 1,
        epoch: int = 0,
    ) -> T:
        """Ask and decode the answer; `reply_type` bytes gives the raw body.

        Raises the peer's `ServingError`, `Unavailable` when nobody listens, `DeadlineExceeded`.
        `epoch`: refuse to be served by a later start of the same instance.
        """
        envelope = request_headers(
            codec.schema_of(type(message)),
            timeout_s=timeout_s,
            request_id=request_id,
            attempt=attempt,
            epoch=epoch,
        )
        tracing.inject(envelope)
        reply = await self.bus.request(
            subject, codec.encode(message), envelope, timeout_s=timeout_s
        )
        if reply_type is bytes:
            return cast(T, reply.data)
        return codec.decode(reply.data, reply_type)

    async def publish(self, subject: str, message: Any) -> None:
        """Tell whoever listens; only the schema travels along."""
        schema = codec.schema_of(type(message))
        await self.bus.publish(subject, codec.encode(message), {headers.SCHEMA: schema})

    async def publish_bare(self, subject: str, message: Any) -> None:
        """Publish without any header: half the cost, for token streams."""
        await self.bus.publish(subject, codec.encode(message))
