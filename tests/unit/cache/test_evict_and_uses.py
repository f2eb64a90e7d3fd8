"""`evict` by tenant, class and age against the obvious; hit rates by class, tier and cause."""

from pathlib import Path

import pytest

from finback.services.cache.block_names import tenant_digest
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.cache_admin import (
    EvictReply,
    EvictRequest,
    PinReply,
    PinRequest,
    StatsReply,
    StatsRequest,
)
from support.cache_asker import Asker, open_asker
from support.cache_files import files, keep_in_files
from support.kv_store import SALT, SLOT, joined

BLOCKS = {  # name: tenant, class
    "a": ("ann", "agent"),
    "b": ("ann", "batch"),
    "c": ("ann", "chat"),
    "d": ("bob", "batch"),
    "p": ("ann", "chat"),
}


async def held(asker: Asker) -> str:
    return "".join([n for n in BLOCKS if (await asker.lookup([n])).num_found])


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        (EvictRequest(tenant="ann"), "dp"),
        (EvictRequest(tenant="ann", traffic_class="chat"), "adp"),
        (EvictRequest(tenant="ann", num_bytes=1), "acdp"),
        (EvictRequest(tenant="nobody"), "abcdp"),
        (EvictRequest(older_than_s=3600), "abcdp"),
        (EvictRequest(older_than_s=1e-9, traffic_class="batch"), "acp"),
        (EvictRequest(), "p"),
    ],
)
async def test_only_what_is_meant_goes_and_pins_hold(
    tmp_path: Path, asked: EvictRequest, left: str
) -> None:
    async with open_asker(tmp_path) as asker:
        for name, (tenant, class_) in BLOCKS.items():
            await asker.keep([name], tenant=tenant, traffic_class=class_)
        await asker.ask("pin", PinRequest(name="p", salt=SALT, hashes=joined("p")), PinReply)
        reply = await asker.ask("evict", asked, EvictReply)
        assert reply == EvictReply(num_blocks=5 - len(left), num_bytes=SLOT * (5 - len(left)))
        assert await held(asker) == left


async def test_bad_wishes_are_refused(tmp_path: Path) -> None:
    async with open_asker(tmp_path) as asker:
        for asked in (
            EvictRequest(num_bytes=-1),
            EvictRequest(older_than_s=-1),
            EvictRequest(older_than_s=float("inf")),
            EvictRequest(older_than_s=float("nan")),
            EvictRequest(traffic_class="first"),
        ):
            with pytest.raises(InvalidRequest):
                await asker.ask("evict", asked, EvictReply)


async def test_uses_are_told_by_class_tier_and_cause(tmp_path: Path) -> None:
    async with open_asker(tmp_path, **files(tmp_path), cache_tenant_bytes=2**20) as asker:
        await keep_in_files(asker, ["a", "b"], tenant="ann")
        await asker.keep(["c"], tenant="bob")
        await asker.lookup(["a", "b", "c", "x", "y"], traffic_class="agent")
        await asker.read(["a", "b", "c", "x"], traffic_class="agent")
        await asker.lookup(["a"], traffic_class="nonsense")
        stats = await asker.ask("stats", StatsRequest(), StatsReply)
        found = {(u.what, u.traffic_class, u.outcome): u.num_blocks for u in stats.uses}
        assert found == {
            ("lookup", "agent", "file"): 3,  # c lies in memory, but behind blocks of the files
            ("lookup", "agent", "absent"): 2,
            ("read", "agent", "file"): 3,
            ("read", "agent", "absent"): 1,
            ("lookup", "", "host"): 1,
        }
        assert stats.tenant_max_bytes == 2**20
        tenants = {t.tenant: t.num_bytes for t in stats.tenants}
        assert tenants[tenant_digest("ann").hex()] == 2 * SLOT
