"""A writer that was stopped, declared lost, and goes on writing: no kept block is ever touched."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import anyio
import pytest

from finback.shared.actor.client import Client
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.lanes.arena_format import SlotState, parse_extent, read_slot
from finback.shared.lanes.base import checksum
from finback.shared.lanes.session import ArenaSession
from finback.shared.wire.messages.cache import CommitRequest, LeaseReply, LeaseRequest
from finback.shared.wire.messages.cache_store import (
    ReadReply,
    ReadRequest,
    StoreReply,
    StoreRequest,
)
from finback.shared.wire.messages.control import InstanceLost
from finback.shared.wire.subjects import Subjects
from support.kv_store import SALT, joined, payload
from support.nats_server import NatsServer
from support.service_process import ServiceProcess

pytestmark = pytest.mark.nats

BLOCK = 300_000
TESTS = Path(__file__).parents[2]


@pytest.fixture
def cache(nats_server: NatsServer, tmp_path: Path, subject_prefix: str) -> Iterator[ServiceProcess]:
    process = ServiceProcess(
        "cache",
        {
            "FINBACK_NATS_URL": nats_server.url,
            "FINBACK_RUN_DIR": str(tmp_path),
            "FINBACK_SHM_DIR": str(tmp_path / "shm"),
            "FINBACK_STACK_ID": subject_prefix,
            "FINBACK_SUBJECT_PREFIX": subject_prefix,
            "FINBACK_ARENA_BYTES": str(16 << 20),
        },
    ).start()
    yield process
    process.stop()


class Worker:
    """A good worker beside the bad one."""

    def __init__(self, client: Client, session: ArenaSession) -> None:
        self.client, self.session = client, session
        self.num_leases = 0

    def subject(self, verb: str) -> str:
        return self.client.subjects.service("cache", verb)

    def lease(self) -> str:
        self.num_leases += 1
        return f"{self.num_leases:032x}"

    async def keep(self, names: Sequence[str]) -> int:
        request = StoreRequest(
            request_id="w", owner="prefill-a", owner_epoch=7, salt=SALT, hashes=joined(names),
            payload_bytes=BLOCK, lease_id=self.lease(),
        )  # fmt: skip
        reply = await self.client.call(self.subject("store"), request, StoreReply, timeout_s=5)
        for slot, index in zip(reply.slots, reply.indexes, strict=True):
            self.session.writer.write(slot, payload(names[index], BLOCK))
        commit = CommitRequest(
            lease_id=request.lease_id,
            slot_ids=tuple(slot.slot_id for slot in reply.slots),
            checksums=tuple(checksum(payload(names[index], BLOCK)) for index in reply.indexes),
            lengths=(BLOCK,) * len(reply.slots),
        )
        if reply.slots:
            await self.client.call(self.subject("commit"), commit, LeaseReply, timeout_s=5)
        await self.release(request.lease_id)
        return len(reply.slots)

    async def read(self, name: str) -> bytes | None:
        request = ReadRequest(
            request_id="w", owner="prefill-a", owner_epoch=7, salt=SALT, hashes=joined([name]),
            lease_id=self.lease(),
        )  # fmt: skip
        reply = await self.client.call(self.subject("read"), request, ReadReply, timeout_s=5)
        found = [bytes(await self.session.reader.read(ticket)) for ticket in reply.tickets]
        await self.release(request.lease_id)
        return found[0] if found else None

    async def release(self, lease_id: str) -> None:
        message = LeaseRequest(lease_ids=(lease_id,))
        await self.client.call(self.subject("release"), message, LeaseReply, timeout_s=5)


@contextlib.asynccontextmanager
async def open_worker(cache: ServiceProcess) -> AsyncIterator[Worker]:
    bus = await connect(BusSettings(url=cache.env["FINBACK_NATS_URL"]))
    client = Client(bus, Subjects(cache.env["FINBACK_SUBJECT_PREFIX"]))
    session = ArenaSession(client, owner="prefill-a", owner_epoch=7, lease_ms=1500)
    try:
        assert await session.connect()
        yield Worker(client, session)
    finally:
        session.close()
        await bus.close()


def states(folder: Path) -> dict[SlotState, int]:
    counts = dict.fromkeys(SlotState, 0)
    for path in folder.glob("extent-*"):
        data = path.read_bytes()
        for index in range(parse_extent(data[:64], len(data)).num_slots):
            counts[read_slot(data, index).state] += 1
    return counts


async def until(found: Callable[[], bool], timeout_s: float = 10.0) -> None:
    with anyio.fail_after(timeout_s):
        while not found():  # noqa: ASYNC110 -- what is waited for is in another process
            await anyio.sleep(0.05)


@contextlib.contextmanager
def zombie(cache: ServiceProcess) -> "Iterator[subprocess.Popen[str]]":
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("zombie_writer.py"))],
        env={**os.environ, **cache.env, "PYTHONPATH": str(TESTS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def say(process: "subprocess.Popen[str]", line: str = "") -> str:
    assert process.stdin is not None and process.stdout is not None
    if line:
        process.stdin.write(line)
        process.stdin.flush()
    with anyio.fail_after(20):
        return (await anyio.to_thread.run_sync(process.stdout.readline)).strip()


async def test_a_stopped_writer_that_goes_on_overwrites_no_kept_block(
    cache: ServiceProcess,
) -> None:
    async with open_worker(cache) as worker:
        folder = worker.session.folder
        with zombie(cache) as writer:
            assert await say(writer) == "open 2"
            writer.send_signal(signal.SIGSTOP)
            # Whoever watches it may well think that it is dead.
            lost = InstanceLost(service="prefill", instance="prefill-z", epoch=3, reason="hangs")
            subjects = worker.client.subjects
            await worker.client.publish(subjects.event("supervisor", "instance-lost"), lost)
            await until(lambda: states(folder)[SlotState.QUARANTINED] == 2)
            names = ["z0", "z1", *(f"n{number}" for number in range(100))]
            for start in range(0, len(names), 6):
                await worker.keep(names[start : start + 6])
            assert states(folder)[SlotState.FREE] == 0, "no slot is left but the zombie's two"
            assert states(folder)[SlotState.QUARANTINED] == 2
            held = [name for name in names if await worker.read(name) is not None]
            assert len(held) > 30
            writer.send_signal(signal.SIGCONT)
            assert await say(writer, "commit\n") == "not_found"
            await anyio.sleep(0.3)  # it writes on all the while
            for name in held:
                assert await worker.read(name) == payload(name, BLOCK)
            await worker.keep(["z0"])
            assert await worker.read("z0") == payload("z0", BLOCK)
            cache.kill()
            cache.start()
            for name in held[-10:]:
                assert await worker.read(name) == payload(name, BLOCK)
        await until(lambda: states(folder)[SlotState.QUARANTINED] == 0)


async def test_kept_blocks_outlive_a_killed_cache_and_a_killed_writer(
    cache: ServiceProcess,
) -> None:
    async with open_worker(cache) as worker:
        assert await worker.keep(["a", "b"]) == 2
        with zombie(cache) as writer:
            assert await say(writer) == "open 2"
            cache.kill()
            cache.start()
            assert await worker.read("z0") is None
        await until(lambda: states(worker.session.folder)[SlotState.RESERVED] == 0)
        for name in ("a", "b"):
            assert await worker.read(name) == payload(name, BLOCK)
        assert await worker.keep(["z0", "z1"]) == 2
