"""The arena on real files: growth, the bound, restarts, damage, dead writers."""

import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from finback.services.cache.arena import UNKNOWN_OWNER_GRACE_S, Arena
from finback.services.cache.arena_files import ArenaFiles
from finback.shared.errors import ConfigError, InvalidRequest, InvariantViolated
from finback.shared.lanes.arena_format import SlotState, table_offset
from finback.shared.lanes.base import checksum
from finback.shared.lanes.probe import PROBE_NAME, WriterLock, probe
from finback.shared.lanes.shm import ArenaReader, ArenaWriter, make_ticket
from finback.shared.lanes.ticket import Ticket
from finback.shared.wire.messages.cache import CommitRequest, ReserveReply, ReserveRequest

BLOCK = 100_000
EXTENT = 1 << 20


def open_arena(folder: Path, max_bytes: int = 4 * EXTENT, now_s: float = 0.0) -> Arena:
    return Arena(ArenaFiles(folder, max_bytes=max_bytes, extent_bytes=EXTENT), now_s=now_s)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shm" / "stack"


@pytest.fixture
def arena(folder: Path) -> Iterator[Arena]:
    arena = open_arena(folder)
    yield arena
    arena.close()


def reserve(arena: Arena, num_blocks: int = 1, block_bytes: int = BLOCK) -> ReserveReply:
    request = ReserveRequest(
        request_id="r",
        owner="prefill-a",
        owner_epoch=5,
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        lease_id=secrets.token_hex(16),
    )
    return arena.reserve(request, 0.0)


def fill(arena: Arena, reply: ReserveReply, data: bytes) -> list[Ticket]:
    writer = ArenaWriter(arena.folder)
    tickets = [writer.write(slot, data) for slot in reply.slots]
    arena.commit(
        CommitRequest(
            lease_id=reply.lease_id,
            slot_ids=tuple(slot.slot_id for slot in reply.slots),
            checksums=tuple(ticket.checksum for ticket in tickets),
            lengths=tuple(ticket.length for ticket in tickets),
        ),
        0.0,
    )
    writer.close()
    return tickets


def never(owner: str, epoch: int) -> bool:
    return False


def test_files_are_private(arena: Arena) -> None:
    reserve(arena)
    assert arena.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in arena.folder.iterdir()} == {0o600}


def test_blocks_come_back_and_a_released_one_is_a_miss(arena: Arena) -> None:
    reply = reserve(arena, 3)
    tickets = fill(arena, reply, b"k" * BLOCK)
    reader = ArenaReader(arena.folder)
    assert [reader.read_now(ticket) for ticket in tickets] == [b"k" * BLOCK] * 3
    arena.check_integrity()
    assert arena.release((reply.lease_id,)) == [reply.lease_id]
    for ticket in tickets:
        with pytest.raises(Exception, match="generation"):
            reader.read_now(ticket)
    reader.close()


def test_the_bound_holds_and_a_full_arena_gives_fewer(arena: Arena) -> None:
    reply = reserve(arena, 100)
    assert 0 < len(reply.slots) < 100
    assert arena.num_bytes <= 4 * EXTENT
    assert reserve(arena).slots == ()
    arena.release((reply.lease_id,))
    assert len(reserve(arena, 100).slots) == len(reply.slots)


def test_idle_extents_make_room_for_another_size(arena: Arena) -> None:
    first = reserve(arena, 100)
    arena.release((first.lease_id,))
    assert len(reserve(arena, 2, block_bytes=3 * BLOCK).slots) == 2
    assert arena.num_bytes <= 4 * EXTENT
    arena.check_integrity()


def test_a_block_above_the_extent_size_gets_its_own_extent(arena: Arena) -> None:
    assert len(reserve(arena, 1, block_bytes=2 * EXTENT).slots) == 1
    assert reserve(arena, 1, block_bytes=5 * EXTENT).slots == ()


def test_a_full_file_system_gives_fewer_slots(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.posix_fallocate

    def small_disk(descriptor: int, offset: int, length: int) -> None:
        used = sum(path.stat().st_size for path in arena.folder.glob("extent-*"))
        if used + length > 600_000:
            raise OSError(errno.ENOSPC, "no space left")
        real(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", small_disk)
    num_slots = len(reserve(arena, 10).slots)
    assert 2 <= num_slots <= 6
    assert not list(arena.folder.glob(".new-*"))
    arena.check_integrity()


def test_a_restart_keeps_tickets_and_leases(folder: Path) -> None:
    arena = open_arena(folder)
    kept, half = reserve(arena, 2), reserve(arena, 1)
    tickets = fill(arena, kept, b"v" * 777)
    arena.close()
    again = open_arena(folder, now_s=100.0)
    again.check_integrity()
    assert again.num_adopted == 3
    assert again.renew((kept.lease_id, half.lease_id), 105.0) == [kept.lease_id, half.lease_id]
    reader = ArenaReader(folder)
    assert reader.read_now(tickets[1]) == b"v" * 777
    again.expire(200.0, never)
    assert again.counts().num_free == again.counts().num_free
    assert again.counts().num_leases == 0
    assert again.counts().num_reserved == again.counts().num_committed == 0
    reader.close()
    again.close()


def test_damaged_headers_are_quarantined_and_end_after_a_while(folder: Path) -> None:
    arena = open_arena(folder)
    (slot,) = reserve(arena).slots
    arena.close()
    with open(folder / slot.location, "r+b") as file:
        file.seek(table_offset(0))
        file.write(b"rubbish!" * 32)
    again = open_arena(folder)
    assert again.counts().num_quarantined == 1
    again.expire(UNKNOWN_OWNER_GRACE_S - 1, never)
    assert again.counts().num_quarantined == 1
    again.expire(UNKNOWN_OWNER_GRACE_S + 1, never)
    assert again.counts().num_quarantined == 0
    again.check_integrity()
    again.close()


def test_files_that_are_no_extents_are_removed(folder: Path) -> None:
    arena = open_arena(folder)
    (slot,) = reserve(arena).slots
    arena.close()
    (folder / ".new-extent-00000000aa").write_bytes(b"")
    (folder / "extent-00000000bb").write_bytes(b"short")
    os.truncate(folder / slot.location, 5000)
    again = open_arena(folder)
    assert [path.name for path in folder.iterdir()] == ["cache.lock"]
    again.close()


def test_one_cache_an_arena(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", iter(range(0, 1000, 10)).__next__)
    with pytest.raises(ConfigError, match="another cache process"):
        open_arena(arena.folder)


def test_books_that_differ_from_the_arena_are_found(arena: Arena) -> None:
    (slot,) = reserve(arena).slots
    with open(arena.folder / slot.location, "r+b") as file:
        file.seek(table_offset(1) + 4)
        file.write(bytes([SlotState.COMMITTED]))
    with pytest.raises(InvariantViolated, match="differs"):
        arena.check_integrity()


def test_a_living_writer_keeps_its_quarantined_slot(arena: Arena) -> None:
    lock = WriterLock(arena.folder, "prefill-a", 5)
    reply = reserve(arena)
    arena.expire(60.0, never)
    assert arena.counts().num_quarantined == 1
    lock.close()
    arena.expire(61.0, lambda owner, epoch: True)
    assert arena.counts().num_quarantined == 1, "no lock file, but registered"
    arena.expire(62.0, never)
    assert arena.counts().num_quarantined == 0
    assert arena.release((reply.lease_id,)) == []


def test_the_owner_may_let_go_of_an_expired_lease(arena: Arena) -> None:
    lock = WriterLock(arena.folder, "prefill-a", 5)
    reply = reserve(arena)
    arena.expire(60.0, never)
    arena.release((reply.lease_id,))
    assert arena.counts().num_quarantined == 0
    lock.close()


def test_a_dead_writers_reservations_are_reaped(arena: Arena) -> None:
    lock = WriterLock(arena.folder, "prefill-a", 5)
    reserve(arena, 2)
    done = reserve(arena, 1)
    fill(arena, done, b"x")
    assert arena.reap_writers() == 0
    os.close(lock._descriptor)  # as the kernel does when the process dies
    assert arena.reap_writers() == 2
    assert arena.counts().num_committed == 1
    assert not list(arena.folder.glob("writer-*"))


def test_the_probe_tells_arenas_apart(folder: Path) -> None:
    files = ArenaFiles(folder, max_bytes=EXTENT, extent_bytes=EXTENT)
    nonce = files.write_probe()
    assert probe(folder, nonce)
    assert not probe(folder, "") and not probe(folder, nonce[:-1])
    assert not probe(folder.parent, nonce)
    assert files.write_probe() != nonce and not probe(folder, nonce)
    assert (folder / PROBE_NAME).stat().st_mode & 0o777 == 0o600
    files.close()


@pytest.mark.parametrize(
    ("param", "change"),
    [
        ("block_bytes", {"block_bytes": 0}),
        ("block_bytes", {"block_bytes": 1 << 40}),
        ("num_blocks", {"num_blocks": -1}),
        ("lease_ms", {"lease_ms": 10**9}),
        ("lease_id", {"lease_id": "x"}),
        ("lease_id", {"lease_id": "0" * 32}),
        ("owner", {"owner": "../x"}),
    ],
)
def test_a_bad_reservation_names_its_field(
    arena: Arena, param: str, change: dict[str, int | str]
) -> None:
    good: dict[str, int | str] = {
        "request_id": "r",
        "owner": "prefill-a",
        "owner_epoch": 1,
        "num_blocks": 1,
        "block_bytes": BLOCK,
    }
    with pytest.raises(InvalidRequest) as caught:
        arena.reserve(ReserveRequest(**{**good, **change}), 0.0)  # type: ignore[arg-type]  # a row of bad values
    assert caught.value.param == param


def test_a_commit_needs_a_checksum_a_slot(arena: Arena) -> None:
    reply = reserve(arena)
    slot = reply.slots[0]
    for request in (
        CommitRequest(lease_id=reply.lease_id, slot_ids=(slot.slot_id,), checksums=()),
        CommitRequest(lease_id=reply.lease_id, slot_ids=(3,), checksums=(b"x" * 16,)),
    ):
        with pytest.raises(InvalidRequest):
            arena.commit(request, 0.0)
    assert make_ticket(slot, 3, checksum(b"abc")).generation == 1
