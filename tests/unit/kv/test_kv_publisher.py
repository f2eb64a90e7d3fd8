"""A publisher in a service: batches on the bus, beats when idle, answers snapshots."""

from typing import ClassVar

import pytest

from finback.shared.actor.local_bus import LocalBroker, LocalBus
from finback.shared.actor.service import Service, ServiceContext
from finback.shared.kv import kv_events
from finback.shared.kv.kv_events import KvPublisher
from finback.shared.kv.kv_journal import split
from finback.shared.wire import codec
from finback.shared.wire.messages.kv import KvEvents, KvSnapshotReply, KvSnapshotRequest
from support.local_service import serving
from support.role_stack import until


def block(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Holder(Service):
    """Holds blocks, as a worker does."""

    name: ClassVar[str] = "cache"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self.held: list[bytes] = []
        self.publisher = KvPublisher(
            self, name="cache", holdings=lambda: [("s", "host", self.held)]
        )

    async def start(self) -> None:
        await self.publisher.start()


@pytest.mark.anyio
async def test_changes_are_told_in_batches_and_held_blocks_on_demand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_events, "BEAT_S", 0.2)
    broker = LocalBroker()
    listener = LocalBus(broker)
    heard: list[KvEvents] = []
    await listener.subscribe(
        "finback.v1.event.cache.kv", lambda m: heard.append(codec.decode(m.data, KvEvents))
    )
    async with serving(Holder, broker=broker) as holder:
        for number in range(100):
            holder.publisher.stored("s", "host", [block(number)])
        holder.held = [block(number) for number in range(100)]
        await until(lambda: len(heard) >= 2, timeout_s=5.0)
        assert [event.seq for event in heard[:2]] == [1, 2]
        assert len(split(heard[0].stored)) == 100
        assert not heard[1].stored and not heard[1].is_reset  # a beat
        subject = holder.subjects.instance("cache", holder.instance, "kv-snapshot")
        reply = await holder.client.call(
            subject, KvSnapshotRequest(), KvSnapshotReply, timeout_s=2.0
        )
        assert reply.seq >= 2 and split(reply.holdings[0].hashes) == holder.held
        holder.publisher.removed("s", "host", [block(1)])
        await holder.publisher.flush()
        await until(lambda: any(event.removed for event in heard), timeout_s=5.0)
    await listener.close()
