"""What every lane promises: bytes put on one side come out equal on the other, or not at all."""

from typing import Final, Protocol

import numpy as np
import xxhash

from finback.shared.lanes.ticket import Ticket

Buffer = bytes | bytearray | memoryview

# Above this a copy and its checksum take long enough (about 80 us) to be worth a thread.
THREAD_BYTES: Final = 512 * 1024
# A ticket comes from a message: never allocate more than this on its word.
MAX_PAYLOAD_BYTES: Final = 1 << 30


class CorruptData(Exception):
    """The bytes that a ticket names cannot be had, or are not the ones it was made for.

    Always a miss (recompute, or fetch elsewhere), never an answer. `reason` labels the metric:
    `checksum`, `generation`, `gone`, `length`, `ticket` or `unreachable`.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Lane(Protocol):
    """One way for bytes to travel. All methods may be called from several tasks at once."""

    @property
    def kind(self) -> str:
        """The `Ticket.kind` that this lane makes and understands."""

    async def put(self, data: Buffer) -> Ticket:
        """Offer `data`; it is copied, the caller may reuse its buffer."""

    async def get(self, ticket: Ticket, out: memoryview | None = None) -> memoryview:
        """The bytes of `ticket`, verified; copied into `out` (at least that long) if given.

        Raises `CorruptData` when they cannot be had; `out` then holds rubbish.
        """

    async def release(self, ticket: Ticket) -> None:
        """The putting side: nobody will read it any more."""

    async def close(self) -> None:
        """Give up everything held; tickets of this side are dead afterwards."""


def checksum(data: Buffer) -> bytes:
    """XXH3-128 of `data`, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def verify(data: Buffer, ticket: Ticket) -> None:
    """Raise `CorruptData` unless `data` is what `ticket` was made for."""
    if len(data) != ticket.length:
        raise CorruptData("length", f"{len(data)} bytes, ticket says {ticket.length}")
    if checksum(data) != ticket.checksum:
        raise CorruptData("checksum", ticket.location)


def destination(ticket: Ticket, out: memoryview | None) -> memoryview:
    """A writable view of exactly `ticket.length` bytes: the head of `out`, or fresh memory."""
    if not 0 <= ticket.length <= MAX_PAYLOAD_BYTES:
        raise CorruptData("ticket", f"a length of {ticket.length} bytes")
    if out is None:
        return np.empty(ticket.length, np.uint8).data  # a bytearray would be zeroed first
    flat = out.cast("B") if out.format != "B" or out.ndim != 1 else out
    if len(flat) < ticket.length:
        raise ValueError(f"out has {len(flat)} bytes, the ticket needs {ticket.length}")
    return flat[: ticket.length]


def copy_bytes(target: memoryview, source: Buffer) -> None:
    """Copy equal lengths. NumPy's copy gives up the interpreter lock, a memoryview's does not."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
