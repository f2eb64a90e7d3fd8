"""Where an answer goes: HTTP, NATS, or a recording. Documents are JSON bytes, framing is the sink's."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

Outcome = Literal["end", "error", "cancelled"]


class Sink(Protocol):
    """Takes either one `reply`, or `open_stream`, documents, and one `close_stream`."""

    async def reply(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """The whole answer (or error) as one document."""

    async def open_stream(self) -> None:
        """Documents will follow."""

    async def send(self, documents: Sequence[bytes]) -> None:
        """Some documents of the stream; waits while the client is slow."""

    async def keep_alive(self) -> None:
        """A sign of life that no client takes for a document."""

    async def close_stream(self, final: Outcome) -> None:
        """The stream is over, and how."""
