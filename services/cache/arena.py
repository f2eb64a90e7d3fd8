"""The arena: bookkeeping and files together. Synchronous; every call takes microseconds, except
for a reserve that has to grow the arena (a `posix_fallocate`, milliseconds).
"""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

from finback.services.cache.arena_book import ArenaBook
from finback.services.cache.arena_files import UNKNOWN_OWNER, ArenaFiles
from finback.services.cache.slots import Counts, SlotKey, size_class
from finback.shared.errors import InvalidRequest, InvariantViolated
from finback.shared.lanes.arena_format import MAX_SLOTS, SlotHeader, SlotState
from finback.shared.lanes.probe import is_writer_dead, writer_lock_path, writers
from finback.shared.wire.messages.cache import CommitRequest, ReserveReply, ReserveRequest, Slot

MAX_BLOCK_BYTES: Final = 256 * 1024 * 1024
MAX_BLOCKS: Final = 4096  # slots in one reservation
LEASE_MS: Final = (100, 60_000)
# A slot whose header was damaged names no writer whose death could be known.
UNKNOWN_OWNER_GRACE_S: Final = 600.0


class Arena:
    """The slots of one host, adopted from the folder as they were found."""

    def __init__(self, files: ArenaFiles, *, now_s: float) -> None:
        self._files = files
        self._book = ArenaBook(self._store)
        self._started_s = now_s
        self.num_adopted = 0
        for header, slots in files.scan():
            self._book.adopt(header.extent_id, header.slot_bytes, slots, now_s)
            self.num_adopted += sum(slot.state is not SlotState.FREE for slot in slots)

    @property
    def folder(self) -> Path:
        """Where the extents lie."""
        return self._files.folder

    @property
    def num_bytes(self) -> int:
        """The size of all extents."""
        return self._files.num_bytes

    def counts(self) -> Counts:
        """How full it is."""
        return self._book.counts()

    def reserve(self, request: ReserveRequest, now_s: float) -> ReserveReply:
        """Slots for the request, growing the arena as needed; fewer if there is no room."""
        _check_range("block_bytes", request.block_bytes, 1, MAX_BLOCK_BYTES)
        _check_range("num_blocks", request.num_blocks, 1, MAX_BLOCKS)
        _check_range("lease_ms", request.lease_ms, *LEASE_MS)
        lease_id = _lease_id(request.lease_id)
        slot_bytes = size_class(request.block_bytes)
        self._make_room(slot_bytes, request.num_blocks)
        keys = self._book.reserve(
            lease_id=lease_id,
            owner=request.owner,
            owner_epoch=request.owner_epoch,
            num_blocks=request.num_blocks,
            slot_bytes=slot_bytes,
            lease_ms=request.lease_ms,
            now_s=now_s,
        )
        slots = tuple(self._slot(key, request.block_bytes) for key in keys)
        return ReserveReply(slots=slots, lease_id=lease_id)

    def commit(self, request: CommitRequest, now_s: float) -> None:
        """Make written slots readable."""
        lengths = request.lengths
        if not lengths:
            lengths = tuple(self._slot_bytes(slot_id) for slot_id in request.slot_ids)
        if not len(request.slot_ids) == len(request.checksums) == len(lengths):
            raise InvalidRequest("one checksum and one length a slot", param="slot_ids")
        keys = [divmod(slot_id, MAX_SLOTS) for slot_id in request.slot_ids]
        self._book.commit(
            request.lease_id, zip(keys, lengths, request.checksums, strict=True), now_s
        )

    def renew(self, lease_ids: tuple[str, ...], now_s: float) -> list[str]:
        """The leases that are still held, and are so for another term."""
        return self._book.renew(lease_ids, now_s)

    def release(self, lease_ids: tuple[str, ...]) -> list[str]:
        """Free the slots of leases, expired or not."""
        return self._book.release(lease_ids)

    def expire(self, now_s: float, is_registered: Callable[[str, int], bool]) -> int:
        """End overdue leases, and free what waited for writers that are dead by now.

        `is_registered(owner, epoch)` is asked only about writers that left no lock file.
        """
        num_expired = self._book.expire(now_s)
        for owner, epoch in self._book.quarantined_writers():
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
        return self._book.writer_died(owner, owner_epoch)

    def check_integrity(self) -> None:
        """Raise `InvariantViolated` unless books and arena agree with each other."""
        self._book.check_integrity()
        for (extent_id, index), known in self._book.slots():
            try:
                stored = self._files.load(extent_id, index)
            except (KeyError, ValueError) as error:
                raise InvariantViolated(f"slot {index} of {extent_id:x} is unreadable") from error
            if stored != known:
                raise InvariantViolated(f"slot {index} of {extent_id:x} differs from its header")

    def close(self) -> None:
        """Leave the files to the next process."""
        self._files.close()

    def _make_room(self, slot_bytes: int, num_blocks: int) -> None:
        while (missing := num_blocks - self._book.num_free(slot_bytes)) > 0:
            if self._grow(slot_bytes, missing):
                continue
            idle = self._book.idle_extents(slot_bytes)
            if not idle:
                return
            self._book.drop_extent(idle[0])
            self._files.drop(idle[0])

    def _grow(self, slot_bytes: int, num_slots: int) -> bool:
        header = self._files.grow(slot_bytes, num_slots)
        if header is None:
            return False
        self._book.adopt(header.extent_id, slot_bytes, [SlotHeader()] * header.num_slots, 0.0)
        return True

    def _slot(self, key: SlotKey, length: int) -> Slot:
        extent_id, index = key
        extent = self._files.extent(extent_id)
        return Slot(
            slot_id=extent_id * MAX_SLOTS + index,
            location=extent.name,
            offset=extent.slot_offset(index),
            length=length,
            generation=self._book.header(key).generation,
        )

    def _slot_bytes(self, slot_id: int) -> int:
        try:
            return self._files.extent(slot_id // MAX_SLOTS).slot_bytes
        except KeyError:
            raise InvalidRequest("no such slot", param="slot_ids") from None

    def _store(self, key: SlotKey, header: SlotHeader) -> None:
        self._files.store(*key, header)


def _lease_id(asked: str) -> str:
    if not asked:
        return secrets.token_hex(16)
    try:
        if len(bytes.fromhex(asked)) == 16 and asked == asked.lower() and asked.strip("0"):
            return asked
    except ValueError:
        pass
    raise InvalidRequest("a lease id is 32 lower-case hex digits", param="lease_id")


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be within [{low}, {high}], not {value}", param=name)
