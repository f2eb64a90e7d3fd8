"""What the cache tells of its blocks, as a listener hears it; and what it does not store twice."""

from pathlib import Path
from typing import Any

import anyio

from finback.services.cache.elsewhere import Elsewhere
from finback.shared.wire.messages.cache_admin import EvictReply, EvictRequest
from finback.shared.wire.messages.kv import KvEvents, KvSnapshotReply, KvSnapshotRequest
from support.cache_asker import Asker, open_asker
from support.kv_store import SALT, digest, joined


async def snapshot(asker: Asker) -> dict[tuple[str, str], set[bytes]]:
    reply = await asker.ask("kv-snapshot", KvSnapshotRequest(), KvSnapshotReply)
    return {(h.salt, h.tier): set(_split(h.hashes)) for h in reply.holdings if h.hashes}


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + 32] for at in range(0, len(hashes), 32)]


async def test_events_and_snapshots_tell_of_both_tiers(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"cache_dir": str(tmp_path / "files"), "cache_dir_bytes": 2**26}
    async with open_asker(tmp_path, **settings) as asker:
        service = asker.service
        held: dict[str, set[bytes]] = {"host": set(), "file": set()}

        def hear(event: KvEvents) -> None:
            if event.tier:
                held[event.tier] -= set(_split(event.removed))
                held[event.tier] |= set(_split(event.stored))

        await service.listen(service.subjects.event("cache", "kv"), KvEvents, hear)
        names = {digest(name) for name in "abc"}
        with anyio.fail_after(10):
            while service._tier.health.state != "on":  # noqa: ASYNC110 -- a thread opens it
                await anyio.sleep(0.01)
            await asker.keep([*"abc"])
            await asker.keep(["s"], kind="state")
            while held != {"host": names, "file": names}:  # noqa: ASYNC110 -- told in batches
                await anyio.sleep(0.01)
            assert await snapshot(asker) == {(SALT, "host"): names, (SALT, "file"): names}
            await asker.ask("evict", EvictRequest(), EvictReply)
            while held != {"host": set(), "file": names}:  # noqa: ASYNC110 -- told in batches
                await anyio.sleep(0.01)
        assert await snapshot(asker) == {(SALT, "file"): names}


async def test_what_another_cache_keeps_is_not_kept_again_unless_it_is_pinned(
    tmp_path: Path,
) -> None:
    async with open_asker(tmp_path, cache_store_once=True) as asker:
        service = asker.service
        event = KvEvents(
            service="cache", instance="cache-other", epoch=1, seq=1, salt=SALT, tier="host",
            stored=joined("ab"),
        )  # fmt: skip
        elsewhere = service.store.elsewhere
        assert elsewhere is not None
        view = elsewhere.open_view("cache-other")
        view.store(event.salt, event.tier, event.stored)
        assert (await asker.store([*"abc"])).indexes == (0, 1, 2)
        view.activate()
        service.store.pin("p", SALT, joined("b"))
        assert (await asker.store([*"abd"], lease_id="ab" * 16)).indexes == (2,)
        service.arena.release(tuple(service.arena.book._leases))
        assert (await asker.store([*"abd"])).indexes == (1, 2)
        view.drop()
        assert (await asker.store([*"abd"])).indexes == (0,)


def test_views_count_each_holder_and_tier_once() -> None:
    elsewhere = Elsewhere("cache-own")
    views = [elsewhere.open_view(name) for name in ("cache-a", "cache-b", "cache-own")]
    for view in views:
        view.activate()
        view.store(SALT, "host", joined("x"))
        view.store(SALT, "host", joined("x"))
        view.store(SALT, "device", joined("y"))
    views[0].store(SALT, "file", joined("x"))
    assert elsewhere.holds(SALT, digest("x")) and not elsewhere.holds(SALT, digest("y"))
    views[1].clear()
    views[0].remove(SALT, "host", joined("x"))
    assert elsewhere.holds(SALT, digest("x"))
    views[0].drop()
    assert not elsewhere.holds(SALT, digest("x"))
