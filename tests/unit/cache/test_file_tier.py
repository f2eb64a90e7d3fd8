"""Memory and files together: written behind, brought back, doing without, and operators' wishes."""

import shutil
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from finback.services.cache import file_tier, tier_health
from finback.services.cache.segments.database import IndexDamaged
from finback.services.cache.segments.store import SegmentStore
from finback.shared.wire.messages.cache_admin import (
    EvictReply,
    EvictRequest,
    ForgetReply,
    ForgetRequest,
    PinReply,
    PinRequest,
    StatsReply,
    StatsRequest,
    VerifyReply,
    VerifyRequest,
)
from finback.shared.wire.messages.cache_store import LookupReply, PrefetchCommand
from support.cache_asker import Asker, open_asker
from support.cache_files import NAMES, files, keep_in_files, num_written, ready, until
from support.kv_store import SALT, digest, joined, payload


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_health, "REST_S", (0.05, 0.1))
    monkeypatch.setattr(file_tier, "_UPKEEP_EVERY_S", 0.05)


async def test_blocks_come_back_from_files(tmp_path: Path) -> None:
    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await keep_in_files(asker)
        assert await asker.lookup([*NAMES, "x"]) == LookupReply(num_found=12, num_host=0)
        reply, lease_id = await asker.read([*NAMES, "x"])
        assert (len(reply.tickets), reply.num_from_files, reply.miss) == (12, 12, "absent")
        await asker.release(lease_id)
        assert await asker.bytes_of(NAMES) == ([payload(name) for name in NAMES], "")
        assert await asker.lookup(NAMES) == LookupReply(num_found=12, num_host=12)
        assert asker.service.metrics.value("finback.cache.hits", tier="file") == 12
        assert asker.service.metrics.value("finback.cache.hits", tier="host") == 12
        assert asker.service.arena.counts().num_leases == 0


async def test_files_outlive_the_loss_of_all_memory(tmp_path: Path) -> None:
    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await keep_in_files(asker, traffic_class="agent", tenant="t")
        await asker.ask("pin", PinRequest(name="p", salt=SALT, hashes=joined("a")), PinReply)
    shutil.rmtree(tmp_path / "shm")
    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await ready(asker)
        await until(lambda: asker.service._tier.holds(SALT, bytes.fromhex(_hex("a"))))
        assert await asker.bytes_of(NAMES) == ([payload(name) for name in NAMES], "")
        stats = await asker.ask("stats", StatsRequest(), StatsReply)
        usage = {(u.tier, u.traffic_class): u.num_blocks for u in stats.usage}
        assert usage == {("host", "agent"): 12, ("file", "agent"): 12}
        assert [pin.name for pin in stats.pins] == ["p"]
        assert stats.file_state == "on" and 0 < stats.file_bytes <= stats.file_max_bytes
        gone = await asker.ask("forget", ForgetRequest(tenant="t"), ForgetReply)
        assert gone == ForgetReply(num_host=12, num_files=12)
        assert (await asker.bytes_of(NAMES))[1] == "evicted"
        assert (await asker.lookup(NAMES)).num_found == 0


def _hex(name: str) -> str:
    return joined([name]).hex()


async def test_what_no_time_is_promised_for_stays_in_memory(tmp_path: Path) -> None:
    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await ready(asker)
        await asker.keep(["a"], traffic_class="batch")
        await asker.keep(["s"], kind="state")
        await asker.keep(["b"])
        await until(lambda: num_written(asker) == 1)
        assert asker.service._blocks.num_waiting_writes == 0
        await asker.ask("evict", EvictRequest(), EvictReply)
        assert (await asker.lookup(["a"])).num_found == 0
        assert (await asker.lookup(["b"])).num_found == 1


async def test_a_prefetch_brings_blocks_before_they_are_asked_for(tmp_path: Path) -> None:
    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await keep_in_files(asker)
        service = asker.service
        command = PrefetchCommand(request_id="r", salt=SALT, hashes=joined(NAMES[:6]))
        subject = service.subjects.instance("cache", service.instance, "prefetch")
        await service.client.publish(subject, command)
        await until(lambda: service.arena.counts().num_kept == 6)
        assert (await asker.lookup(NAMES, prefetch=True)).num_found == 12
        await until(lambda: service.arena.counts().num_kept == 12)
        reply, lease_id = await asker.read(NAMES)
        assert (len(reply.tickets), reply.num_from_files) == (12, 0)
        await asker.release(lease_id)


async def test_many_readers_wait_for_one_load(tmp_path: Path) -> None:
    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await keep_in_files(asker)
        results: list[tuple[list[bytes], str]] = []

        async def read() -> None:
            results.append(await asker.bytes_of(NAMES))

        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(read)
        assert results == [([payload(name) for name in NAMES], "")] * 10
        assert asker.service.metrics.value("finback.cache.promotions", outcome="done") == 12


async def test_a_slow_disk_is_a_miss_and_no_slot_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    real = SegmentStore.read_many

    def slow(self: SegmentStore, *args: Any) -> Any:
        assert gate.wait(20)
        return real(self, *args)

    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await keep_in_files(asker)
        monkeypatch.setattr(SegmentStore, "read_many", slow)
        reply, _ = await asker.read(NAMES, wait_ms=50)
        assert (reply.tickets, reply.miss) == ((), "slow")
        assert asker.service.arena.counts().num_reserved > 0
        gate.set()
        await until(lambda: asker.service.arena.counts().num_kept == 12)
        assert asker.service.arena.counts().num_reserved == 0


async def test_a_reader_that_gave_up_late_frees_slots_only_when_the_thread_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def stuck(self: SegmentStore, *args: Any) -> Any:
        assert gate.wait(20)
        raise OSError(5, "no such luck")

    monkeypatch.setattr("finback.services.cache.promotion.READ_S", 0.1)
    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await keep_in_files(asker)
        with monkeypatch.context() as patch:
            patch.setattr(SegmentStore, "read_many", stuck)
            reply, _ = await asker.read(NAMES, wait_ms=15_000)
            assert (reply.tickets, reply.miss) == ((), "slow")
            assert asker.service.arena.counts().num_reserved > 0, "a thread may still write there"
            assert asker.service._tier.health.is_failed
            gate.set()
            await until(lambda: asker.service.arena.counts().num_reserved == 0)
        await ready(asker)
        assert (await asker.bytes_of(NAMES))[1] == ""


async def test_a_damaged_segment_is_a_miss(tmp_path: Path) -> None:
    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await keep_in_files(asker)
        for path in (tmp_path / "files").rglob("seg-*"):
            data = bytearray(path.read_bytes())
            for name in ("c",):
                at = data.index(payload(name)[:64])
                data[at + 5] ^= 1
            path.write_bytes(data)
        copies, miss = await asker.bytes_of(NAMES)
        assert (copies, miss) == ([payload("a"), payload("b")], "corrupt")
        await until(lambda: not asker.service._tier.holds(SALT, bytes.fromhex(_hex("c"))))
        await asker.keep(["c"])
        assert (await asker.bytes_of(NAMES))[1] == ""


async def test_a_tier_that_cannot_be_opened_is_done_without_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "files").write_text("no folder")
    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await until(lambda: asker.service._tier.health.is_failed)
        await asker.keep(["a"])
        assert await asker.bytes_of(["a", "b"]) == ([payload("a")], "absent")
        stats = await asker.ask("stats", StatsRequest(), StatsReply)
        assert "cannot use file tier" in stats.file_state
        (tmp_path / "files").unlink()
        await ready(asker)
        await until(lambda: num_written(asker) == 1)


async def test_a_failing_disk_is_left_alone_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: SegmentStore, *args: Any) -> bool:
        raise OSError(5, "input/output error")

    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await ready(asker)
        with monkeypatch.context() as patch:
            patch.setattr(SegmentStore, "put", broken)
            await asker.keep(["a"])
            await until(
                lambda: asker.service.metrics.value("finback.cache.write_backs", outcome="failed")
            )
            assert await asker.bytes_of(["a"]) == ([payload("a")], "")
        await ready(asker)
        await asker.keep(["b"])
        await until(lambda: num_written(asker) == 1)
        assert asker.service.metrics.value("finback.cache.file_failures") >= 1


async def test_verify_and_pins_reach_the_files(tmp_path: Path) -> None:
    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await keep_in_files(asker)
        pin = PinRequest(name="p", salt=SALT, hashes=joined(["a", "b", "z"]))
        found = await asker.ask("pin", pin, PinReply)
        assert found == PinReply(num_blocks=3, num_held=0, num_files=2)
        part = await asker.ask("verify", VerifyRequest(tier="file"), VerifyReply)
        assert (part.num_checked, part.num_bad, part.next_cursor) == (12, 0, "")


async def test_a_bug_is_not_taken_for_a_failing_disk(tmp_path: Path) -> None:
    def bug(_: SegmentStore) -> None:
        raise KeyError("no such thing")

    def damage(_: SegmentStore) -> int:
        raise IndexDamaged("twice")

    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await ready(asker)
        tier = asker.service._tier
        with pytest.raises(KeyError):
            await tier.call(bug)
        assert not tier.health.is_failed
        assert await tier.call(damage) is None
        assert "IndexDamaged" in tier.health.state


async def test_what_is_read_in_memory_lives_on_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory says once a minute that a block is used; here at once."""
    monkeypatch.setattr("finback.services.cache.retention._TOUCH_S", 0.0)
    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await ready(asker)
        await asker.keep(["a", "b"], retention_s=1000)
        await until(lambda: num_written(asker) == 2)
        store = tier_store(asker)

        def ends() -> dict[str, float]:
            store.sweep()
            found = store.find(SALT, [digest(name) for name in "ab"])
            return {n: r.expires_unix_s for n, r in zip("ab", found, strict=True) if r}

        before = ends()
        await asker.bytes_of(["a"])
        await until(lambda: asker.service.metrics.value("finback.cache.files_renewed") == 1)
        after = ends()
        assert after["a"] > before["a"]
        assert after["b"] == before["b"]


def tier_store(asker: Asker) -> SegmentStore:
    store = asker.service._tier._store
    assert store is not None
    return store
