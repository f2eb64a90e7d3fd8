"""Tells on the bus which KV blocks a process holds: `KvPublisher`, for workers and caches.

    publisher = KvPublisher(service, name="decode", holdings=lambda: [(salt, "device", hashes)])
    await publisher.start()                       # in the service's start
    publisher.stored(salt, "device", hashes)      # on the event loop; cheap, tells within 50 ms
    publisher.removed(salt, "device", hashes)

Listeners are `KvSubscriber`s (`kv_subscriber.py`).
"""

from collections.abc import Callable, Iterable
from typing import Final

import anyio

from finback.shared.actor.endpoint import Call
from finback.shared.actor.service import Service
from finback.shared.clock import monotonic_s
from finback.shared.errors import ServingError
from finback.shared.kv.kv_journal import Holding, KvJournal, SnapshotDesk
from finback.shared.wire.messages.kv import KvEvents, KvSnapshotReply, KvSnapshotRequest

__all__ = ["BATCH_S", "BEAT_S", "EVENT", "SNAPSHOT", "Holding", "KvPublisher"]

BATCH_S: Final = 0.05
BEAT_S: Final = 2.0
"""With nothing to tell an empty message goes out this often, so that a lost last one is noticed."""
EVENT: Final = "kv"
SNAPSHOT: Final = "kv-snapshot"


class KvPublisher:
    """Numbers, batches and tells changes; answers `<name>.<instance>.kv-snapshot`.

    `name`: the service name under which the instance is in the registry (a worker's first role).
    `holdings`: all blocks that are held now, by (salt, tier); called on the event loop, for each
    snapshot once, and copied at once. All methods belong to the event loop.
    """

    def __init__(
        self, service: Service, *, name: str, holdings: Callable[[], Iterable[Holding]]
    ) -> None:
        self._service = service
        self._name = name
        self._holdings = holdings
        self._journal = KvJournal(service=name, instance=service.instance, epoch=service.epoch)
        self._desk = SnapshotDesk(epoch=service.epoch)
        self._dirty = anyio.Event()
        self._sending = anyio.Lock()

    async def start(self) -> None:
        """Answer snapshots and begin to tell."""
        await self._service.add_endpoint(
            SNAPSHOT,
            KvSnapshotRequest,
            self._on_snapshot,
            scope="instance",
            role=self._name,
            workers=1,
            is_traced=False,
        )
        self._service.spawn(self._run)

    def stored(self, salt: str, tier: str, hashes: Iterable[bytes]) -> None:
        """These blocks are held now, whole, and may be found."""
        self._journal.stored(salt, tier, hashes)
        self._dirty.set()

    def removed(self, salt: str, tier: str, hashes: Iterable[bytes]) -> None:
        """These blocks are not held any more."""
        self._journal.removed(salt, tier, hashes)
        self._dirty.set()

    def reset(self) -> None:
        """No block is held any more, in any tier."""
        self._journal.reset()
        self._dirty.set()

    async def flush(self) -> None:
        """Tell now what waits (it is told within `BATCH_S` anyway)."""
        async with self._sending:
            for event in self._journal.take():
                await self._publish(event)

    async def _run(self) -> None:
        while True:
            with anyio.move_on_after(BEAT_S):
                await self._dirty.wait()
            if self._dirty.is_set():
                await anyio.sleep(BATCH_S)
                self._dirty = anyio.Event()
                await self.flush()
            else:
                async with self._sending:
                    await self._publish(self._journal.beat())
            self._desk.sweep(monotonic_s())

    async def _publish(self, event: KvEvents) -> None:
        """A failure leaves a gap in the numbers, and so is mended by a snapshot."""
        try:
            subject = self._service.subjects.event(self._name, EVENT)
            await self._service.client.publish_bare(subject, event)
        except ServingError:
            self._service.metrics.count("finback.kv.events_failed")
        else:
            self._service.metrics.count("finback.kv.events_sent")

    async def _on_snapshot(self, call: Call[KvSnapshotRequest]) -> KvSnapshotReply:
        request = call.message
        holdings = () if request.cursor else self._holdings()
        self._service.metrics.count("finback.kv.snapshot_pages")
        return self._desk.answer(request, holdings, self._journal.seq, monotonic_s())
