"""What every lane must do, over real parts: a NATS server, a cache process, two connections."""

import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from finback.shared.actor.client import Client
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.errors import Overloaded, PayloadTooLarge
from finback.shared.lanes import nats_lane
from finback.shared.lanes.base import CorruptData, Lane
from finback.shared.lanes.inline import InlineLane
from finback.shared.lanes.nats_lane import NatsLane
from finback.shared.lanes.select import LaneSet
from finback.shared.lanes.session import ArenaSession
from finback.shared.lanes.shm_lane import ShmLane
from finback.shared.lanes.ticket import Ticket
from finback.shared.wire.subjects import Subjects
from support.nats_server import NatsServer
from support.service_process import ServiceProcess

pytestmark = pytest.mark.nats

# `nats-bus`: lane `nats` as over TLS, where it must use a bus as it is.
KINDS = ("inline", "shm", "nats", "nats-bus")
SIZES = (0, 1, 4096, 60_000, 300_000, 1_500_001)


@pytest.fixture(scope="module")
def cache(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subjects]:
    """A cache process; the subjects that reach it."""
    folder = tmp_path_factory.mktemp("cache")
    process = ServiceProcess(
        "cache",
        {
            "FINBACK_NATS_URL": nats_server.url,
            "FINBACK_RUN_DIR": str(folder),
            "FINBACK_SHM_DIR": str(folder / "shm"),
            "FINBACK_SUBJECT_PREFIX": "lanes",
            "FINBACK_STACK_ID": "lanes",
            "FINBACK_ARENA_BYTES": str(64 << 20),
        },
    ).start()
    yield Subjects("lanes")
    process.stop()


@contextlib.asynccontextmanager
async def open_lane(kind: str, url: str, subjects: Subjects, name: str) -> AsyncIterator[Lane]:
    """One side of a lane, on a connection of its own."""
    if kind == "inline":
        yield InlineLane()
        return
    bus = await connect(BusSettings(url=url, name=name))
    try:
        if kind == "shm":
            session = ArenaSession(Client(bus, subjects), owner=name, owner_epoch=1)
            assert await session.connect()
            shm = ShmLane(session)
            yield shm
            await shm.close()
            session.close()
            return
        with pytest.MonkeyPatch.context() as patch:
            if kind == "nats-bus":
                patch.setattr(nats_lane, "is_plain", lambda settings: False)
            lane = NatsLane(bus, subjects.instance("prefill", name, "fetch"))
        await lane.start()
        yield lane
        await lane.close()
    finally:
        await bus.close()


@contextlib.asynccontextmanager
async def open_pair(
    kind: str, server: NatsServer, subjects: Subjects
) -> AsyncIterator[tuple[Lane, Lane]]:
    """The putting and the getting side."""
    async with (
        open_lane(kind, server.url, subjects, "prefill-a") as sender,
        open_lane(kind, server.url, subjects, "decode-b") as reader,
    ):
        yield sender, reader


@pytest.mark.parametrize("kind", KINDS)
async def test_bytes_come_out_equal(kind: str, nats_server: NatsServer, cache: Subjects) -> None:
    async with open_pair(kind, nats_server, cache) as (sender, reader):
        for size in SIZES:
            if kind == "inline" and size > 64 * 1024:
                continue
            data = os.urandom(size)
            buffer = bytearray(data)
            ticket = await sender.put(memoryview(buffer))
            buffer[:] = bytes(size)  # the lane keeps a copy
            assert (ticket.kind, ticket.length) == (kind.removesuffix("-bus"), size)
            assert await reader.get(ticket) == data
            out = memoryview(bytearray(size + 10))
            assert await reader.get(ticket, out) == data
            assert out[size:] == bytes(10), "nothing is written past the end"
            await sender.release(ticket)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_short_buffer_is_refused(
    kind: str, nats_server: NatsServer, cache: Subjects
) -> None:
    async with open_pair(kind, nats_server, cache) as (sender, reader):
        ticket = await sender.put(b"abcdef")
        with pytest.raises(ValueError, match="out has 3"):
            await reader.get(ticket, memoryview(bytearray(3)))


@pytest.mark.parametrize("kind", ["shm", "nats", "nats-bus"])
async def test_what_was_released_is_a_miss(
    kind: str, nats_server: NatsServer, cache: Subjects
) -> None:
    async with open_pair(kind, nats_server, cache) as (sender, reader):
        ticket = await sender.put(b"x" * 5000)
        await sender.release(ticket)
        await sender.release(ticket)
        again = await sender.put(b"y" * 5000)
        with pytest.raises(CorruptData):
            await reader.get(ticket)
        assert await reader.get(again) == b"y" * 5000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        {"checksum": b"0" * 16},
        {"checksum": b""},
        {"length": 4999},
        {"length": 5001},
        {"length": -1},
        {"length": 1 << 50},
        {"location": "../../etc/passwd"},
        {"location": "nobody.listens.here"},
        {"location": "a.b 1\r\nSUB > 9\r\nPUB c"},
        {"offset": 7},
        {"generation": 99},
        {"kind": "carrier-pigeon"},
        {"payload": b"z" * 5000},
    ],
)
async def test_a_wrong_ticket_is_a_miss_and_never_an_answer(
    kind: str, change: dict[str, object], nats_server: NatsServer, cache: Subjects
) -> None:
    async with open_pair(kind, nats_server, cache) as (sender, reader):
        ticket = await sender.put(b"x" * 5000)
        wrong = dataclasses.replace(ticket, **change)  # type: ignore[arg-type]  # a row of bad values
        with contextlib.suppress(CorruptData):
            assert await reader.get(wrong) == b"x" * 5000, "a field that this lane does not use"


@pytest.mark.parametrize("kind", KINDS)
async def test_many_at_once(kind: str, nats_server: NatsServer, cache: Subjects) -> None:
    async with open_pair(kind, nats_server, cache) as (sender, reader):

        async def one(index: int) -> None:
            data = bytes([index]) * (50_000 + index)
            ticket = await sender.put(data)
            assert await reader.get(ticket) == data
            await sender.release(ticket)

        async with anyio.create_task_group() as group:
            for index in range(20):
                group.start_soon(one, index)


async def test_inline_refuses_what_no_message_should_hold() -> None:
    with pytest.raises(PayloadTooLarge):
        await InlineLane().put(bytes(64 * 1024 + 1))


async def test_a_flipped_bit_in_the_arena_is_found(
    nats_server: NatsServer, cache: Subjects
) -> None:
    async with open_pair("shm", nats_server, cache) as (sender, reader):
        assert isinstance(sender, ShmLane)
        ticket = await sender.put(b"x" * 400_000)
        _overwrite(sender.session.folder / ticket.location, ticket.offset + 399_999)
        with pytest.raises(CorruptData, match="checksum"):
            await reader.get(ticket)


async def test_a_nats_offer_expires_and_is_bounded(nats_server: NatsServer) -> None:
    bus = await connect(BusSettings(url=nats_server.url))
    subject = Subjects("lanes").instance("prefill", "prefill-x", "fetch")
    lane = NatsLane(bus, subject, expiry_s=0.2, max_offered_bytes=1000)
    await lane.start()
    ticket = await lane.put(b"x" * 600)
    with pytest.raises(Overloaded):
        await lane.put(b"x" * 600)
    await anyio.sleep(0.5)
    assert lane.num_offered_bytes == 0, "dropped without anybody asking"
    with pytest.raises(CorruptData, match="gone"):
        await lane.get(ticket)
    await lane.close()
    with pytest.raises(CorruptData, match="unreachable"):
        await lane.get(ticket)
    await bus.close()


async def test_nats_pieces_are_small(nats_server: NatsServer) -> None:
    """Tokens on another connection are never behind more than a piece."""
    bus = await connect(BusSettings(url=nats_server.url))
    lane = NatsLane(bus, Subjects("lanes").instance("prefill", "prefill-y", "fetch"))
    await lane.start()
    spy = await connect(BusSettings(url=nats_server.url))
    sizes: list[int] = []
    await spy.subscribe("_INBOX.>", lambda message: sizes.append(len(message.data)))
    ticket = await lane.put(os.urandom(2_000_000))
    await lane.get(ticket)
    await spy.flush()
    assert sum(sizes) >= 2_000_000
    assert max(sizes) <= nats_lane.CHUNK_BYTES
    await lane.close()
    await bus.close()
    await spy.close()


async def test_a_lane_set_picks_by_kind(nats_server: NatsServer, cache: Subjects) -> None:
    async with open_pair("shm", nats_server, cache) as (sender, reader):
        lanes = LaneSet([InlineLane(), reader])
        inline = await InlineLane().put(b"small")
        assert bytes(await lanes.get(inline)) == b"small"
        assert bytes(await lanes.get(await sender.put(b"large"))) == b"large"
        with pytest.raises(CorruptData, match="unreachable"):
            await lanes.get(Ticket(kind="nats", location="a", length=1))


def _overwrite(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"y")
