"""The store as a service: asked over the bus, read over both lanes."""

from pathlib import Path

import pytest

from finback.shared.errors import InvalidRequest
from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.nats_lane import NatsLane
from finback.shared.lanes.shm import ArenaReader
from finback.shared.wire.messages.cache_store import BadBlock, LookupReply, LookupRequest
from support.cache_asker import damage, open_asker
from support.kv_store import SALT, digest, joined, payload


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
