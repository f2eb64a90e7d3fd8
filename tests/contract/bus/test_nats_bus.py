"""What only a real server can do to us: die, come back, refuse, forget."""

import asyncio
import time
from collections.abc import Callable

import pytest

from finback.shared.actor.bus import Message
from finback.shared.actor.kv import JetStreamKV, WrongRevision
from finback.shared.actor.nats_bus import BusSettings, NatsBus, connect
from finback.shared.actor.registry import Directory, Registry
from finback.shared.errors import ConfigError, Unavailable
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.messages.control import InstanceRecord
from support.nats_server import NatsServer

pytestmark = pytest.mark.nats


async def _settled(condition: Callable[[], object], timeout_s: float = 6.0) -> float:
    begun = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.01)
    return time.monotonic() - begun


async def test_the_server_dies_and_comes_back(own_nats_server: NatsServer) -> None:
    server, metrics = own_nats_server, Metrics()
    got: list[Message] = []
    back: list[int] = []
    bus = await connect(BusSettings(url=server.url), metrics)

    async def reconnected() -> None:
        back.append(1)

    bus.on_reconnect(reconnected)
    await bus.subscribe("mute", lambda message: None)
    await bus.subscribe("x", got.append)
    waiting = asyncio.create_task(bus.request("mute", b"", timeout_s=60))
    await asyncio.sleep(0.05)
    server.kill()
    with pytest.raises(Unavailable, match="lost"):
        await waiting
    assert not bus.is_connected
    assert metrics.value("finback.bus.connected") == 0
    begun = time.monotonic()
    with pytest.raises(Unavailable, match="no bus"):
        await bus.request("x", b"", timeout_s=0.2)
    assert time.monotonic() - begun < 1
    server.start()
    await _settled(lambda: bus.is_connected and back)
    await bus.publish("x", b"again")
    await _settled(lambda: bool(got))
    assert metrics.value("finback.bus.reconnects") == 1
    assert metrics.value("finback.bus.connected") == 1
    await bus.close()


async def test_closed_for_good_is_told(nats_server: NatsServer) -> None:
    bus = await connect(BusSettings(url=nats_server.url), Metrics())
    reasons: list[str] = []
    bus.on_closed(reasons.append)
    mute = await connect(BusSettings(url=nats_server.url))
    await mute.subscribe("closed.mute", lambda message: None)
    waiting = asyncio.create_task(bus.request("closed.mute", b"", timeout_s=60))
    await asyncio.sleep(0.05)
    # Behind our own check: the server ends a connection that sends too much.
    await bus._client.publish("x", b"y" * bus.max_payload, headers={"A": "b" * 4000})
    with pytest.raises(Unavailable):
        await waiting
    await _settled(lambda: bool(reasons))
    assert "closed for good" in reasons[0]
    assert bus.is_closed
    with pytest.raises(Unavailable):
        await bus.request("x", b"", timeout_s=1)
    await mute.close()


async def test_a_wrong_password_is_one_line(tmp_path_factory: pytest.TempPathFactory) -> None:
    extra = "authorization { users: [{user: router, password: right}] }"
    server = NatsServer(folder=tmp_path_factory.mktemp("auth"), extra=extra)
    server.start()
    try:
        bus = await connect(BusSettings(url=server.url, user="router", password="right"))
        await bus.close()
        with pytest.raises(ConfigError, match="refuses user router"):
            await connect(BusSettings(url=server.url, user="router", password="wrong"))
    finally:
        server.stop()


async def test_no_server_yet_is_waited_for(own_nats_server: NatsServer) -> None:
    own_nats_server.kill()
    with pytest.raises(ConfigError, match="no NATS server answers"):
        await connect(BusSettings(url=own_nats_server.url, connect_timeout_s=0.4))
    connecting = asyncio.create_task(connect(BusSettings(url=own_nats_server.url)))
    await asyncio.sleep(0.3)
    own_nats_server.start()
    bus = await connecting
    assert bus.is_connected
    await bus.close()


async def test_a_reader_that_stands_still_for_a_while_loses_nothing(
    nats_server: NatsServer,
) -> None:
    reader = await connect(BusSettings(url=nats_server.url))
    writer = await connect(BusSettings(url=nats_server.url))
    got: list[Message] = []

    def slow(message: Message) -> None:
        if not got:
            time.sleep(0.5)  # the event loop stands still, as with a callback that blocks
        got.append(message)

    await reader.subscribe("slow", slow)
    for _ in range(20_000):
        await writer.publish("slow", b"x" * 100)
    await writer.flush()
    await _settled(lambda: len(got) == 20_000)
    assert reader.is_connected
    await reader.close()
    await writer.close()


async def test_key_value_keeps_its_contract(nats_server: NatsServer, subject_prefix: str) -> None:
    bus = await connect(BusSettings(url=nats_server.url))
    kv = JetStreamKV(bus, f"{subject_prefix}_kv", ttl_s=2)
    await kv.open()
    await kv.open()
    assert await kv.get("a.b") is None
    first = await kv.put("a.b", b"1", expected=0)
    with pytest.raises(WrongRevision):
        await kv.put("a.b", b"2", expected=0)
    second = await kv.put("a.b", b"2", expected=first)
    entry = await kv.get("a.b")
    assert entry is not None
    assert (entry.value, entry.revision) == (b"2", second)
    seen: list[tuple[str, bytes | None]] = []
    beats: list[int] = []
    watch = await kv.watch(lambda e: seen.append((e.key, e.value)), lambda: beats.append(1))
    await _settled(lambda: len(seen) == 1)
    await kv.put("c.d", b"3")
    await kv.delete("c.d")
    await _settled(lambda: len(seen) == 3)
    assert seen == [("a.b", b"2"), ("c.d", b"3"), ("c.d", None)]
    entry = await kv.get("c.d")
    assert entry is not None and entry.value is None
    # The lease runs out: the server's marker tells.
    await _settled(lambda: ("a.b", None) in seen)
    assert beats
    await watch.stop()
    await bus.close()


async def test_leases_survive_the_death_of_the_server(own_nats_server: NatsServer) -> None:
    server = own_nats_server
    buses = [await connect(BusSettings(url=server.url)) for _ in range(2)]
    registries, directories, tasks = [], [], []
    for i, bus in enumerate(buses):
        kv, metrics = JetStreamKV(bus, "leases", ttl_s=1.5), Metrics()
        registry = Registry(kv, ttl_s=1.5, metrics=metrics)
        directory = Directory(kv, ttl_s=1.5, metrics=metrics)
        bus.on_reconnect(registry.reregister)
        bus.on_reconnect(directory.reconnected)
        await registry.register(_record(f"decode-{i}"))
        tasks += [
            asyncio.create_task(registry.renew_forever()),
            asyncio.create_task(directory.watch_forever()),
        ]
        registries.append(registry)
        directories.append(directory)
    for directory in directories:
        await directory.wait_for("decode", 2, timeout_s=3)
    deaths: list[int] = []
    directories[0].on_change(lambda: deaths.append(len(directories[0].all())))
    server.kill()
    await asyncio.sleep(2.0)
    assert len(directories[0].instances("decode")) == 2 or not deaths, "goes on from its last view"
    server.start()
    await _settled(lambda: all(bus.is_connected for bus in buses))
    took_s = await _settled(lambda: all(len(d.instances("decode")) == 2 for d in directories))
    assert took_s < 3
    # And the fresh watch is alive: one that ends its lease is seen to go, soon.
    await registries[1].unregister()
    await _settled(lambda: [r.instance for r in directories[0].instances("decode")] == ["decode-0"])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for bus in buses:
        await bus.close()


async def test_many_requests_leave_nothing_behind(nats_server: NatsServer) -> None:
    bus: NatsBus = await connect(BusSettings(url=nats_server.url))
    await bus.subscribe("hold", lambda message: None)
    before = len(bus._client._subs)
    for _ in range(10):
        asked = [asyncio.create_task(bus.request("hold", b"", timeout_s=30)) for _ in range(100)]
        await asyncio.sleep(0)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    assert len(bus._client._subs) == before
    assert len(bus._replies) == 0
    await bus.close()


def _record(instance: str) -> InstanceRecord:
    return InstanceRecord(
        service="decode", instance=instance, epoch=1, pid=1, host="h", state="serving"
    )
