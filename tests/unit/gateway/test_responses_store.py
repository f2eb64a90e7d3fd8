"""The store: what is written is read again, by its tenant alone, until it is deleted or expires."""

import asyncio
import contextlib
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.services.gateway import store_sweep
from finback.services.gateway.store import Store
from finback.services.gateway.store_limits import MAX_VALUE_BYTES, StoreLimits, pack
from finback.services.gateway.store_rows import Kept
from finback.shared.errors import (
    ConfigError,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    Unavailable,
)

LIMITS = StoreLimits(retention_s=3600.0, max_tenant_values=1000, max_tenant_bytes=2**28)


async def _open(folder: Path, limits: StoreLimits = LIMITS, max_bytes: int = 2**30) -> Store:
    store = Store(str(folder / "responses.sqlite"), limits, max_bytes=max_bytes)
    await store.open()
    return store


def _item(name: str, text: str = "hello") -> dict[str, Any]:
    return {"id": name, "type": "message", "role": "user", "content": [{"text": text}]}


def _kept(name: str, tenant: str = "a", *, status: str = "completed", **more: Any) -> Kept:
    body = {"id": name, "status": status, "output": [_item(f"out-{name}", "said")]}
    fields = {"items": [_item(f"in-{name}")], **more}
    return Kept(response_id=name, tenant=tenant, body=body, **fields)


async def test_a_writer_that_stands_still_keeps_nobody_from_reading(tmp_path: Path) -> None:
    store = await _open(tmp_path)
    await store.responses.keep(_kept("r1"))
    made = await store.conversations.create("a", "c1", {}, [_item("i1")])
    with contextlib.closing(sqlite3.connect(store.database.path, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("UPDATE responses SET status = 'lost'")
        found = await store.responses.get("a", "r1", with_items=True)
        assert found is not None and found.body["status"] == "completed"
        assert await store.conversations.items("a", made.conversation_id) == [_item("i1")]
        assert [*await store.responses.find_items("a", ["i1", "no"])] == ["i1"]
        assert await store.leases.unfinished() == []
        assert await store.events.page("a", "r1", -1) is not None
        writer.execute("ROLLBACK")
    await store.close()


async def test_a_read_cannot_write(tmp_path: Path) -> None:
    store = await _open(tmp_path)
    await store.responses.keep(_kept("r1"))
    with pytest.raises(Unavailable, match="readonly"):
        await store.database.read(lambda c: c.execute("DELETE FROM responses"))
    assert await store.responses.get("a", "r1") is not None
    assert await store.responses.delete("a", "r1")
    await store.close()


async def test_a_response_survives_a_restart(tmp_path: Path) -> None:
    store = await _open(tmp_path)
    await store.responses.keep(_kept("r1"))
    await store.close()
    again = await _open(tmp_path)
    found = await again.responses.get("a", "r1", with_items=True)
    assert found is not None and found.body["output"][0]["id"] == "out-r1"
    assert [item["id"] for item in found.items] == ["in-r1"]
    assert await again.responses.get("b", "r1") is None
    assert await again.responses.delete("b", "r1") is False
    assert await again.responses.delete("a", "r1") is True
    assert await again.responses.get("a", "r1") is None
    await again.close()
    mode = (tmp_path / "responses.sqlite").stat().st_mode
    assert mode & 0o777 == 0o600


async def test_five_megabytes_come_back_as_they_were(tmp_path: Path) -> None:
    store = await _open(tmp_path)
    text = random.Random(0).randbytes(5 * 2**19).hex()
    await store.responses.keep(_kept("big", items=[_item("in", text)]))
    found = await store.responses.get("a", "big", with_items=True)
    assert found is not None and found.items[0]["content"][0]["text"] == text
    await store.database.checkpoint()
    full_bytes = _file_bytes(tmp_path)
    assert await store.database.run(store_sweep.size_bytes) <= full_bytes
    await store.responses.delete("a", "big")
    await store_sweep.sweep(store.database)
    assert _file_bytes(tmp_path) < full_bytes / 2  # the room is given back to the disk
    await store.close()


def _file_bytes(folder: Path) -> int:
    return (folder / "responses.sqlite").stat().st_size


async def test_more_than_the_limit_is_refused_with_the_limit(tmp_path: Path) -> None:
    store = await _open(tmp_path)
    with pytest.raises(PayloadTooLarge, match=str(MAX_VALUE_BYTES)):
        await store.responses.keep(_kept("big", items=[_item("in", "x" * MAX_VALUE_BYTES)]))
    assert await store.responses.get("a", "big") is None
    conversation = await store.conversations.create("a", "c", {}, [])
    for name in ("m1", "m2"):
        await store.conversations.append("a", "c", [_item(name, "x" * (MAX_VALUE_BYTES // 3))])
    with pytest.raises(PayloadTooLarge):
        await store.conversations.append("a", "c", [_item("m3", "x" * (MAX_VALUE_BYTES // 2))])
    assert len(await store.conversations.items("a", conversation.conversation_id)) == 2
    await store.close()


def _holds(folder: Path, *texts: bytes) -> list[bool]:
    raw = b"".join(path.read_bytes() for path in folder.iterdir())
    return [text in raw for text in texts]


async def test_what_is_deleted_is_nowhere_in_the_files(tmp_path: Path) -> None:
    store = await _open(tmp_path)
    secret = random.Random(1).randbytes(400).hex()
    stored = pack(_item("in", secret))[40:200], pack(_item("m", secret))[40:200]
    await store.conversations.create("a", "c", {"note": "lighthouse"}, [_item("m", secret)])
    await store.responses.keep(_kept("r1", items=[_item("in", secret)]))
    await store.database.checkpoint()
    assert _holds(tmp_path, b"lighthouse", *stored) == [True, True, True]
    await store.conversations.delete("a", "c")
    await store.responses.delete("a", "r1")
    await store_sweep.sweep(store.database)
    assert _holds(tmp_path, b"lighthouse", *stored) == [False, False, False]
    await store.close()


async def test_values_expire(tmp_path: Path) -> None:
    limits = StoreLimits(retention_s=-1.0, max_tenant_values=1000, max_tenant_bytes=2**28)
    store = await _open(tmp_path, limits)
    for at in range(300):
        await store.responses.keep(_kept(f"r{at}"))
    assert await store.responses.get("a", "r1") is None  # before any sweep
    await store_sweep.sweep(store.database)
    count = "SELECT (SELECT count(*) FROM responses) + (SELECT count(*) FROM item_index)"
    assert await store.database.run(lambda c: c.execute(count).fetchone()[0]) == 0
    await store.close()


async def test_over_quota_the_oldest_responses_of_the_tenant_go(tmp_path: Path) -> None:
    limits = StoreLimits(retention_s=3600.0, max_tenant_values=5, max_tenant_bytes=2**28)
    store = await _open(tmp_path, limits)
    await store.responses.keep(_kept("other", "b"))
    for at in range(8):
        await store.responses.keep(_kept(f"r{at}"))
    held = [at for at in range(8) if await store.responses.get("a", f"r{at}") is not None]
    assert held == [3, 4, 5, 6, 7]
    assert await store.responses.get("b", "other") is not None
    await store.close()


async def test_a_quota_full_of_conversations_refuses(tmp_path: Path) -> None:
    limits = StoreLimits(retention_s=3600.0, max_tenant_values=2, max_tenant_bytes=2**28)
    store = await _open(tmp_path, limits)
    for name in ("c1", "c2"):
        await store.conversations.create("a", name, {}, [])
    with pytest.raises(InvalidRequest, match="2 of 2 values"):
        await store.conversations.create("a", "c3", {}, [])
    with pytest.raises(InvalidRequest, match="quota"):
        await store.responses.keep(_kept("r1"))
    await store.close()


async def test_a_full_file_refuses_and_takes_again_after_deletes(tmp_path: Path) -> None:
    store = await _open(tmp_path, max_bytes=2**20)
    await store.conversations.create("a", "c", {}, [])
    noise = random.Random(0).randbytes(2**20).hex()
    with pytest.raises(Unavailable, match="full"):
        await store.responses.keep(_kept("big", items=[_item("in", noise)]))
    await store.responses.keep(_kept("small"))
    await store.close()


async def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = await _open(tmp_path)
    await store.close()
    with pytest.raises(Unavailable, match="closed"):
        await store.responses.get("a", "r1")
    await store.database.checkpoint()
    await store.close()


async def test_a_broken_file_stops_the_start_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "responses.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match="store_path"):
        await _open(tmp_path)


# -- background


async def test_only_the_last_claim_may_write(tmp_path: Path) -> None:
    store = await _open(tmp_path)
    await store.leases.queue(_kept("r", status="queued"), {"x": 1}, "g1")
    assert await store.leases.unfinished() == [("r", "g1", 0)]
    first = await store.leases.claim("r", 0, "g1")
    assert first is not None and (first.epoch, first.plan) == (1, {"x": 1})
    assert await store.leases.claim("r", 0, "g2") is None
    second = await store.leases.claim("r", 1, "g2")
    assert second is not None and second.num_attempts == 2
    assert not await store.events.append("r", 1, 0, [b"{}"])
    assert not await store.leases.finish(_kept("r"), 1)
    assert await store.events.append("r", 2, 0, [b'{"a":1}', b'{"a":2}'])
    assert await store.leases.finish(_kept("r"), 2)
    assert not await store.leases.finish(_kept("r", status="failed"), 2)
    found = await store.responses.get("a", "r")
    assert found is not None and (found.status, found.plan) == ("completed", None)
    page = await store.events.page("a", "r", 0)
    assert page is not None and page.documents == ((1, b'{"a":2}'),)
    assert await store.events.page("b", "r", -1) is None
    await store.close()


async def test_cancelled_and_deleted_ones_are_fenced(tmp_path: Path) -> None:
    store = await _open(tmp_path)
    for name in ("r1", "r2"):
        await store.leases.queue(_kept(name, status="queued"), {}, "g1")
        assert await store.leases.claim(name, 0, "g1") is not None
    cancelled = await store.leases.cancel("a", "r1")
    assert cancelled is not None and cancelled.body["status"] == "cancelled"
    again = await store.leases.cancel("a", "r1")
    assert again is not None and again.status == "cancelled"
    assert await store.leases.cancel("b", "r2") is None
    assert await store.responses.delete("a", "r2")
    for name in ("r1", "r2"):
        assert not await store.leases.finish(_kept(name), 1)
        assert not await store.events.append(name, 1, 0, [b"{}"])
    assert await store.leases.unfinished() == []
    await store.close()


async def test_a_released_one_can_be_claimed_by_anybody(tmp_path: Path) -> None:
    store = await _open(tmp_path)
    await store.leases.queue(_kept("r", status="queued"), {}, "g1")
    assert await store.leases.claim("r", 0, "g1") is not None
    await store.leases.release("r", 1)
    assert await store.leases.unfinished() == [("r", "", 1)]
    claimed = await store.leases.claim("r", 1, "g2")
    assert claimed is not None and claimed.num_attempts == 1
    await store.close()


async def test_one_claim_wins_over_two_processes(tmp_path: Path) -> None:
    stores = [await _open(tmp_path) for _ in range(2)]
    for at in range(20):
        await stores[0].leases.queue(_kept(f"r{at}", status="queued"), {}, "")
    won = [
        await asyncio.gather(*(s.leases.claim(f"r{at}", 0, f"g{n}") for n, s in enumerate(stores)))
        for at in range(20)
    ]
    assert all(sum(claim is not None for claim in pair) == 1 for pair in won)
    for store in stores:
        await store.close()


# -- conversations


async def test_a_response_joins_its_conversation_once(tmp_path: Path) -> None:
    store = await _open(tmp_path)
    await store.conversations.create("a", "c", {}, [_item("m0")])
    kept = _kept("r", own_items=[_item("m0"), _item("m1")], conversation_id="c")
    await store.responses.keep(kept)
    names = [item["id"] for item in await store.conversations.items("a", "c")]
    assert names == ["m0", "m1", "out-r"]
    unstored = _kept("r2", own_items=[_item("m2")], conversation_id="c", is_stored=False)
    await store.responses.keep(unstored)
    assert await store.responses.get("a", "r2") is None
    assert len(await store.conversations.items("a", "c")) == 5
    await store.responses.keep(_kept("r3", conversation_id="gone"))
    assert await store.responses.get("a", "r3") is not None
    with pytest.raises(NotFound):
        await store.conversations.items("b", "c")
    await store.close()


async def test_items_are_found_by_their_ids(tmp_path: Path) -> None:
    store = await _open(tmp_path)
    await store.responses.keep(_kept("r", own_items=[_item("in-r")]))
    await store.conversations.create("a", "c", {}, [_item("m0")])
    found = await store.responses.find_items("a", ["out-r", "in-r", "m0", "nothing"])
    assert sorted(found) == ["in-r", "m0", "out-r"]
    assert await store.responses.find_items("b", ["out-r", "m0"]) == {}
    await store.close()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 4)),
        st.tuples(st.just("delete"), st.integers(0, 20)),
        st.tuples(st.just("page"), st.integers(1, 5)),
    ),
    max_size=20,
)


@settings(max_examples=25, deadline=None)
@given(steps)
def test_conversations_are_lists(steps: list[tuple[str, int]]) -> None:
    """Against a plain list: adding, deleting, paging in both directions."""

    async def run(store: Store) -> None:
        twin: list[str] = []
        made = 0
        await store.conversations.create("a", "c", {}, [])
        for verb, number in steps:
            if verb == "add":
                names = [f"m{made + at}" for at in range(number)]
                made += number
                twin += names
                await store.conversations.append("a", "c", [_item(name) for name in names])
            elif verb == "delete" and twin:
                name = twin.pop(number % len(twin))
                await store.conversations.delete_item("a", "c", name)
            else:
                assert await _paged(store, number, is_desc=False) == twin
                assert await _paged(store, number, is_desc=True) == twin[::-1]
        query = "SELECT raw_bytes, bytes FROM conversations"
        held = await store.database.run(lambda c: c.execute(query).fetchone())
        counted = "SELECT coalesce(sum(raw_bytes), 0), coalesce(sum(length(packed)), 0) FROM conversation_items"
        assert held == await store.database.run(lambda c: c.execute(counted).fetchone())

    async def main() -> None:
        store = Store(":memory:", LIMITS, max_bytes=2**30)
        store.database._connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False
        )
        store.database._connection.execute("PRAGMA foreign_keys=ON")
        store.database._migrate(store.database._connection)
        await run(store)
        await store.close()

    asyncio.run(main())


async def _paged(store: Store, limit: int, *, is_desc: bool) -> list[str]:
    names: list[str] = []
    while True:
        after = names[-1] if names else None
        page = await store.conversations.page("a", "c", after=after, limit=limit, is_desc=is_desc)
        if not page:
            return names
        names += [item["id"] for item in page]
