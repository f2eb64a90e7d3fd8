"""A cache service inside the test's event loop, and a worker's way to speak to it."""

import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from finback.services.cache.service import CacheService
from finback.shared.config import StackConfig
from finback.shared.lanes.base import checksum
from finback.shared.lanes.shm import ArenaReader, ArenaWriter
from finback.shared.wire.messages.cache import CommitRequest, LeaseReply, LeaseRequest
from finback.shared.wire.messages.cache_store import (
    LookupReply,
    LookupRequest,
    ReadReply,
    ReadRequest,
    StoreReply,
    StoreRequest,
)
from support.kv_store import BLOCK, SALT, joined, payload
from support.local_service import serving

T = TypeVar("T")


class Asker:
    """Speaks to one cache service as a worker does."""

    def __init__(self, service: CacheService) -> None:
        self.service = service
        self.folder = service.arena.folder

    async def ask(self, verb: str, message: Any, reply_type: type[T]) -> T:
        subject = self.service.subjects.instance("cache", self.service.instance, verb)
        return await self.service.client.call(subject, message, reply_type, timeout_s=5)

    async def store(self, names: Sequence[int | str], **more: Any) -> StoreReply:
        values: dict[str, Any] = {
            "request_id": "r",
            "owner": "prefill-a",
            "owner_epoch": 5,
            "salt": SALT,
            "hashes": joined(names),
            "payload_bytes": BLOCK,
            "lease_id": secrets.token_hex(16),
        }
        return await self.ask("store", StoreRequest(**{**values, **more}), StoreReply)

    async def keep(self, names: Sequence[int | str], **more: Any) -> None:
        reply = await self.store(names, **more)
        writer = ArenaWriter(self.folder)
        written = [payload(names[index]) for index in reply.indexes]
        for slot, data in zip(reply.slots, written, strict=True):
            writer.write(slot, data)
        writer.close()
        commit = CommitRequest(
            lease_id=reply.lease_id,
            slot_ids=tuple(slot.slot_id for slot in reply.slots),
            checksums=tuple(checksum(data) for data in written),
            lengths=(BLOCK,) * len(written),
        )
        await self.ask("commit", commit, LeaseReply)
        await self.release(reply.lease_id)

    async def release(self, lease_id: str) -> None:
        await self.ask("release", LeaseRequest(lease_ids=(lease_id,)), LeaseReply)

    async def read(self, names: Sequence[int | str], **more: Any) -> tuple[ReadReply, str]:
        values: dict[str, Any] = {
            "request_id": "r",
            "owner": "decode-b",
            "owner_epoch": 1,
            "salt": SALT,
            "hashes": joined(names),
            "lease_id": secrets.token_hex(16),
        }
        request = ReadRequest(**{**values, **more})
        return await self.ask("read", request, ReadReply), request.lease_id

    async def bytes_of(self, names: Sequence[int | str], **more: Any) -> tuple[list[bytes], str]:
        """The blocks of the leading run, copied and verified; why it ends."""
        reply, lease_id = await self.read(names, **more)
        reader = ArenaReader(self.folder)
        copies = [bytes(await reader.read(ticket)) for ticket in reply.tickets]
        reader.close()
        await self.release(lease_id)
        return copies, reply.miss

    async def lookup(self, names: Sequence[int | str], **more: Any) -> LookupReply:
        request = LookupRequest(salt=SALT, hashes=joined(names), **more)
        return await self.ask("lookup", request, LookupReply)


def damage(path: Path, offset: int) -> None:
    """Overwrite a byte of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"!")


def settings(tmp_path: Path, **more: Any) -> StackConfig:
    """An arena of 2 MiB below `tmp_path`."""
    return StackConfig(
        shm_dir=str(tmp_path / "shm"),
        run_dir=str(tmp_path),
        stack_id="s",
        arena_bytes=2**21,
        **more,
    )


@contextlib.asynccontextmanager
async def open_asker(tmp_path: Path, **more: Any) -> AsyncIterator[Asker]:
    async with serving(CacheService, config=settings(tmp_path, **more)) as service:
        yield Asker(service)
        service.arena.check_integrity()
