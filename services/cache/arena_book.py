"""Who holds which slot of the arena. Pure: no file, no clock, no socket.

    free -> reserved -> committed -> free       (reserve, commit, release or expiry)
            reserved -> kept -> free            (committed under a label; freed when given up)
            reserved -> quarantined -> free     (the lease ran out; freed once the writer is dead)

A reserved slot whose lease expired may still be written to, by a process that was stopped and goes
on: it is handed to nobody else until that process is known to be dead or lets go of the lease. So
nobody ever writes to a slot that was kept: a writer commits when it has written, and what it had
not committed is not kept.

A kept slot is pinned by the leases that read it, and by that of its writer. Given up meanwhile it
is found no more, but is freed only when the last of them ends. Every change is told to the
table, which has it stored in the arena; `adopt` rebuilds from there. Read leases are not stored:
after a restart a reader finds out by the generation.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from finback.services.cache.integrity import check_slots
from finback.services.cache.slot_table import OnChange, SlotTable
from finback.services.cache.slots import Counts, Lease, SlotKey, name_of
from finback.shared.errors import InvalidRequest, InvariantViolated, NotFound
from finback.shared.lanes.arena_format import MAX_OWNER_BYTES, BlockLabel, SlotHeader, SlotState

_OWNER: Final = re.compile(r"^[a-z0-9][a-z0-9_-]*$")
# Released leases that a late message might name again.
_MAX_ENDED: Final = 65_536


class BookListener(Protocol):
    """Who is told what happens to blocks."""

    def kept(self, key: SlotKey, header: SlotHeader) -> None:
        """The block can be found from now on."""

    def idle(self, key: SlotKey, header: SlotHeader) -> None:
        """No lease holds this kept slot any more: it may be given up."""

    def dropped(self, key: SlotKey, header: SlotHeader, reason: str) -> None:
        """The block (`header` is its last) can be found no more."""


class ArenaBook(SlotTable):
    """The bookkeeping of all slots. Times are seconds of any clock that never goes back."""

    def __init__(self, on_change: OnChange, listener: BookListener) -> None:
        super().__init__(on_change)
        self._listener = listener
        self._leases: dict[str, Lease] = {}
        # Expired leases with slots whose writer may be alive, by lease id.
        self._quarantined: dict[str, Lease] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._num_pins: Counter[SlotKey] = Counter()

    # --- extents

    def adopt(
        self, extent_id: int, slot_bytes: int, headers: Sequence[SlotHeader], now_s: float
    ) -> None:
        """Take in an extent as it was found; its leases run on for their full time."""
        self.add_extent(extent_id, slot_bytes)
        for index, header in enumerate(headers):
            self._adopt_slot((extent_id, index), header, now_s)

    def _adopt_slot(self, key: SlotKey, header: SlotHeader, now_s: float) -> None:
        self.add_slot(key, header)
        if header.state is SlotState.FREE:
            return
        if header.state is SlotState.KEPT:
            self._adopt_kept(key, header, now_s)
            return
        if header.label is not None and not self._adopt_label(key, header):
            header = replace(header, label=None)
            self._set(key, header)
        is_quarantined = header.state is SlotState.QUARANTINED
        held = self._quarantined if is_quarantined else self._leases
        self._adopt_lease(held, header, now_s).keys.add(key)

    def _adopt_label(self, key: SlotKey, header: SlotHeader) -> bool:
        is_open = header.state is SlotState.RESERVED
        return is_open and header.label is not None and self.index.add(header.label, key)

    def _adopt_kept(self, key: SlotKey, header: SlotHeader, now_s: float) -> None:
        if header.label is None or not self.index.add(header.label, key):
            self._free_all([key])  # the same block a second time
            return
        if header.lease_id:
            self._pin(self._adopt_lease(self._leases, header, now_s), key)
        self._listener.kept(key, header)
        if not header.lease_id:
            self._listener.idle(key, header)

    def _adopt_lease(self, held: dict[str, Lease], header: SlotHeader, now_s: float) -> Lease:
        lease = held.get(header.lease_id)
        if lease is None:
            lease = held[header.lease_id] = Lease(
                header.lease_id,
                header.owner,
                header.owner_epoch,
                header.lease_ms,
                now_s + header.lease_ms / 1000,
                opened_s=now_s,
            )
        return lease

    # --- leases

    def lease(
        self, lease_id: str, owner: str, owner_epoch: int, lease_ms: int, now_s: float
    ) -> Lease:
        """The owner's lease of this id, renewed; a new one is only kept once it holds something."""
        _check_owner(owner)
        lease = self._leases.get(lease_id)
        if lease is not None:
            if (lease.owner, lease.owner_epoch) != (owner, owner_epoch):
                raise InvalidRequest("another owner holds this lease", param="lease_id")
            lease.deadline_s = now_s + lease.lease_ms / 1000
            return lease
        if lease_id in self._quarantined or lease_id in self._ended:
            raise NotFound("this lease has ended; draw a new one", param="lease_id")
        deadline_s = now_s + lease_ms / 1000
        return Lease(lease_id, owner, owner_epoch, lease_ms, deadline_s, opened_s=now_s)

    def reserve(
        self,
        *,
        lease_id: str,
        owner: str,
        owner_epoch: int,
        num_blocks: int,
        slot_bytes: int,
        lease_ms: int,
        now_s: float,
    ) -> list[SlotKey]:
        """Take up to `num_blocks` free slots, larger ones if need be.

        Asked again under the same lease, the same slots.
        """
        lease = self.lease(lease_id, owner, owner_epoch, lease_ms, now_s)
        mine = sorted(key for key in lease.keys if self._headers[key].label is None)
        if mine:
            return mine
        keys: list[SlotKey] = []
        size: int | None = slot_bytes
        while size is not None and len(keys) < num_blocks:
            if self._free.get(size):
                keys.append(self._take(lease, size, None))
            else:
                size = self.larger_free(slot_bytes)
        return keys

    def reserve_labelled(self, lease: Lease, labels: Iterable[BlockLabel], slot_bytes: int) -> None:
        """A slot for each label whose name has none, while there are free ones."""
        for label in labels:
            if not self._free.get(slot_bytes):
                return
            if self.index.get(name_of(label)) is None:
                self._take(lease, slot_bytes, label)

    def open_slots(self, lease: Lease, labels: Iterable[BlockLabel]) -> dict[bytes, SlotKey]:
        """By hash, the slots of these names that the lease is to write."""
        found = {}
        for label in labels:
            key = self.index.get(name_of(label))
            if key is not None and key in lease.keys:
                found[label.hash] = key
        return found

    def is_leased(self, lease_id: str) -> bool:
        """Whether the lease holds anything."""
        return lease_id in self._leases

    def opened_s(self, lease_id: str, otherwise_s: float) -> float:
        """When a lease was drawn."""
        lease = self._leases.get(lease_id)
        return lease.opened_s if lease else otherwise_s

    def _take(self, lease: Lease, slot_bytes: int, label: BlockLabel | None) -> SlotKey:
        key = self._free[slot_bytes].pop()
        self._leases[lease.lease_id] = lease
        lease.keys.add(key)
        header = SlotHeader(
            state=SlotState.RESERVED,
            generation=self._headers[key].generation + 1,
            owner=lease.owner,
            owner_epoch=lease.owner_epoch,
            lease_id=lease.lease_id,
            lease_ms=lease.lease_ms,
            label=label,
        )
        if label is not None:
            self.index.add(label, key)
        self._set(key, header)
        return key

    def commit(
        self,
        lease_id: str,
        written: Iterable[tuple[SlotKey, int, bytes]],
        now_s: float,
        *,
        used_s: float = 0.0,
    ) -> list[SlotKey]:
        """(slot, length, checksum) of slots that are written. Repeating it is harmless.

        Returns the slots that are kept from now on; `used_s` is their wall-clock time.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise NotFound("no such lease, or it has expired", param="lease_id")
        changes = []
        for key, length, checksum in written:
            self._check_written(lease, key, length, checksum)
            if self._headers[key].state is SlotState.RESERVED:
                changes.append((key, length, checksum))
        lease.deadline_s = now_s + lease.lease_ms / 1000
        return [change[0] for change in changes if self._commit(lease, *change, used_s)]

    def _commit(
        self, lease: Lease, key: SlotKey, length: int, checksum: bytes, used_s: float
    ) -> bool:
        before = self._headers[key]
        label = before.label
        if label is None or not self.index.is_at(label, key):  # forgotten while it was written
            state, label, expiry_s = SlotState.COMMITTED, None, 0.0
        else:
            state = SlotState.KEPT
            expiry_s = used_s + label.retention_s if label.retention_s else 0.0
        header = replace(
            before,
            state=state,
            length=length,
            checksum=checksum,
            label=label,
            expiry_s=expiry_s,
            used_s=used_s if label else 0.0,
        )
        self._set(key, header)
        if state is not SlotState.KEPT:
            return False
        lease.keys.discard(key)
        self._pin(lease, key)
        self._listener.kept(key, header)
        return True

    def _check_written(self, lease: Lease, key: SlotKey, length: int, checksum: bytes) -> None:
        if self._headers[key].state is SlotState.QUARANTINED:
            raise NotFound("the lease of this slot has ended", param="lease_id")
        if key not in lease.keys and key not in lease.pins:
            raise InvalidRequest("a slot that the lease does not hold", param="slot_ids")
        if not 0 <= length <= self._slot_bytes[key[0]]:
            raise InvalidRequest("a length that the slot cannot hold", param="lengths")
        if len(checksum) != 16:
            raise InvalidRequest("a checksum is 16 bytes", param="checksums")
        header = self._headers[key]
        known = (header.length, header.checksum)
        if header.state is not SlotState.RESERVED and known != (length, checksum):
            raise InvalidRequest("the slot is committed with another content", param="slot_ids")

    def renew(self, lease_ids: Iterable[str], now_s: float) -> list[str]:
        """Extend leases; returns those that are still held."""
        held = [lease for lease_id in lease_ids if (lease := self._leases.get(lease_id))]
        for lease in held:
            lease.deadline_s = now_s + lease.lease_ms / 1000
        return [lease.lease_id for lease in held]

    def release(self, lease_ids: Iterable[str]) -> list[str]:
        """The holder lets go, even of an expired lease; returns those that were held.

        A released id cannot be used again: a late duplicate of the release would otherwise free
        what is written under it.
        """
        held = []
        for lease_id in lease_ids:
            self._ended[lease_id] = None
            self._ended.move_to_end(lease_id)
            if lease_id in self._leases:
                held.append(lease_id)
            for lease in (self._leases.pop(lease_id, None), self._quarantined.pop(lease_id, None)):
                if lease is not None:
                    self._free_all(lease.keys)
                    self._unpin_all(lease)
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        return held

    def expire(self, now_s: float) -> int:
        """End overdue leases: committed slots become free, reserved ones go into quarantine."""
        overdue = [lease for lease in self._leases.values() if lease.deadline_s <= now_s]
        for lease in overdue:
            self._end(lease)
        return len(overdue)

    def suspect(self, owner: str, owner_epoch: int) -> int:
        """A writer is said to be lost, but may go on: what it has reserved is quarantined.

        Returns the number of slots.
        """
        num_slots = 0
        for lease in list(self._leases.values()):
            if lease.owner != owner or lease.owner_epoch > owner_epoch:
                continue
            reserved = self._reserved(lease)
            num_slots += len(reserved)
            self._quarantine(lease, reserved)
            if not lease.keys and not lease.pins:
                del self._leases[lease.lease_id]
        return num_slots

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        self._quarantine(lease, self._reserved(lease))
        self._free_all(lease.keys)
        self._unpin_all(lease)

    def _reserved(self, lease: Lease) -> set[SlotKey]:
        return {key for key in lease.keys if self._headers[key].state is SlotState.RESERVED}

    def _quarantine(self, lease: Lease, keys: set[SlotKey]) -> None:
        if not keys:
            return
        lease.keys -= keys
        # There is one already after a crash in the middle of an expiry, and of a suspected writer.
        already = self._quarantined.setdefault(
            lease.lease_id, replace(lease, keys=set(), pins=set())
        )
        already.keys |= keys
        for key in keys:
            header = self._headers[key]
            if header.label is not None:
                self.index.remove(header.label, key)
            self._set(key, replace(header, state=SlotState.QUARANTINED, label=None))

    def writer_died(self, owner: str, owner_epoch: int) -> int:
        """The process is gone: what it had reserved is free. Committed slots keep their lease.

        Every epoch up to `owner_epoch` is gone with it. Returns the number of slots freed.
        """
        freed: list[SlotKey] = []
        for table in (self._leases, self._quarantined):
            for lease in list(table.values()):
                if lease.owner != owner or lease.owner_epoch > owner_epoch:
                    continue
                open_keys = {
                    k for k in lease.keys if self._headers[k].state is not SlotState.COMMITTED
                }
                lease.keys -= open_keys
                freed += open_keys
                if not lease.keys and not lease.pins:
                    del table[lease.lease_id]
        self._free_all(freed)
        return len(freed)

    def quarantined_writers(self) -> set[tuple[str, int]]:
        """(owner, epoch) of the writers that quarantined slots wait for."""
        return {(lease.owner, lease.owner_epoch) for lease in self._quarantined.values()}

    def counts(self) -> Counts:
        """How full it is."""
        return Counts(
            num_free=self._by_state[SlotState.FREE],
            num_reserved=self._by_state[SlotState.RESERVED],
            num_committed=self._by_state[SlotState.COMMITTED],
            num_quarantined=self._by_state[SlotState.QUARANTINED],
            num_kept=self._by_state[SlotState.KEPT],
            num_leases=len(self._leases),
        )

    # --- kept slots

    def pin(self, lease: Lease, keys: Iterable[SlotKey]) -> None:
        """Kept slots stay while `lease` lasts."""
        for key in keys:
            self._leases[lease.lease_id] = lease
            self._pin(lease, key)

    def drop(self, key: SlotKey, reason: str) -> None:
        """Give up a kept slot: found no more at once, freed when no lease holds it."""
        header = self._headers[key]
        if header.state is not SlotState.KEPT or header.label is None:
            raise InvariantViolated(f"slot {key} is not kept")
        self.index.remove(header.label, key)
        if self._num_pins[key]:
            holder = next(lease for lease in self._leases.values() if key in lease.pins)
            doomed = replace(
                header,
                state=SlotState.COMMITTED,
                label=None,
                expiry_s=0.0,
                used_s=0.0,
                is_pinned=False,
                owner=holder.owner,
                owner_epoch=holder.owner_epoch,
                lease_id=holder.lease_id,
                lease_ms=holder.lease_ms,
            )
            self._set(key, doomed)
        else:
            self._free_all([key])
        self._listener.dropped(key, header, reason)

    def unlabel(self, key: SlotKey) -> None:
        """Do not keep a slot that is being written, once it is; its lease goes on."""
        header = self._headers[key]
        if header.state is SlotState.RESERVED and header.label is not None:
            self.index.remove(header.label, key)
            self._set(key, replace(header, label=None))

    def rewrite(self, key: SlotKey, header: SlotHeader) -> None:
        """Change what may change of a kept slot: expiry, last use, class, pin."""
        if self._headers[key].state is not SlotState.KEPT or header.state is not SlotState.KEPT:
            raise InvariantViolated(f"slot {key} is not kept")
        self._set(key, header)

    def is_held(self, key: SlotKey) -> bool:
        """Whether a lease holds this kept slot."""
        return self._num_pins[key] > 0

    def _pin(self, lease: Lease, key: SlotKey) -> None:
        if key not in lease.pins:
            lease.pins.add(key)
            self._num_pins[key] += 1

    def _unpin_all(self, lease: Lease) -> None:
        for key in lease.pins:
            self._num_pins[key] -= 1
            header = self._headers[key]
            is_last = not self._num_pins[key]
            if is_last:
                del self._num_pins[key]
            if header.state is not SlotState.KEPT:
                if is_last:
                    self._free_all([key])
                continue
            if header.lease_id == lease.lease_id:
                header = replace(header, lease_id="", owner="", owner_epoch=0, lease_ms=0)
                self._set(key, header)
            if is_last:
                self._listener.idle(key, header)
        lease.pins.clear()

    def check_integrity(self) -> None:
        """Every slot is in exactly one place, and that place fits its state."""
        check_slots(self, self._leases, self._quarantined, self._num_pins)


def _check_owner(owner: str) -> None:
    # It becomes part of a file name.
    if len(owner) > MAX_OWNER_BYTES or not _OWNER.match(owner):
        raise InvalidRequest("not the name of an instance", param="owner")
