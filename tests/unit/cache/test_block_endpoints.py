"""The store as a service: asked over the bus, read over both lanes."""

import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from finback.services.cache.service import CacheService
from finback.shared.config import StackConfig
from finback.shared.errors import InvalidRequest
from finback.shared.lanes.base import CorruptData, checksum
from finback.shared.lanes.nats_lane import NatsLane
from finback.shared.lanes.shm import ArenaReader, ArenaWriter
from finback.shared.wire.messages.cache import CommitRequest, LeaseReply, LeaseRequest
from finback.shared.wire.messages.cache_store import (
    BadBlock,
    LookupReply,
    LookupRequest,
    ReadReply,
    ReadRequest,
    StoreReply,
    StoreRequest,
)
from support.kv_store import BLOCK, SALT, digest, joined, payload
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


def damage(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"!")


def settings(tmp_path: Path, **more: Any) -> StackConfig:
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


async def test_blocks_come_back_over_shared_memory(tmp_path: Path) -> None:
    async with open_asker(tmp_path) as asker:
        await asker.keep(["a", "b"])
        found = await asker.ask(
            "lookup", LookupRequest(salt=SALT, hashes=joined(["a", "b", "c"])), LookupReply
        )
        assert found == LookupReply(num_found=2, num_host=2)
        reply, lease_id = await asker.read(["a", "b", "c"])
        assert reply.miss == "absent"
        reader = ArenaReader(asker.folder)
        assert [await reader.read(t) for t in reply.tickets] == [payload("a"), payload("b")]
        reader.close()
        await asker.release(lease_id)
        assert asker.service.arena.counts().num_leases == 0
        assert asker.service.metrics.value("finback.cache.hits", tier="host") == 2
        assert asker.service.metrics.value("finback.cache.misses", reason="absent") == 1


async def test_blocks_come_back_over_nats_until_the_release(tmp_path: Path) -> None:
    async with open_asker(tmp_path) as asker:
        await asker.keep(["a", "b"])
        reply, lease_id = await asker.read(["a", "b"], lane="nats")
        assert {ticket.kind for ticket in reply.tickets} == {"nats"}
        lane = NatsLane(asker.service.context.bus)
        assert [await lane.get(t) for t in reply.tickets] == [payload("a"), payload("b")]
        await asker.release(lease_id)
        with pytest.raises(CorruptData):
            await lane.get(reply.tickets[0])
        with pytest.raises(InvalidRequest):
            await asker.read(["a"], lane="pigeon")


async def test_a_block_that_a_reader_found_bad_is_gone(tmp_path: Path) -> None:
    async with open_asker(tmp_path) as asker:
        await asker.keep(["a"])
        reply, lease_id = await asker.read(["a"])
        bad = BadBlock(salt=SALT, hash=digest("a"), ticket=reply.tickets[0], reason="checksum")
        subjects = asker.service.subjects
        await asker.service.client.publish(
            subjects.instance("cache", asker.service.instance, "bad-block"), bad
        )
        assert (await asker.read(["a"]))[0].miss == "corrupt"
        await asker.release(lease_id)
        assert asker.service.metrics.value("finback.cache.bad_blocks", reason="checksum") == 1


async def test_a_block_damaged_in_memory_is_not_served_over_nats(tmp_path: Path) -> None:
    async with open_asker(tmp_path) as asker:
        await asker.keep(["a", "b"])
        reply, _ = await asker.read(["b"])
        ticket = reply.tickets[0]
        damage(asker.folder / ticket.location, ticket.offset + 77)
        reply, _ = await asker.read(["a", "b"], lane="nats")
        assert (len(reply.tickets), reply.miss) == (1, "corrupt")
        assert (await asker.read(["b"]))[0].miss == "corrupt"
