"""A ticket names bytes that lie elsewhere, so that messages stay small."""

from finback.shared.wire.codec import message


@message("lanes.Ticket/1")
class Ticket:
    """Where bytes lie and how to tell that they are the right ones.

    `kind`: `inline` (bytes in `payload`), `shm` (`location` is a file below the arena folder) or
    `nats` (`location` is a subject that answers with the bytes). `checksum`: XXH3-128, 16 bytes.
    `generation` changes each time a slot is reused: a reader copies first and verifies the copy.
    """

    kind: str
    location: str = ""
    offset: int = 0
    length: int = 0
    checksum: bytes = b""
    generation: int = 0
    payload: bytes = b""
