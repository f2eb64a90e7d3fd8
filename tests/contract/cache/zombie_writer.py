"""Run as a process by the cache tests: gets slots for two blocks, and writes to them for ever.

Says `open`, then after a line on its standard input tries to commit, and says what came of it.
"""

import os
import sys
import threading

import anyio

from finback.shared.actor.client import Client
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.errors import ServingError
from finback.shared.lanes.session import ArenaSession, SlotLease
from finback.shared.lanes.shm import ArenaWriter
from finback.shared.wire.messages.cache import Slot
from finback.shared.wire.messages.cache_store import StoreReply, StoreRequest
from finback.shared.wire.subjects import Subjects
from support.kv_store import SALT, joined

BLOCK = 300_000


def scribble(writer: ArenaWriter, slots: tuple[Slot, ...]) -> None:
    """Never returns."""
    views = [writer.view(slot) for slot in slots]
    number = 0
    while True:
        number = (number + 1) % 256
        for view in views:
            view[:] = bytes([number]) * BLOCK


async def main() -> None:
    """Ends when its standard input does."""
    bus = await connect(BusSettings(url=os.environ["FINBACK_NATS_URL"]))
    client = Client(bus, Subjects(os.environ["FINBACK_SUBJECT_PREFIX"]))
    session = ArenaSession(client, owner="prefill-z", owner_epoch=3, lease_ms=1500)
    await session.connect()
    lease_id = "ab" * 16
    request = StoreRequest(
        request_id="z", owner="prefill-z", owner_epoch=3, salt=SALT, hashes=joined(["z0", "z1"]),
        payload_bytes=BLOCK, lease_ms=1500, lease_id=lease_id,
    )  # fmt: skip
    reply = await client.call(
        client.subjects.service("cache", "store"), request, StoreReply, timeout_s=5
    )
    threading.Thread(target=scribble, args=(session.writer, reply.slots), daemon=True).start()
    sys.stdout.write(f"open {len(reply.slots)}\n")
    sys.stdout.flush()
    while await anyio.to_thread.run_sync(sys.stdin.readline):
        try:
            lease = SlotLease(lease_id, reply.slots)
            await session.commit(lease, [(slot, BLOCK) for slot in reply.slots])
            sys.stdout.write("committed\n")
        except ServingError as error:
            sys.stdout.write(f"{error.code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(main)
