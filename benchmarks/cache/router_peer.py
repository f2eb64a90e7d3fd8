"""A worker or a cache that only tells what it holds: the router's surroundings in `router.py bus`.

    FINBACK_NATS_URL=... FINBACK_INSTANCE=decode-1 PEER_NUMBER=1 python benchmarks/cache/router_peer.py decode

It holds 4,000 strangers' blocks and each eighth of 24 documents of 859 blocks, swaps 5 blocks every
50 ms, and reports its load four times a second, as a worker does.
"""

import os
import random
import sys
from collections import deque
from pathlib import Path
from typing import ClassVar

import anyio

sys.path.insert(0, str(Path(__file__).parents[1]))

from cache.router_shapes import NUM_DOCUMENTS, NUM_STRANGERS, NUM_WORKERS, SPEC, document

from finback.shared.actor import process
from finback.shared.actor.bus import Message
from finback.shared.actor.service import Service, ServiceContext
from finback.shared.kv.kv_events import KvPublisher
from finback.shared.kv.kv_journal import split
from finback.shared.wire.messages.control import InstanceRecord
from finback.shared.wire.messages.decode import LoadReport


class Peer(Service):
    """See the module."""

    name: ClassVar[str] = "decode"
    roles: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    tier: ClassVar[str] = "device"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        number = int(os.environ["PEER_NUMBER"])
        rng = self._rng = random.Random(f"{self.name}{number}")
        self._documents = [
            block
            for at in range(number % NUM_WORKERS, NUM_DOCUMENTS, NUM_WORKERS)
            for block in split(document(at))
        ]
        self._strangers = deque(rng.randbytes(32) for _ in range(NUM_STRANGERS))
        self._publisher = KvPublisher(self, name=self.role_names()[0], holdings=self._holdings)

    def _holdings(self) -> list[tuple[str, str, list[bytes]]]:
        return [(SPEC.salt, self.tier, [*self._documents, *self._strangers])]

    def record(self) -> InstanceRecord:
        if not self.roles:
            return self.base_record()
        return self.base_record(
            roles=self.roles, model=self.config.model_name, num_blocks=10**6, cache_spec=SPEC
        )

    async def start(self) -> None:
        await self._publisher.start()
        subject = self.subjects.instance("prefill", self.instance, "generate")
        await self.context.bus.subscribe(subject, _drop)
        self.spawn(self._change)
        if self.roles:
            self.spawn(self._report)

    async def _change(self) -> None:
        while True:
            await anyio.sleep(0.05)
            new = [self._rng.randbytes(32) for _ in range(5)]
            self._strangers.extend(new)
            old = [self._strangers.popleft() for _ in range(5)]
            self._publisher.stored(SPEC.salt, self.tier, new)
            self._publisher.removed(SPEC.salt, self.tier, old)

    async def _report(self) -> None:
        while True:
            await anyio.sleep(0.25)
            report = LoadReport(
                instance=self.instance,
                epoch=self.epoch,
                role="decode",
                num_running=self._rng.randrange(32),
                num_waiting=0,
                num_free_blocks=10**5,
                num_blocks=10**6,
                num_waiting_tokens=self._rng.randrange(2_000),
                tokens_per_s=10_000.0,
            )
            await self.client.publish(self.subjects.event("decode", "load"), report)


class CachePeer(Peer):
    """The same as a cache's host tier."""

    name = "cache"
    roles = ()
    tier = "host"


def _drop(message: Message) -> None:
    """A prompt that nobody computes."""


if __name__ == "__main__":
    kind = CachePeer if sys.argv[1:2] == ["cache"] else Peer
    sys.exit(process.run(kind, argv=()))
