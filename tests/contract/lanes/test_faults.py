"""What goes wrong between two lanes: each a miss within its time, never an answer, never a hang."""

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from finback.shared.actor.bus import Message
from finback.shared.actor.client import Client
from finback.shared.actor.envelope import error_headers
from finback.shared.actor.nats_bus import BusSettings, NatsBus, connect
from finback.shared.errors import NotFound, ServingError
from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.nats_lane import NatsLane
from finback.shared.lanes.session import ArenaSession
from finback.shared.lanes.ticket import Ticket
from finback.shared.wire import codec
from finback.shared.wire.messages.lane import FetchRequest
from finback.shared.wire.subjects import Subjects
from support.nats_server import NatsServer
from support.service_process import ServiceProcess

pytestmark = pytest.mark.nats

SUBJECT = "faults.v1.lane"
SIZE = 1_500_000
DATA = os.urandom(SIZE)

GIVER = f"""
import anyio, sys
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.lanes.nats_lane import NatsLane
from finback.shared.wire import codec

async def main():
    lane = NatsLane(await connect(BusSettings(url=sys.argv[1])), "{SUBJECT}")
    await lane.start()
    print(codec.encode(await lane.put(bytes({SIZE}))).hex(), flush=True)
    await anyio.sleep(60)

anyio.run(main)
"""


@contextlib.asynccontextmanager
async def lanes(
    server: NatsServer, *, timeout_s: float = 0.5
) -> AsyncIterator[tuple[NatsLane, NatsLane, NatsBus]]:
    """A giving and a taking side, and another connection."""
    bus = await connect(BusSettings(url=server.url))
    giver, taker = NatsLane(bus, SUBJECT), NatsLane(bus, timeout_s=timeout_s)
    await giver.start()
    try:
        yield giver, taker, bus
    finally:
        await giver.close()
        await taker.close()
        await bus.close()


def start_giver(server: NatsServer) -> "subprocess.Popen[str]":
    """Another process that offers zeros, and tells the ticket."""
    command = [sys.executable, "-c", GIVER, server.url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def test_a_stopped_giver_is_a_miss_within_its_time(nats_server: NatsServer) -> None:
    """Its TCP connection stays open: only a deadline tells."""
    process = start_giver(nats_server)
    bus = await connect(BusSettings(url=nats_server.url))
    taker, hasty = NatsLane(bus, timeout_s=10.0), NatsLane(bus, timeout_s=0.3)
    try:
        assert process.stdout is not None
        with anyio.fail_after(40):
            line = await to_thread.run_sync(process.stdout.readline, abandon_on_cancel=True)
        ticket = codec.decode(bytes.fromhex(line), Ticket)
        with anyio.fail_after(40):
            assert await taker.get(ticket) == bytes(SIZE)
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(CorruptData, match="unreachable"):
                await hasty.get(ticket)
            process.send_signal(signal.SIGCONT)
            assert await taker.get(ticket) == bytes(SIZE), "late pieces do no harm"
            process.kill()
            process.wait()
            with pytest.raises(CorruptData, match="unreachable"):
                await taker.get(ticket)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        for lane in (taker, hasty):
            await lane.close()
        await bus.close()


async def test_the_server_is_killed_under_a_get(tmp_path: Path) -> None:
    server = NatsServer(folder=tmp_path)
    server.start()
    async with lanes(server, timeout_s=3.0) as (giver, taker, _):
        ticket = await giver.put(DATA)
        assert await taker.get(ticket) == DATA
        server.kill()
        with anyio.fail_after(5), pytest.raises(CorruptData, match="unreachable"):
            await taker.get(ticket)
        server.start()
        with anyio.fail_after(10):
            while True:
                with contextlib.suppress(CorruptData):
                    assert await taker.get(ticket) == DATA
                    break
                await anyio.sleep(0.1)
    server.kill()


async def test_pieces_twice_late_and_in_any_order(nats_server: NatsServer) -> None:
    """A giver of our own that answers backwards, twice, and with strangers' pieces among them."""
    async with lanes(nats_server) as (giver, taker, bus):
        ticket = dataclasses.replace(await giver.put(DATA), location="faults.v1.odd")
        waiting: list[Message] = []
        tasks = []

        async def answer_all() -> None:
            for message in reversed(waiting):
                request = codec.decode(message.data, FetchRequest)
                piece = DATA[request.offset : request.offset + request.length]
                for _ in range(2):
                    await bus.publish(message.reply or "", piece)
                await bus.publish((message.reply or "") + "f", b"for nobody")
            waiting.clear()

        def asked(message: Message) -> None:
            waiting.append(message)
            if len(waiting) == 3:
                tasks.append(asyncio.create_task(answer_all()))

        await bus.subscribe("faults.v1.odd", asked)
        assert await taker.get(ticket) == DATA
        assert await taker.get(ticket) == DATA
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("wrong", ["short", "long", "other", "error", "silent"])
async def test_wrong_pieces(nats_server: NatsServer, wrong: str) -> None:
    async with lanes(nats_server, timeout_s=0.3) as (giver, taker, bus):
        ticket = dataclasses.replace(await giver.put(DATA), location="faults.v1.wrong")
        tasks = []

        def asked(message: Message) -> None:
            request = codec.decode(message.data, FetchRequest)
            piece = DATA[request.offset : request.offset + request.length]
            told = {"short": piece[:-1], "long": piece + b"x", "other": bytes(len(piece))}
            if wrong == "silent":
                return
            headers = error_headers(NotFound("no such offer")) if wrong == "error" else None
            body = told.get(wrong, b"")
            answer = bus.publish(message.reply or "", body, headers)
            tasks.append(asyncio.create_task(answer))

        await bus.subscribe("faults.v1.wrong", asked)
        with anyio.fail_after(5), pytest.raises(CorruptData):
            await taker.get(ticket)
        await asyncio.gather(*tasks)


async def test_a_get_that_is_cancelled_writes_no_more(nats_server: NatsServer) -> None:
    async with lanes(nats_server) as (giver, taker, _):
        ticket = await giver.put(DATA)
        out = memoryview(bytearray(SIZE))
        for delay_s in (0.0, 0.0005, 0.001, 0.002):
            with anyio.move_on_after(delay_s):
                await taker.get(ticket, out)
            out[:] = bytes(SIZE)
            await anyio.sleep(0.02)
            assert out == bytes(SIZE), "the buffer is the caller's again"
        assert await taker.get(ticket) == DATA


async def test_a_slow_consumer_loses_kv_and_nothing_else(tmp_path: Path) -> None:
    """A reader that does not read: the server drops it, the giver serves on, tokens flow."""
    server = NatsServer(folder=tmp_path, extra="max_pending: 9000000\nwrite_deadline: '500ms'")
    server.start()
    async with lanes(server, timeout_s=2.0) as (giver, taker, bus):
        ticket = await giver.put(DATA)
        heard: list[bytes] = []
        await bus.subscribe("faults.v1.tokens", lambda message: heard.append(message.data))
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # asyncio's own is a pair
        ask = codec.encode(FetchRequest(generation=ticket.generation, offset=0, length=512 * 1024))
        writer.write(b'CONNECT {"verbose":false}\r\nSUB deaf.* 1\r\n')
        for number in range(100):
            writer.write(f"PUB {SUBJECT} deaf.{number} {len(ask)}\r\n".encode() + ask + b"\r\n")
        for number in range(20):
            await bus.publish("faults.v1.tokens", str(number).encode())
            await anyio.sleep(0.01)
        with anyio.fail_after(10):
            assert await taker.get(ticket) == DATA
        await bus.flush()
        assert heard == [str(number).encode() for number in range(20)]
        writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
        with anyio.fail_after(10), contextlib.suppress(ConnectionError):
            num_bytes = 0
            while found := await reader.read(1 << 20):
                num_bytes += len(found)
            assert num_bytes < 100 * 512 * 1024, "the server had dropped it"
        writer.close()
    server.kill()


# -- the arena


@pytest.fixture
def cache(nats_server: NatsServer, tmp_path: Path, subject_prefix: str) -> Iterator[ServiceProcess]:
    process = ServiceProcess(
        "cache",
        {
            "FINBACK_NATS_URL": nats_server.url,
            "FINBACK_RUN_DIR": str(tmp_path / "run"),
            "FINBACK_SHM_DIR": str(tmp_path / "shm"),
            "FINBACK_STACK_ID": subject_prefix,
            "FINBACK_SUBJECT_PREFIX": subject_prefix,
            "FINBACK_ARENA_BYTES": str(16 << 20),
        },
    ).start()
    yield process
    process.kill()


@contextlib.asynccontextmanager
async def open_session(
    cache: ServiceProcess, lease_ms: int = 10_000
) -> AsyncIterator[ArenaSession]:
    bus = await connect(BusSettings(url=cache.env["FINBACK_NATS_URL"]))
    client = Client(bus, Subjects(cache.env["FINBACK_SUBJECT_PREFIX"]))
    session = ArenaSession(client, owner="prefill-a", owner_epoch=7, lease_ms=lease_ms)
    try:
        assert await session.connect()
        yield session
    finally:
        session.close()
        await bus.close()


async def commit(session: ArenaSession) -> tuple[str, Ticket]:
    lease = await session.reserve("r", 1, SIZE)
    ticket = session.writer.write(lease.slots[0], DATA)
    await session.commit_tickets(lease, lease.slots, [ticket])
    return lease.lease_id, ticket


async def test_a_truncated_extent_is_a_miss_and_kills_no_reader(cache: ServiceProcess) -> None:
    async with open_session(cache) as session:
        _, ticket = await commit(session)
        assert await session.reader.read(ticket) == DATA
        os.truncate(session.folder / ticket.location, ticket.offset + SIZE // 2)
        with pytest.raises(CorruptData, match="gone"):
            await session.reader.read(ticket)
        lease = await session.reserve("r", 1, SIZE)
        with pytest.raises(ValueError, match="truncated"):
            session.writer.view(lease.slots[0])
        os.truncate(session.folder / ticket.location, 0)
        with pytest.raises(CorruptData):
            await session.reader.read(ticket)


async def test_a_deleted_arena_folder(cache: ServiceProcess) -> None:
    """What is open can be read on; new blocks are refused or new, and a restarted cache goes on."""
    async with open_session(cache) as session:
        _, ticket = await commit(session)
        await session.reader.read(ticket)
        shutil.rmtree(session.folder)
        assert await session.reader.read(ticket) == DATA
        with contextlib.suppress(ServingError), anyio.fail_after(5):
            for _ in range(20):  # more than the extent had room for
                await session.reserve("r", 1, SIZE)
        cache.kill()
        cache.start()
        _, again = await commit(session)
        assert await session.reader.read(again) == DATA
        with pytest.raises(CorruptData):
            await session.reader.read(ticket)


async def test_a_ticket_of_an_older_generation_or_an_ended_lease(cache: ServiceProcess) -> None:
    async with open_session(cache, lease_ms=300) as session:
        lease_id, ticket = await commit(session)
        older = dataclasses.replace(ticket, generation=ticket.generation - 1)
        with pytest.raises(CorruptData, match="generation"):
            await session.reader.read(older)
        await session.release(lease_id)
        with pytest.raises(CorruptData, match="generation"):
            await session.reader.read(ticket)
        _, expired = await commit(session)
        with anyio.fail_after(10):
            while True:  # nobody renews it
                try:
                    assert await session.reader.read(expired) == DATA
                except CorruptData as error:
                    assert error.reason == "generation"
                    break
                await anyio.sleep(0.1)
