"""The arena: bookkeeping and files together, and slots for what is only handed over.

Synchronous; every call takes microseconds, except for a reserve that has to grow the arena (a
`posix_fallocate`, milliseconds): see `growth.py`.
"""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

from finback.services.cache.arena_book import ArenaBook
from finback.services.cache.arena_files import UNKNOWN_OWNER, ArenaFiles
from finback.services.cache.kept import KeptBlocks, Now
from finback.services.cache.room import Room
from finback.services.cache.slots import Counts, SlotKey, size_class
from finback.shared.errors import InvalidRequest, InvariantViolated
from finback.shared.lanes.arena_format import MAX_SLOTS, SlotHeader, SlotState
from finback.shared.lanes.probe import is_writer_dead, writer_lock_path, writers
from finback.shared.lanes.shm import KIND
from finback.shared.lanes.ticket import Ticket
from finback.shared.wire.messages.cache import CommitRequest, ReserveReply, ReserveRequest, Slot

MAX_BLOCK_BYTES: Final = 256 * 1024 * 1024
MAX_BLOCKS: Final = 4096  # slots in one reservation
LEASE_MS: Final = (100, 60_000)
# A slot whose header was damaged names no writer whose death could be known.
UNKNOWN_OWNER_GRACE_S: Final = 600.0


class Arena:
    """The slots of one host, adopted from the folder as they were found."""

    def __init__(self, files: ArenaFiles, *, now_s: float, wall_s: float = 0.0) -> None:
        self._files = files
        self.kept = KeptBlocks(self._size_of, Now(now_s, wall_s))
        self.book = ArenaBook(self._store, self.kept)
        self.room = Room(files, self.book, self.kept)
        self._started_s = now_s
        self.num_adopted = 0
        for header, slots in files.scan():
            self.book.adopt(header.extent_id, header.slot_bytes, slots, now_s)
            self.num_adopted += sum(slot.state is not SlotState.FREE for slot in slots)

    @property
    def folder(self) -> Path:
        """Where the extents lie."""
        return self._files.folder

    @property
    def files(self) -> ArenaFiles:
        """The extents' files."""
        return self._files

    @property
    def num_bytes(self) -> int:
        """The size of all extents."""
        return self._files.num_bytes

    @property
    def removed(self) -> dict[str, str]:
        """Files that could not be used when the arena was adopted: name -> why."""
        return self._files.removed

    def missing(self) -> list[str]:
        """Files that somebody removed or cut while they were in use."""
        return self._files.missing()

    @property
    def num_damaged(self) -> int:
        """Slot headers that made no sense when the arena was adopted."""
        return self._files.num_damaged

    def counts(self) -> Counts:
        """How full it is."""
        return self.book.counts()

    def reserve(self, request: ReserveRequest, now_s: float) -> ReserveReply:
        """Slots for the request, growing the arena as needed; fewer if there is no room."""
        check_range("block_bytes", request.block_bytes, 1, MAX_BLOCK_BYTES)
        check_range("num_blocks", request.num_blocks, 1, MAX_BLOCKS)
        check_range("lease_ms", request.lease_ms, *LEASE_MS)
        lease_id = lease_id_of(request.lease_id)
        slot_bytes = size_class(request.block_bytes)
        self.room.make(slot_bytes, request.num_blocks, is_brief=True)
        keys = self.book.reserve(
            lease_id=lease_id,
            owner=request.owner,
            owner_epoch=request.owner_epoch,
            num_blocks=request.num_blocks,
            slot_bytes=slot_bytes,
            lease_ms=request.lease_ms,
            now_s=now_s,
        )
        slots = tuple(self.slot(key, request.block_bytes) for key in keys)
        return ReserveReply(slots=slots, lease_id=lease_id)

    def commit(self, request: CommitRequest, now_s: float, wall_s: float = 0.0) -> list[SlotKey]:
        """Make written slots readable; returns those that are kept from now on."""
        lengths = request.lengths
        if not lengths:
            lengths = tuple(self._slot_bytes(slot_id) for slot_id in request.slot_ids)
        if not len(request.slot_ids) == len(request.checksums) == len(lengths):
            raise InvalidRequest("one checksum and one length a slot", param="slot_ids")
        keys = [divmod(slot_id, MAX_SLOTS) for slot_id in request.slot_ids]
        written = zip(keys, lengths, request.checksums, strict=True)
        return self.book.commit(request.lease_id, written, now_s, used_s=wall_s)

    def renew(self, lease_ids: tuple[str, ...], now_s: float) -> list[str]:
        """The leases that are still held, and are so for another term."""
        return self.book.renew(lease_ids, now_s)

    def release(self, lease_ids: tuple[str, ...]) -> list[str]:
        """Free the slots of leases, expired or not."""
        return self.book.release(lease_ids)

    def expire(self, now_s: float, is_registered: Callable[[str, int], bool]) -> int:
        """End overdue leases, and free what waited for writers that are dead by now.

        `is_registered(owner, epoch)` is asked only about writers that left no lock file.
        """
        num_expired = self.book.expire(now_s)
        for owner, epoch in self.book.quarantined_writers():
            if owner == UNKNOWN_OWNER:
                is_dead = now_s - self._started_s > UNKNOWN_OWNER_GRACE_S
            else:
                found = is_writer_dead(self.folder, owner, epoch)
                is_dead = not is_registered(owner, epoch) if found is None else found
            if is_dead:
                self.writer_died(owner, epoch)
        return num_expired

    def reap_writers(self) -> int:
        """Free what writers had reserved whose lock shows that they died; returns slots freed."""
        return sum(
            self.writer_died(owner, epoch)
            for owner, epoch in writers(self.folder)
            if is_writer_dead(self.folder, owner, epoch)
        )

    def writer_died(self, owner: str, owner_epoch: int) -> int:
        """Free what a dead process had reserved and not committed."""
        writer_lock_path(self.folder, owner, owner_epoch).unlink(missing_ok=True)
        return self.book.writer_died(owner, owner_epoch)

    def writer_lost(self, owner: str, owner_epoch: int) -> int:
        """Somebody says that a process is gone. Returns the number of slots freed.

        If its lock shows that it is not, as of one that hangs or is stopped, what it had reserved
        is quarantined: it may still write there.
        """
        if is_writer_dead(self.folder, owner, owner_epoch) is False:
            self.book.suspect(owner, owner_epoch)
            return 0
        return self.writer_died(owner, owner_epoch)

    def check_integrity(self) -> None:
        """Raise `InvariantViolated` unless books and arena agree with each other."""
        self.book.check_integrity()
        for (extent_id, index), known in self.book.slots():
            try:
                stored = self._files.load(extent_id, index)
            except (KeyError, ValueError) as error:
                raise InvariantViolated(f"slot {index} of {extent_id:x} is unreadable") from error
            if stored != known:
                raise InvariantViolated(f"slot {index} of {extent_id:x} differs from its header")

    def close(self) -> None:
        """Leave the files to the next process."""
        self._files.close()

    def ticket(self, key: SlotKey) -> Ticket:
        """The ticket of a readable slot."""
        extent_id, index = key
        extent = self._files.extent(extent_id)
        header = self.book.header(key)
        return Ticket(
            kind=KIND,
            location=extent.name,
            offset=extent.slot_offset(index),
            length=header.length,
            checksum=header.checksum,
            generation=header.generation,
        )

    def slot(self, key: SlotKey, length: int) -> Slot:
        """What a writer is told of a slot."""
        extent_id, index = key
        extent = self._files.extent(extent_id)
        return Slot(
            slot_id=extent_id * MAX_SLOTS + index,
            location=extent.name,
            offset=extent.slot_offset(index),
            length=length,
            generation=self.book.header(key).generation,
        )

    def _slot_bytes(self, slot_id: int) -> int:
        try:
            return self._files.extent(slot_id // MAX_SLOTS).slot_bytes
        except KeyError:
            raise InvalidRequest("no such slot", param="slot_ids") from None

    def _size_of(self, key: SlotKey) -> int:
        return self._files.extent(key[0]).slot_bytes

    def _store(self, key: SlotKey, header: SlotHeader) -> None:
        self._files.store(*key, header)


def lease_id_of(asked: str) -> str:
    """A lease id that was asked for, checked; a fresh one if none was."""
    if not asked:
        return secrets.token_hex(16)
    try:
        if len(bytes.fromhex(asked)) == 16 and asked == asked.lower() and asked.strip("0"):
            return asked
    except ValueError:
        pass
    raise InvalidRequest("a lease id is 32 lower-case hex digits", param="lease_id")


def check_range(name: str, value: int, low: int, high: int) -> None:
    """InvalidRequest that names the field and the limits."""
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be within [{low}, {high}], not {value}", param=name)
