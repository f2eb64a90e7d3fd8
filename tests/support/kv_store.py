"""A store over a small arena on real files, with clocks that tests move."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finback.services.cache.arena import Arena
from finback.services.cache.arena_files import ArenaFiles
from finback.services.cache.kept import Now
from finback.services.cache.store import KvStore
from finback.services.cache.store_policy import StorePolicy
from finback.shared.lanes.base import checksum
from finback.shared.lanes.shm import ArenaReader, ArenaWriter
from finback.shared.wire.messages.cache import CommitRequest
from finback.shared.wire.messages.cache_store import ReadRequest, StoreReply, StoreRequest

SALT = "5a" * 16
BLOCK = 5000  # bytes of a payload; two pages a slot
SLOT = 8192


def digest(name: int | str) -> bytes:
    """The hash of a block, by any name."""
    return hashlib.blake2b(str(name).encode(), digest_size=32).digest()


def joined(names: Sequence[int | str]) -> bytes:
    """Hashes as they travel."""
    return b"".join(digest(name) for name in names)


def payload(name: int | str, num_bytes: int = BLOCK) -> bytes:
    """What the block of that name holds."""
    return hashlib.shake_128(str(name).encode()).digest(num_bytes)


@dataclass
class StoreRig:
    """One writer (`prefill-a`, epoch 5) and as many readers as wanted."""

    folder: Path
    policy: StorePolicy = field(default_factory=StorePolicy)
    max_bytes: int = 1 << 20
    extent_bytes: int = 1 << 17
    mono_s: float = 1000.0
    wall_s: float = 1_700_000_000.0
    num_leases: int = 0

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        files = ArenaFiles(self.folder, max_bytes=self.max_bytes, extent_bytes=self.extent_bytes)
        self.arena = Arena(files, now_s=self.mono_s, wall_s=self.wall_s)
        self.store = KvStore(self.arena, self.policy)

    def restart(self) -> None:
        """As after a kill: nothing but the files is left."""
        self.arena.close()
        self.open()

    def close(self) -> None:
        self.arena.close()

    @property
    def now(self) -> Now:
        return Now(self.mono_s, self.wall_s)

    def sleep(self, seconds: float) -> None:
        self.mono_s += seconds
        self.wall_s += seconds

    def lease(self) -> str:
        self.num_leases += 1
        return f"{self.num_leases:032x}"

    def ask(self, names: Sequence[int | str], lease_id: str = "", **more: Any) -> StoreReply:
        values: dict[str, Any] = {
            "request_id": "",
            "owner": "prefill-a",
            "owner_epoch": 5,
            "salt": SALT,
            "hashes": joined(names),
            "payload_bytes": BLOCK,
            "lease_id": lease_id or self.lease(),
        }
        request = StoreRequest(**{**values, **more})
        return self.store.store(request, self.now)

    def fill(self, names: Sequence[int | str], reply: StoreReply) -> None:
        """Write and commit what was granted."""
        writer = ArenaWriter(self.folder)
        for slot, index in zip(reply.slots, reply.indexes, strict=True):
            writer.write(slot, payload(names[index], slot.length))
        writer.close()
        self.store.commit(
            CommitRequest(
                lease_id=reply.lease_id,
                slot_ids=tuple(slot.slot_id for slot in reply.slots),
                checksums=tuple(
                    checksum(payload(names[index], slot.length))
                    for slot, index in zip(reply.slots, reply.indexes, strict=True)
                ),
                lengths=tuple(slot.length for slot in reply.slots),
            ),
            self.now,
        )

    def keep(self, names: Sequence[int | str], **more: Any) -> list[int]:
        """Store, write, commit, release; the indexes of the blocks that were written."""
        reply = self.ask(names, **more)
        if reply.slots:
            self.fill(names, reply)
        self.arena.release((reply.lease_id,))
        return list(reply.indexes)

    def pin(
        self, names: Sequence[int | str], lease_id: str = "", **more: Any
    ) -> tuple[list[bytes], str]:
        """Read the leading run under a lease; the verified bytes, and why it ends."""
        values: dict[str, Any] = {
            "request_id": "",
            "owner": "decode-b",
            "owner_epoch": 1,
            "salt": SALT,
            "hashes": joined(names),
            "lease_id": lease_id or self.lease(),
        }
        request = ReadRequest(**{**values, **more})
        found = self.store.pin_run(request, self.now)
        reader = ArenaReader(self.folder)
        copies = [bytes(reader.read_now(self.arena.ticket(key))) for key in found.keys]
        reader.close()
        return copies, found.miss

    def read(self, names: Sequence[int | str], **more: Any) -> tuple[list[bytes], str]:
        """As `pin`, and let go."""
        lease_id = self.lease()
        found = self.pin(names, lease_id, **more)
        self.arena.release((lease_id,))
        return found

    def held(self, names: Sequence[int | str]) -> list[int | str]:
        """Those of the blocks that are in memory and not expired."""
        return [name for name in names if self.read([name])[0]]
