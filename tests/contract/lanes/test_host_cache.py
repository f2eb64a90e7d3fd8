"""Several caches on one bus: a session speaks to the one whose memory it can see."""

import contextlib
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from finback.shared.actor.client import Client
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.errors import ServingError
from finback.shared.lanes.host_cache import find_host_cache
from finback.shared.lanes.probe import PROBE_NAME
from finback.shared.lanes.session import ArenaSession
from finback.shared.wire.subjects import Subjects
from support.nats_server import NatsServer
from support.service_process import ServiceProcess

pytestmark = pytest.mark.nats


def cache_in(folder: Path, server: NatsServer, prefix: str, name: str) -> ServiceProcess:
    return ServiceProcess(
        "cache",
        {
            "FINBACK_NATS_URL": server.url,
            "FINBACK_RUN_DIR": str(folder / name),
            "FINBACK_SHM_DIR": str(folder / name / "shm"),
            "FINBACK_STACK_ID": prefix,
            "FINBACK_SUBJECT_PREFIX": prefix,
            "FINBACK_ARENA_BYTES": str(16 << 20),
            "FINBACK_INSTANCE": name,
        },
    ).start()


@pytest.fixture
def two(nats_server: NatsServer, tmp_path: Path, subject_prefix: str) -> Iterator[Path]:
    """`cache-far` and `cache-near`; the first one's nonce is hidden, as if it were elsewhere."""
    processes = [
        cache_in(tmp_path, nats_server, subject_prefix, name)
        for name in ("cache-far", "cache-near")
    ]
    (tmp_path / "cache-far" / "shm" / subject_prefix / PROBE_NAME).write_text("another host's")
    yield tmp_path
    for process in processes:
        process.kill()


@contextlib.asynccontextmanager
async def open_client(server: NatsServer, prefix: str) -> AsyncIterator[Client]:
    bus = await connect(BusSettings(url=server.url))
    try:
        yield Client(bus, Subjects(prefix))
    finally:
        await bus.close()


async def test_the_cache_of_this_host_is_found_among_others(
    two: Path, nats_server: NatsServer, subject_prefix: str
) -> None:
    def names() -> list[str]:
        return ["cache-gone", "cache-far", "cache-near"]

    async with open_client(nats_server, subject_prefix) as client:
        session = ArenaSession(client, owner="prefill-a", owner_epoch=1, cache_names=names)
        assert session.cache_instance == ""
        assert await session.connect()
        assert session.cache_instance == "cache-near"
        assert session.folder == two / "cache-near" / "shm" / subject_prefix
        for number in range(8):  # the queue group would have asked the other one half the time
            lease = await session.reserve(f"r{number}", 1, 5000)
            assert (session.folder / lease.slots[0].location).exists()
            await session.release(lease.lease_id)
        session.close()
        far = await find_host_cache(client, lambda: ["cache-far"])
        assert far is None or far.instance == "cache-near", "only the bus can have picked it"


async def test_a_cache_that_comes_back_under_another_name_is_found_again(
    nats_server: NatsServer, tmp_path: Path, subject_prefix: str
) -> None:
    cache = cache_in(tmp_path, nats_server, subject_prefix, "cache-first")
    async with open_client(nats_server, subject_prefix) as client:
        session = ArenaSession(client, owner="prefill-a", owner_epoch=1)
        assert await session.connect()
        lease = await session.reserve("r", 1, 5000)
        cache.kill()
        with pytest.raises(ServingError):
            await session.reserve("r", 1, 5000)
        cache.env = {**cache.env, "FINBACK_INSTANCE": "cache-second"}
        cache.start()
        with session.writer.view(lease.slots[0]) as view:
            view[:3] = b"abc"
        (ticket,) = await session.commit(lease, [(lease.slots[0], 3)])
        assert session.cache_instance == "cache-second"
        assert bytes(await session.reader.read(ticket)) == b"abc"
        session.close()
    cache.kill()


async def test_an_arena_made_anew_ends_the_leases_of_the_old_one(
    nats_server: NatsServer, tmp_path: Path, subject_prefix: str
) -> None:
    cache = cache_in(tmp_path, nats_server, subject_prefix, "cache-one")
    async with open_client(nats_server, subject_prefix) as client:
        session = ArenaSession(client, owner="prefill-a", owner_epoch=1)
        assert await session.connect()
        old = await session.reserve("r", 1, 5000)
        cache.kill()
        shutil.rmtree(tmp_path / "cache-one" / "shm")
        cache.start()
        new = await session.reserve("r", 1, 5000)
        assert session.is_lost(old.lease_id)
        assert not session.is_lost(new.lease_id)
        assert (session.folder / new.slots[0].location).exists()
        with pytest.raises(OSError, match=old.slots[0].location):
            session.writer.view(old.slots[0])
        session.close()
    cache.kill()
