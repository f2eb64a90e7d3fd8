"""The cache as a process that is killed, and its writers too: nothing is lost, nothing leaks."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import psutil
import pytest

from finback.shared.actor.client import Client
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.errors import NotFound, ServingError, Unavailable
from finback.shared.lanes.arena_format import SlotState, parse_extent, read_slot
from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.session import ArenaSession, SlotLease
from finback.shared.lanes.ticket import Ticket
from finback.shared.wire import codec
from finback.shared.wire.headers import REQUEST_ID
from finback.shared.wire.messages.cache import ReserveRequest
from finback.shared.wire.messages.control import InstanceLost
from finback.shared.wire.subjects import Subjects
from support.nats_server import NatsServer
from support.service_process import ServiceProcess

pytestmark = pytest.mark.nats

BLOCK = 300_000
LEASE_MS = 1500


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


@contextlib.asynccontextmanager
async def open_session(
    cache: ServiceProcess, owner: str = "prefill-a"
) -> AsyncIterator[ArenaSession]:
    bus = await connect(BusSettings(url=cache.env["FINBACK_NATS_URL"], name=owner))
    client = Client(bus, Subjects(cache.env["FINBACK_SUBJECT_PREFIX"]))
    session = ArenaSession(client, owner=owner, owner_epoch=7, lease_ms=LEASE_MS)
    try:
        assert await session.connect()
        async with anyio.create_task_group() as group:
            group.start_soon(session.run)
            yield session
            group.cancel_scope.cancel()
    finally:
        session.close()
        await bus.close()


async def put(session: ArenaSession, byte: int, num_blocks: int = 1) -> tuple[SlotLease, Ticket]:
    """Reserve, fill the first block and commit it; its ticket. Lets go of what it cannot keep."""
    lease = await session.reserve("r", num_blocks, BLOCK)
    try:
        if not lease.slots:
            raise Unavailable("full")
        with session.writer.view(lease.slots[0]) as view:
            view[:] = bytes([byte]) * BLOCK
        (ticket,) = await session.commit(lease, [(lease.slots[0], BLOCK)])
    except BaseException:
        with anyio.CancelScope(shield=True):
            await session.release(lease.lease_id)
        raise
    return lease, ticket


def states(folder: Path) -> dict[SlotState, int]:
    """Slots by state, read from the files as anybody could."""
    counts = dict.fromkeys(SlotState, 0)
    for path in folder.glob("extent-*"):
        data = path.read_bytes()
        for index in range(parse_extent(data[:64], len(data)).num_slots):
            counts[read_slot(data, index).state] += 1
    return counts


async def until(found: Callable[[], bool], timeout_s: float = 8.0) -> None:
    with anyio.fail_after(timeout_s):
        while not found():  # noqa: ASYNC110 -- what is waited for is in another process
            await anyio.sleep(0.05)


async def test_a_killed_cache_keeps_tickets_and_leases(cache: ServiceProcess) -> None:
    async with open_session(cache) as session:
        committed, ticket = await put(session, 1)
        reserved = await session.reserve("r", 2, BLOCK)
        cache.kill()
        assert (await session.reader.read(ticket))[0] == 1, "readable while nobody serves"
        with pytest.raises(ServingError):
            await session.reserve("r", 1, BLOCK)
        cache.start()
        with session.writer.view(reserved.slots[0]) as view:
            view[:3] = b"abc"
        (late,) = await session.commit(reserved, [(reserved.slots[0], 3)])
        await anyio.sleep(2 * LEASE_MS / 1000)  # only renewals keep the leases that long
        assert (await session.reader.read(ticket))[0] == 1
        assert bytes(await session.reader.read(late)) == b"abc"
        await session.release(committed.lease_id, reserved.lease_id)
        counts = states(session.folder)
        assert counts.pop(SlotState.FREE) > 0
        assert not any(counts.values())
        for dead in (ticket, late):
            with pytest.raises(CorruptData):
                await session.reader.read(dead)


async def test_kills_at_random_moments_lose_and_leak_nothing(cache: ServiceProcess) -> None:
    async with open_session(cache) as session:
        held: list[tuple[SlotLease, Ticket, int]] = []
        num_put = 0
        for round_ in range(4):
            with anyio.move_on_after(0.05 + 0.07 * round_):
                while True:
                    num_put += 1
                    with contextlib.suppress(ServingError):
                        held.append((*await put(session, num_put % 256, 2), num_put % 256))
                    if len(held) > 10:
                        await session.release(held.pop(0)[0].lease_id)
                    await anyio.lowlevel.checkpoint()
            cache.kill()
            cache.start()
            for _, ticket, byte in held:
                assert await session.reader.read(ticket) == bytes([byte]) * BLOCK
        assert num_put > 40
        await session.release(*(lease.lease_id for lease, _, _ in held))
        await until(lambda: sum(states(session.folder).values()) == _free(session.folder))


async def test_a_killed_writer_gives_its_slots_back(cache: ServiceProcess) -> None:
    async with open_session(cache, "decode-b") as session:
        writer = await _start_writer(cache)
        assert states(session.folder)[SlotState.RESERVED] == 3
        writer.kill()
        writer.wait()
        await until(lambda: sum(states(session.folder).values()) == _free(session.folder))


async def test_a_stopped_writers_slots_are_given_to_nobody(cache: ServiceProcess) -> None:
    async with open_session(cache, "decode-b") as session:
        writer = await _start_writer(cache)
        writer.send_signal(signal.SIGSTOP)
        try:
            await until(lambda: states(session.folder)[SlotState.QUARANTINED] == 3)
            await anyio.sleep(4)  # longer than any registry entry would have lived
            assert states(session.folder)[SlotState.QUARANTINED] == 3
        finally:
            writer.kill()
            writer.wait()
        await until(lambda: sum(states(session.folder).values()) == _free(session.folder))


async def test_the_supervisors_word_frees_at_once(cache: ServiceProcess) -> None:
    async with open_session(cache) as session:
        await session.reserve("r", 3, BLOCK)
        lost = InstanceLost(service="prefill", instance="prefill-a", epoch=7, reason="SIGKILL")
        subject = Subjects(cache.env["FINBACK_SUBJECT_PREFIX"]).event("supervisor", "instance-lost")
        bus = await connect(BusSettings(url=cache.env["FINBACK_NATS_URL"]))
        await Client(bus, Subjects()).publish(subject, lost)
        await until(lambda: states(session.folder)[SlotState.RESERVED] == 0, timeout_s=0.5)
        await bus.close()


async def test_a_reservation_is_in_the_trace(cache: ServiceProcess, tmp_path: Path) -> None:
    bus = await connect(BusSettings(url=cache.env["FINBACK_NATS_URL"]))
    subjects = Subjects(cache.env["FINBACK_SUBJECT_PREFIX"])
    request = ReserveRequest(
        request_id="r", owner="prefill-a", owner_epoch=1, num_blocks=1, block_bytes=BLOCK
    )
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", REQUEST_ID: "r"}
    await bus.request(
        subjects.service("cache", "reserve"), codec.encode(request), headers, timeout_s=5
    )
    cache.stop()
    spans = "".join(path.read_text() for path in (tmp_path / "traces").glob("cache-*"))
    assert "cache reserve" in spans and trace_id in spans
    await bus.close()


def test_a_second_cache_on_the_same_arena_says_so(cache: ServiceProcess) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "finback.services.cache"],
        env={**os.environ, **cache.env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    last = second.stderr.strip().splitlines()[-1]
    assert second.returncode == 2
    assert "another cache process holds the arena" in last


async def test_an_expired_lease_is_told(cache: ServiceProcess) -> None:
    async with open_session(cache) as session:
        lease, ticket = await put(session, 9)
        session.forget_all()  # as if this process had been stopped for a while
        await anyio.sleep(LEASE_MS / 1000 + 1.5)
        with pytest.raises(NotFound):
            await session.commit(lease, [(lease.slots[0], BLOCK)])
        with pytest.raises(CorruptData, match="generation"):
            await session.reader.read(ticket)


def test_it_is_small_and_starts_quickly(cache: ServiceProcess) -> None:
    assert psutil.Process(cache.pid).memory_full_info().pss < 120 * 2**20
    assert cache.start_s < 5  # a loaded machine; about 0.4 s on an idle one
    assert cache.stop() == 0


def test_other_stacks_are_left_alone(cache: ServiceProcess, tmp_path: Path) -> None:
    other = tmp_path / "shm" / "another-stack"
    other.mkdir()
    (other / "extent-00000000aa").write_bytes(b"not ours")
    cache.kill()
    cache.start()
    assert (other / "extent-00000000aa").read_bytes() == b"not ours"


def _free(folder: Path) -> int:
    return states(folder)[SlotState.FREE]


async def _start_writer(cache: ServiceProcess) -> "subprocess.Popen[bytes]":
    """A process that reserves three slots, never commits, and renews for ever."""
    writer = subprocess.Popen(  # noqa: ASYNC220 -- a few milliseconds, in a test
        [sys.executable, str(Path(__file__).with_name("stuck_writer.py"))],
        env={**os.environ, **cache.env},
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None
    assert await anyio.to_thread.run_sync(writer.stdout.readline) == b"reserved 3\n"
    writer.stdout.close()
    return writer
