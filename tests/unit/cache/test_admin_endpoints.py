"""What operators ask of a cache: stats, forget, pin, evict, verify; with memory alone."""

from pathlib import Path

import pytest

from finback.shared.errors import InvalidRequest, NotFound
from finback.shared.wire.messages.cache_admin import (
    EvictReply,
    EvictRequest,
    ForgetReply,
    ForgetRequest,
    PinReply,
    PinRequest,
    StatsReply,
    StatsRequest,
    Tally,
    UnpinRequest,
    VerifyReply,
    VerifyRequest,
)
from support.cache_asker import Asker, damage, open_asker
from support.kv_store import SALT, SLOT, joined


async def held(asker: Asker, names: list[str]) -> list[str]:
    """Those of the blocks that are there."""
    return [name for name in names if (await asker.lookup([name])).num_found]


async def test_stats_tell_what_there_is_and_what_has_happened(tmp_path: Path) -> None:
    async with open_asker(tmp_path) as asker:
        await asker.keep(["a", "b"], tenant="t", traffic_class="agent")
        await asker.keep(["c"])
        for _ in range(3):
            await asker.bytes_of(["a", "b", "x"])
        await asker.ask("pin", PinRequest(name="p", salt=SALT, hashes=joined("cd")), PinReply)
        stats = await asker.ask("stats", StatsRequest(), StatsReply)
        usage = {(u.tier, u.traffic_class): (u.num_blocks, u.num_bytes) for u in stats.usage}
        assert usage == {("host", "agent"): (2, 2 * SLOT), ("host", "chat"): (1, SLOT)}
        assert set(stats.tallies) == {
            Tally(what="hit", label="host", count=6),
            Tally(what="miss", label="absent", count=3),
        }
        assert [(p.num_reads, p.num_blocks) for p in stats.prefixes] == [(3, 2)]
        assert [(p.name, p.num_blocks, p.num_held) for p in stats.pins] == [("p", 2, 1)]
        assert (stats.slots["kept"], stats.num_leases, stats.file_state) == (3, 0, "off")
        assert stats.arena_bytes <= stats.max_bytes == 2**21


async def test_forget_by_tenant_conversation_salt_and_all(tmp_path: Path) -> None:
    async with open_asker(tmp_path) as asker:
        names = [*"abcdef"]

        async def forget(**what: object) -> int:
            request = ForgetRequest(**what)  # type: ignore[arg-type]  # a row of fields
            return (await asker.ask("forget", request, ForgetReply)).num_host

        await asker.keep(["a", "b"], tenant="t")
        await asker.keep(["c", "d", "e", "f"])
        await asker.ask("pin", PinRequest(name="p", salt=SALT, hashes=joined("a")), PinReply)
        _, lease_id = await asker.read(["a"])
        assert await forget(tenant="nobody") == 0
        assert await forget(tenant="t") == 2
        assert await held(asker, names) == [*"cdef"]
        await asker.release(lease_id)
        assert asker.service.arena.counts().num_kept == 4
        assert await forget(hashes=joined("cz")) == 1
        assert await forget(hashes=joined("d"), salt="0" * 32) == 0
        assert await forget(hashes=joined("d"), salt=SALT) == 1
        assert await forget(salt=SALT) == 2
        await asker.keep(names)
        assert await forget(is_all=True) == 6
        assert asker.service.arena.counts().num_kept == 0
        with pytest.raises(InvalidRequest):
            await forget()


async def test_pinned_blocks_stay_over_restarts_until_they_are_let_go(tmp_path: Path) -> None:
    async with open_asker(tmp_path) as asker:
        await asker.keep(["a"], retention_s=0.001)
        pin = PinRequest(name="system prompt", salt=SALT, hashes=joined("ab"))
        assert await asker.ask("pin", pin, PinReply) == PinReply(num_blocks=2, num_held=1)
    async with open_asker(tmp_path) as asker:
        await asker.keep(["b"], retention_s=0.001)
        everything = await asker.ask("evict", EvictRequest(), EvictReply)
        assert everything == EvictReply(num_blocks=0, num_bytes=0)
        assert await held(asker, ["a", "b"]) == ["a", "b"]
        await asker.ask("unpin", UnpinRequest(name="system prompt"), PinReply)
        with pytest.raises(NotFound):
            await asker.ask("unpin", UnpinRequest(name="system prompt"), PinReply)
        assert (await asker.ask("evict", EvictRequest(), EvictReply)).num_blocks == 2


async def test_damaged_pins_are_taken_from_the_headers(tmp_path: Path) -> None:
    async with open_asker(tmp_path) as asker:
        await asker.keep(["a", "b"])
        await asker.ask("pin", PinRequest(name="p", salt=SALT, hashes=joined("a")), PinReply)
        path = asker.folder / "pins.json"
    path.write_text("{")
    async with open_asker(tmp_path) as asker:
        await asker.ask("evict", EvictRequest(), EvictReply)
        assert await held(asker, ["a", "b"]) == ["a"]
        stats = await asker.ask("stats", StatsRequest(), StatsReply)
        assert [pin.num_blocks for pin in stats.pins] == [1]


async def test_evict_goes_up_to_a_class_and_a_size(tmp_path: Path) -> None:
    async with open_asker(tmp_path) as asker:
        await asker.keep(["a"], traffic_class="agent")
        await asker.keep(["c"], traffic_class="chat")
        await asker.keep(["b"], traffic_class="batch")
        some = await asker.ask("evict", EvictRequest(num_bytes=1), EvictReply)
        assert some == EvictReply(num_blocks=1, num_bytes=SLOT)
        assert await held(asker, [*"abc"]) == ["a", "c"]
        await asker.ask("evict", EvictRequest(traffic_class="chat"), EvictReply)
        assert await held(asker, [*"abc"]) == ["a"]
        with pytest.raises(InvalidRequest):
            await asker.ask("evict", EvictRequest(tier="file"), EvictReply)


async def test_verify_finds_the_damaged_block_and_no_other(tmp_path: Path) -> None:
    async with open_asker(tmp_path) as asker:
        await asker.keep([*"abcde"])
        reply, lease_id = await asker.read([*"abc"])
        await asker.release(lease_id)
        damage(asker.folder / reply.tickets[2].location, reply.tickets[2].offset + 9)
        cursor, num_checked, num_bad = "", 0, 0
        while True:
            request = VerifyRequest(cursor=cursor, max_bytes=1)
            part = await asker.ask("verify", request, VerifyReply)
            num_checked, num_bad = num_checked + part.num_checked, num_bad + part.num_bad
            cursor = part.next_cursor
            if not cursor:
                break
        assert (num_checked, num_bad) == (5, 1)
        assert await held(asker, [*"abcde"]) == [*"abde"]
        assert (await asker.ask("verify", VerifyRequest(), VerifyReply)).num_bad == 0
        for bad in (
            VerifyRequest(tier="tape"),
            VerifyRequest(cursor="x"),
            VerifyRequest(max_bytes=0),
        ):
            with pytest.raises(InvalidRequest):
                await asker.ask("verify", bad, VerifyReply)
