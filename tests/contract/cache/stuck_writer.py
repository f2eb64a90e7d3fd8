"""Run as a process by the cache tests: reserves three slots and then only renews."""

import os
import sys

import anyio

from finback.shared.actor.client import Client
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.lanes.session import ArenaSession
from finback.shared.wire.subjects import Subjects


async def main() -> None:
    """Never returns."""
    bus = await connect(BusSettings(url=os.environ["FINBACK_NATS_URL"]))
    client = Client(bus, Subjects(os.environ["FINBACK_SUBJECT_PREFIX"]))
    session = ArenaSession(client, owner="prefill-x", owner_epoch=1, lease_ms=1500)
    await session.connect()
    lease = await session.reserve("r", 3, 300_000)
    sys.stdout.write(f"reserved {len(lease.slots)}\n")
    sys.stdout.flush()
    await session.run()


if __name__ == "__main__":
    anyio.run(main)
