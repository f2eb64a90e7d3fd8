"""Leases and the directory over a store in memory: expiry, reconnect, failure of the store."""

import asyncio
import dataclasses

import anyio
import pytest

from finback.shared.actor.kv import Entry
from finback.shared.actor.memory_kv import MemoryKV
from finback.shared.actor.registry import Directory, Registry
from finback.shared.errors import DeadlineExceeded, Unavailable
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire import codec
from finback.shared.wire.messages.control import InstanceRecord

TTL_S = 0.3


def _record(instance: str, service: str = "decode", state: str = "serving") -> InstanceRecord:
    return InstanceRecord(service=service, instance=instance, epoch=1, pid=1, host="h", state=state)


class FlakyKV(MemoryKV):
    """Fails while `is_down`."""

    is_down = False

    async def put(self, key: str, value: bytes, *, expected: int | None = None) -> int:
        if self.is_down:
            raise Unavailable("JetStream is down")
        return await super().put(key, value, expected=expected)


async def test_directory_follows_registry() -> None:
    kv, metrics = MemoryKV(ttl_s=TTL_S), Metrics()
    registry = Registry(kv, ttl_s=TTL_S, metrics=metrics)
    directory = Directory(kv, ttl_s=TTL_S, metrics=metrics)
    changes: list[int] = []
    directory.on_change(lambda: changes.append(len(directory.all())))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(directory.watch_forever)
        waiting = asyncio.create_task(directory.wait_for("decode", 2, timeout_s=2))
        await registry.register(_record("decode-a"))
        await registry.register(_record("decode-b"))
        await registry.register(_record("prefill-a", service="prefill"))
        assert [r.instance for r in await waiting] == ["decode-a", "decode-b"]
        assert directory.find("prefill-a") == _record("prefill-a", service="prefill")
        assert directory.find("nobody") is None
        await registry.set_state("draining")
        assert directory.instances("decode") == []
        assert len(directory.instances("decode", state=None)) == 2
        await registry.unregister()
        assert directory.all() == []
        assert changes[-1] == 0
        tasks.cancel_scope.cancel()


async def test_wait_for_has_a_deadline() -> None:
    directory = Directory(MemoryKV(ttl_s=1), ttl_s=1, metrics=Metrics())
    with pytest.raises(DeadlineExceeded, match="0 of 1 decode"):
        await directory.wait_for("decode", timeout_s=0.05)


async def test_a_lease_that_is_not_renewed_is_swept() -> None:
    kv, metrics = MemoryKV(ttl_s=100), Metrics()  # a store that never tells of expiry
    registry = Registry(kv, ttl_s=TTL_S, metrics=metrics)
    directory = Directory(kv, ttl_s=TTL_S, metrics=metrics)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(directory.watch_forever)
        await registry.register(_record("decode-a"))
        async with anyio.create_task_group() as renewing:
            renewing.start_soon(registry.renew_forever)
            await asyncio.sleep(TTL_S * 3)
            assert len(directory.instances("decode")) == 1
            renewing.cancel_scope.cancel()
        await asyncio.sleep(TTL_S * 2)
        assert directory.instances("decode") == []
        assert metrics.value("finback.directory.swept") == 1
        tasks.cancel_scope.cancel()


async def test_nobody_dies_for_one_lease_after_a_reconnect() -> None:
    kv, metrics = MemoryKV(ttl_s=100), Metrics()
    registry = Registry(kv, ttl_s=1, metrics=metrics)
    directory = Directory(kv, ttl_s=1, metrics=metrics)
    await registry.register(_record("decode-a"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(directory.watch_forever)
        await asyncio.sleep(0.9)
        await directory.reconnected()
        await asyncio.sleep(0.9)
        assert len(directory.instances("decode")) == 1
        await asyncio.sleep(1.2)
        assert directory.instances("decode") == []
        tasks.cancel_scope.cancel()


async def test_a_lost_lease_is_taken_up_again() -> None:
    kv, metrics = MemoryKV(ttl_s=100), Metrics()
    registry = Registry(kv, ttl_s=TTL_S, metrics=metrics)
    await registry.register(_record("decode-a"))
    await kv.delete("decode.decode-a")
    await registry.register(_record("decode-a", state="draining"))
    entry = await kv.get("decode.decode-a")
    assert entry is not None and entry.value is not None
    assert codec.decode(entry.value, InstanceRecord).state == "draining"
    assert metrics.value("finback.registry.lease_lost") == 1


async def test_without_the_store_everything_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    kv, metrics = FlakyKV(ttl_s=100), Metrics()
    registry = Registry(kv, ttl_s=TTL_S, metrics=metrics)
    kv.is_down = True
    await registry.register(_record("decode-a"))
    await registry.register(_record("decode-b"))
    assert metrics.value("finback.registry.up") == 0
    assert capsys.readouterr().err.count("registry unavailable") == 1
    kv.is_down = False
    await registry.set_state("serving")
    assert metrics.value("finback.registry.up") == 1
    assert await kv.get("decode.decode-b") is not None


async def test_replays_change_nothing() -> None:
    directory = Directory(MemoryKV(ttl_s=9), ttl_s=9, metrics=Metrics())
    changes: list[int] = []
    directory.on_change(lambda: changes.append(1))
    entry = Entry("decode.decode-a", codec.encode(_record("decode-a")), 5)
    for _ in range(3):
        directory._apply(entry)
    assert len(changes) == 1
    directory._apply(Entry("decode.decode-a", None, 4))
    assert len(directory.all()) == 1, "an old deletion"
    directory._apply(Entry("decode.decode-a", b"junk", 6))
    directory._apply(dataclasses.replace(entry, value=None, revision=7))
    assert directory.all() == []
