"""What goes wrong with a cache's disks, files and clocks: a miss, a line in the log, a metric, and on.

Nothing here is simulated: the file size limit of the process stands for a full disk (it is heard of
by the same calls, at any user's), folders are removed, files cut, and the wall clock is moved.
"""

import contextlib
import json
import os
import resource
import shutil
import sqlite3
import stat
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from finback.services.cache import file_tier, tier_health
from finback.services.cache.service import CacheService
from finback.shared.errors import Unavailable
from finback.shared.lanes.arena_format import MAGIC
from finback.shared.lanes.shm import ArenaReader
from finback.shared.wire.messages.cache_admin import EvictReply, EvictRequest
from finback.shared.wire.messages.cache_store import LookupReply, LookupRequest
from support.cache_asker import Asker, open_asker, settings
from support.cache_files import files, ready, until
from support.kv_store import SALT, joined, payload
from support.local_service import serving

NAMES = [*"abcdefgh"]
DAY = 86_400.0


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_health, "REST_S", (0.05, 0.1))
    monkeypatch.setattr(file_tier, "_UPKEEP_EVERY_S", 0.05)
    monkeypatch.setattr("finback.services.cache.service.TICK_S", 0.05)
    monkeypatch.setattr("finback.services.cache.segments.appending.BACK_OFF_S", 0.05)


@contextlib.asynccontextmanager
async def asking(tmp_path: Path, **more: Any) -> AsyncIterator[Asker]:
    """A cache with a file tier that is open."""
    async with open_asker(tmp_path, **files(tmp_path, **more)) as asker:
        await ready(asker)
        yield asker


def metric(asker: Asker, name: str, **labels: str) -> float:
    return asker.service.metrics.value(f"finback.cache.{name}", **labels)


async def only_in_files(asker: Asker, names: list[str] = NAMES) -> None:
    """Stored, written, and gone from memory."""
    await asker.keep(names)
    await until(lambda: metric(asker, "write_backs", outcome="written") >= len(names))
    await drop_memory(asker)


async def drop_memory(asker: Asker) -> None:
    await asker.ask("evict", EvictRequest(), EvictReply)


async def check(asker: Asker, names: list[str] = NAMES) -> None:
    assert await asker.bytes_of(names) == ([payload(name) for name in names], "")


def overwrite(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


class Said:
    """The service's log lines, as they stand in stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._lines: list[dict[str, Any]] = []

    def has(self, event: str) -> bool:
        """Whether a line begins so."""
        for line in self._capsys.readouterr().err.splitlines():
            with contextlib.suppress(ValueError):
                self._lines.append(json.loads(line))
        return any(str(line.get("event", "")).startswith(event) for line in self._lines)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(capsys)


@contextlib.contextmanager
def no_file_grows_beyond(num_bytes: int) -> Iterator[None]:
    """Writes of this process fail as they do on a full disk (Python ignores the signal)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody writes below it: by its mode, or for root, whom that does not stop, by a mount."""
    if os.geteuid():
        folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
        for path in folders:
            path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        yield
        for path in folders:
            path.chmod(stat.S_IRWXU)
        return
    for command in (["mount", "--bind"], ["mount", "-o", "remount,ro,bind"]):
        found = subprocess.run([*command, folder, folder], capture_output=True, check=False)
        if found.returncode:
            pytest.skip("root may not mount here, and modes do not stop root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


# -- disks


async def test_a_full_disk_costs_what_is_not_written(tmp_path: Path, said: Said) -> None:
    async with asking(tmp_path) as asker:
        await only_in_files(asker, ["x"])
        with no_file_grows_beyond(4096):
            await asker.keep(NAMES)
            await until(lambda: metric(asker, "files_refused", reason="disk_full"))
            await until(lambda: asker.service._blocks.num_waiting_writes == 0)
            await check(asker)  # from memory
            await until(lambda: said.has("the file tier's disk is full"))
            await drop_memory(asker)
            assert await asker.bytes_of(NAMES) == ([], "evicted")
            await check(asker, ["x"])  # what was written is read
        await anyio.sleep(0.3)  # it does not try at once
        await asker.keep(NAMES)
        await until(lambda: metric(asker, "write_backs", outcome="written") > len(NAMES))
        await drop_memory(asker)
        await check(asker)
        assert asker.service.arena.counts().num_leases == 0


async def test_a_full_shared_memory_costs_what_is_not_kept(tmp_path: Path) -> None:
    async with open_asker(tmp_path) as asker:
        with no_file_grows_beyond(8192):
            reply = await asker.store(NAMES)
            assert reply.slots == ()
            await asker.release(reply.lease_id)
            assert await asker.bytes_of(NAMES) == ([], "absent")
        assert metric(asker, "slots", outcome="stored") == 0
        await asker.keep(NAMES)
        await check(asker)
        assert not list(asker.folder.glob(".new-extent*"))


async def test_a_folder_that_may_only_be_read(tmp_path: Path, said: Said) -> None:
    async with asking(tmp_path) as asker:
        await only_in_files(asker)
    shutil.rmtree(tmp_path / "shm")
    with read_only(tmp_path / "files"):
        async with asking(tmp_path) as asker:
            assert said.has("the file tier cannot be written; it is only read")
            await check(asker)
            await asker.keep(["x"])
            await until(lambda: metric(asker, "files_refused", reason="read_only"))
            await check(asker, ["x"])
            assert asker.service._tier.health.state == "on"


async def test_a_folder_that_is_removed_is_made_again(tmp_path: Path, said: Said) -> None:
    async with asking(tmp_path) as asker:
        await only_in_files(asker)
        shutil.rmtree(tmp_path / "files")
        await until(lambda: said.has("the folder of the file tier is gone"))
        await until(lambda: asker.service._tier.health.state == "on")
        assert (await asker.lookup(NAMES)).num_found == 0
        assert (await asker.bytes_of(NAMES))[0] == []
        before = metric(asker, "write_backs", outcome="written")
        await asker.keep(NAMES)
        await until(lambda: metric(asker, "write_backs", outcome="written") == before + 8)
        await drop_memory(asker)
        await check(asker)
    async with asking(tmp_path) as asker:
        await until(lambda: any(asker.service._tier.names()))
        await check(asker)


# -- segments and their index


@pytest.mark.parametrize("where", ["payload", "end", "header"])
async def test_a_segment_that_is_damaged_or_cut_under_a_running_cache(
    tmp_path: Path, said: Said, where: str
) -> None:
    async with asking(tmp_path) as asker:
        await only_in_files(asker)
        (path,) = (tmp_path / "files").rglob("seg-*")
        at = path.read_bytes().index(payload("d")[:64])
        if where == "end":
            os.truncate(path, at)
        else:
            overwrite(path, at + 100 if where == "payload" else at - 4096 + 40, b"damaged!")
        copies, miss = await asker.bytes_of(NAMES)
        assert copies == [payload(name) for name in "abc"]
        assert miss == "corrupt"
        assert said.has("a block of the file tier is let go")
        assert metric(asker, "files_misses", reason="corrupt") >= 1
        names = [*"defgh"] if where == "end" else ["d"]
        await asker.keep(names)
        await check(asker)


async def test_what_another_model_computed_is_not_found(tmp_path: Path) -> None:
    """Not even if the index points there: a record says whose it is."""
    async with asking(tmp_path) as asker:
        await only_in_files(asker)
        other = LookupRequest(salt="00" * 16, hashes=joined(NAMES))
        assert await asker.ask("lookup", other, LookupReply) == LookupReply(num_found=0, num_host=0)
        reply, _ = await asker.read(NAMES, salt="00" * 16)
        assert (reply.tickets, reply.miss) == ((), "absent")
    shutil.rmtree(tmp_path / "shm")
    (path,) = (tmp_path / "files").rglob("index.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as index, index:
        index.execute("UPDATE names SET text = ? WHERE text = ?", ("00" * 16, SALT))
    async with asking(tmp_path) as asker:
        await until(lambda: any(asker.service._tier.names()))
        reply, lease_id = await asker.read(NAMES, salt="00" * 16, wait_ms=5000)
        assert (reply.tickets, reply.miss) == ((), "absent")
        await asker.release(lease_id)
        assert metric(asker, "files_misses", reason="absent") >= 1


@pytest.mark.parametrize("how", ["removed", "rubbish"])
async def test_an_index_that_is_lost_is_made_from_the_segments(
    tmp_path: Path, said: Said, how: str
) -> None:
    async with asking(tmp_path) as asker:
        await only_in_files(asker)
    shutil.rmtree(tmp_path / "shm")
    for path in (tmp_path / "files").rglob("index.sqlite*"):
        if how == "removed":
            path.unlink()
        else:
            path.write_bytes(os.urandom(path.stat().st_size))
    async with asking(tmp_path) as asker:
        await until(lambda: any(asker.service._tier.names()))
        await check(asker)
        if how == "rubbish":
            assert said.has("the index of the file tier is built again")
            assert metric(asker, "files_index_rebuilt") == 1


# -- the arena


@pytest.mark.parametrize("what", ["folder", "extent", "end"])
async def test_a_cache_whose_arena_is_taken_away_ends_and_the_next_goes_on(
    tmp_path: Path, said: Said, what: str
) -> None:
    asker: Asker | None = None
    with pytest.RaisesGroup(pytest.RaisesExc(Unavailable, match="arena"), flatten_subgroups=True):
        async with serving(CacheService, config=settings(tmp_path)) as service:
            asker = Asker(service)
            await asker.keep(NAMES)
            reader = ArenaReader(asker.folder)
            reply, _ = await asker.read(NAMES)
            assert bytes(await reader.read(reply.tickets[0])) == payload("a")
            (extent,) = asker.folder.glob("extent-*")
            if what == "folder":
                shutil.rmtree(asker.folder)
            elif what == "extent":
                extent.unlink()
            else:
                os.truncate(extent, extent.stat().st_size - 4096)
            await anyio.sleep(60)
    assert asker is not None
    assert said.has("the arena's files are gone")
    assert metric(asker, "arena_lost") == 1
    assert bytes(await reader.read(reply.tickets[1])) == payload("b")  # it is still mapped
    reader.close()
    asker.service.arena.close()  # as the process's end does
    async with open_asker(tmp_path) as asker:
        assert await asker.bytes_of(NAMES) == ([], "absent")
        await asker.keep(NAMES)
        await check(asker)


async def test_an_arena_of_an_older_layout_is_begun_anew(tmp_path: Path, said: Said) -> None:
    async with open_asker(tmp_path) as asker:
        await asker.keep(NAMES)
        folder = asker.folder
    for path in folder.glob("extent-*"):
        assert path.read_bytes()[: len(MAGIC)] == MAGIC
        overwrite(path, 0, b"FINBKAR1")
    async with open_asker(tmp_path) as asker:
        assert said.has("arena files that cannot be used are removed")
        assert metric(asker, "arena_files_removed") == 1
        assert await asker.bytes_of(NAMES) == ([], "absent")
        await asker.keep(NAMES)
        await check(asker)


# -- time


@pytest.mark.parametrize("jump_s", [-400 * DAY, -2 * DAY, 2 * DAY, 400 * DAY])
async def test_a_clock_that_jumps_loses_nothing(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    real = time.time
    async with asking(tmp_path) as asker:
        await only_in_files(asker)
        await asker.keep(["s"], kind="state")
        await asker.keep(["m"])
        _, lease_id = await asker.read(["m"])
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        await until(lambda: said.has("the wall clock jumped"))
        await asker.keep(["n"])
        await anyio.sleep(0.2)  # some sweeps of both tiers
        await check(asker)
        await check(asker, ["m", "n"])
        found, state_lease = await asker.read(["s"], kind="state")
        assert len(found.tickets) == 1
        await asker.release(state_lease)
        await asker.release(lease_id)
        monkeypatch.setattr(time, "time", real)
        await anyio.sleep(0.2)
        await check(asker, ["m", "n"])
        await check(asker)
