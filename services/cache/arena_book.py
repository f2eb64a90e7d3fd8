"""Who holds which slot of the arena. Pure: no file, no clock, no socket.

    free -> reserved -> committed -> free       (reserve, commit, release or expiry)
            reserved -> quarantined -> free     (the lease ran out; freed once the writer is dead)

A reserved slot whose lease expired may still be written to, by a process that was stopped and goes
on: it is handed to nobody else until that process is known to be dead or lets go of the lease.
Every change is told to `on_change`, which stores it in the arena; `adopt` rebuilds from there.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from finback.services.cache.slots import Counts, Lease, SlotKey
from finback.shared.errors import InvalidRequest, InvariantViolated, NotFound
from finback.shared.lanes.arena_format import MAX_OWNER_BYTES, SlotHeader, SlotState

_OWNER: Final = re.compile(r"^[a-z0-9][a-z0-9_-]*$")
OnChange = Callable[[SlotKey, SlotHeader], None]


class ArenaBook:
    """The bookkeeping of all slots. Times are seconds of any clock that never goes back."""

    def __init__(self, on_change: OnChange) -> None:
        self._on_change = on_change
        self._headers: dict[SlotKey, SlotHeader] = {}
        self._slot_bytes: dict[int, int] = {}
        self._free: dict[int, list[SlotKey]] = defaultdict(list)
        self._leases: dict[str, Lease] = {}
        # Expired leases with slots whose writer may be alive, by lease id.
        self._quarantined: dict[str, Lease] = {}

    # --- extents

    def adopt(
        self, extent_id: int, slot_bytes: int, headers: Sequence[SlotHeader], now_s: float
    ) -> None:
        """Take in an extent as it was found; its leases run on for their full time."""
        if extent_id in self._slot_bytes:
            raise InvariantViolated(f"extent {extent_id:x} is there already")
        self._slot_bytes[extent_id] = slot_bytes
        for index, header in enumerate(headers):
            self._adopt_slot((extent_id, index), header, now_s)

    def _adopt_slot(self, key: SlotKey, header: SlotHeader, now_s: float) -> None:
        self._headers[key] = header
        if header.state is SlotState.FREE:
            self._free[self._slot_bytes[key[0]]].append(key)
            return
        held = self._quarantined if header.state is SlotState.QUARANTINED else self._leases
        lease = held.get(header.lease_id)
        if lease is None:
            lease = held[header.lease_id] = Lease(
                header.lease_id, header.owner, header.owner_epoch, header.lease_ms, 0.0
            )
            lease.deadline_s = now_s + header.lease_ms / 1000
        lease.keys.add(key)

    def drop_extent(self, extent_id: int) -> None:
        """Forget an extent, all of whose slots are free."""
        keys = [key for key in self._headers if key[0] == extent_id]
        if any(self._headers[key].state is not SlotState.FREE for key in keys):
            raise InvariantViolated(f"extent {extent_id:x} is in use")
        free = self._free[self._slot_bytes.pop(extent_id)]
        free[:] = [key for key in free if key[0] != extent_id]
        for key in keys:
            del self._headers[key]

    def idle_extents(self, except_slot_bytes: int) -> list[int]:
        """Extents of other size classes with no slot in use: they can make room."""
        busy = {k[0] for k, h in self._headers.items() if h.state is not SlotState.FREE}
        return [
            extent_id
            for extent_id, slot_bytes in self._slot_bytes.items()
            if slot_bytes != except_slot_bytes and extent_id not in busy
        ]

    def num_free(self, slot_bytes: int) -> int:
        """Free slots of one size class."""
        return len(self._free.get(slot_bytes, ()))

    # --- leases

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
        """Take up to `num_blocks` free slots; asked again under the same lease, the same slots."""
        _check_owner(owner)
        lease = self._leases.get(lease_id)
        if lease is not None:
            if (lease.owner, lease.owner_epoch) != (owner, owner_epoch):
                raise InvalidRequest("another owner holds this lease", param="lease_id")
            lease.deadline_s = now_s + lease.lease_ms / 1000
            return sorted(lease.keys)
        if lease_id in self._quarantined:
            raise NotFound("this lease has expired; release it and draw a new one")
        free = self._free[slot_bytes]
        keys = [free.pop() for _ in range(min(num_blocks, len(free)))]
        if keys:
            self._leases[lease_id] = Lease(
                lease_id, owner, owner_epoch, lease_ms, now_s + lease_ms / 1000, set(keys)
            )
        for key in keys:
            header = SlotHeader(
                state=SlotState.RESERVED,
                generation=self._headers[key].generation + 1,
                owner=owner,
                owner_epoch=owner_epoch,
                lease_id=lease_id,
                lease_ms=lease_ms,
            )
            self._set(key, header)
        return keys

    def commit(
        self, lease_id: str, written: Iterable[tuple[SlotKey, int, bytes]], now_s: float
    ) -> None:
        """(slot, length, checksum) of slots that are written. Repeating it is harmless."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise NotFound("no such lease, or it has expired", param="lease_id")
        changes = []
        for key, length, checksum in written:
            self._check_written(lease, key, length, checksum)
            if self._headers[key].state is SlotState.RESERVED:
                changes.append((key, length, checksum))
        for key, length, checksum in changes:
            header = replace(
                self._headers[key], state=SlotState.COMMITTED, length=length, checksum=checksum
            )
            self._set(key, header)
        lease.deadline_s = now_s + lease.lease_ms / 1000

    def _check_written(self, lease: Lease, key: SlotKey, length: int, checksum: bytes) -> None:
        if key not in lease.keys:
            raise InvalidRequest("a slot that the lease does not hold", param="slot_ids")
        if not 0 <= length <= self._slot_bytes[key[0]]:
            raise InvalidRequest("a length that the slot cannot hold", param="lengths")
        if len(checksum) != 16:
            raise InvalidRequest("a checksum is 16 bytes", param="checksums")
        header = self._headers[key]
        known = (header.length, header.checksum)
        if header.state is SlotState.COMMITTED and known != (length, checksum):
            raise InvalidRequest("the slot is committed with another content", param="slot_ids")

    def renew(self, lease_ids: Iterable[str], now_s: float) -> list[str]:
        """Extend leases; returns those that are still held."""
        held = [lease for lease_id in lease_ids if (lease := self._leases.get(lease_id))]
        for lease in held:
            lease.deadline_s = now_s + lease.lease_ms / 1000
        return [lease.lease_id for lease in held]

    def release(self, lease_ids: Iterable[str]) -> list[str]:
        """The writer lets go, even of an expired lease; returns those that were held."""
        held = []
        for lease_id in lease_ids:
            if lease_id in self._leases:
                held.append(lease_id)
            for lease in (self._leases.pop(lease_id, None), self._quarantined.pop(lease_id, None)):
                if lease is not None:
                    self._free_all(lease.keys)
        return held

    def expire(self, now_s: float) -> int:
        """End overdue leases: committed slots become free, reserved ones go into quarantine."""
        overdue = [lease for lease in self._leases.values() if lease.deadline_s <= now_s]
        for lease in overdue:
            del self._leases[lease.lease_id]
            reserved = {key for key in lease.keys if self._headers[key].state is SlotState.RESERVED}
            self._free_all(lease.keys - reserved)
            if reserved:
                lease.keys = reserved
                self._quarantine(lease)
        return len(overdue)

    def _quarantine(self, lease: Lease) -> None:
        already = self._quarantined.get(lease.lease_id)
        if already is not None:  # a crash in the middle of an earlier expiry leaves both
            already.keys |= lease.keys
        else:
            self._quarantined[lease.lease_id] = lease
        for key in lease.keys:
            self._set(key, replace(self._headers[key], state=SlotState.QUARANTINED))

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
                if not lease.keys:
                    del table[lease.lease_id]
        self._free_all(freed)
        return len(freed)

    def quarantined_writers(self) -> set[tuple[str, int]]:
        """(owner, epoch) of the writers that quarantined slots wait for."""
        return {(lease.owner, lease.owner_epoch) for lease in self._quarantined.values()}

    # --- reading

    def header(self, key: SlotKey) -> SlotHeader:
        """What is known about a slot."""
        return self._headers[key]

    def slots(self) -> Iterator[tuple[SlotKey, SlotHeader]]:
        """All slots."""
        return iter(self._headers.items())

    def counts(self) -> Counts:
        """How full it is."""
        by_state = dict.fromkeys(SlotState, 0)
        for header in self._headers.values():
            by_state[header.state] += 1
        return Counts(
            num_free=by_state[SlotState.FREE],
            num_reserved=by_state[SlotState.RESERVED],
            num_committed=by_state[SlotState.COMMITTED],
            num_quarantined=by_state[SlotState.QUARANTINED],
            num_leases=len(self._leases),
        )

    def check_integrity(self) -> None:
        """Every slot is in exactly one place, and that place fits its state."""
        seen: dict[SlotKey, SlotState] = {}
        for slot_bytes, keys in self._free.items():
            for key in keys:
                _place(seen, key, SlotState.FREE)
                if self._slot_bytes.get(key[0]) != slot_bytes:
                    raise InvariantViolated(f"slot {key} is free in another size class")
        for table, is_quarantine in ((self._leases, False), (self._quarantined, True)):
            for lease_id, lease in table.items():
                if not lease.keys or lease.lease_id != lease_id:
                    raise InvariantViolated(f"lease {lease_id} is empty or misfiled")
                for key in lease.keys:
                    header = self._headers[key]
                    if header.lease_id != lease_id or header.owner != lease.owner:
                        raise InvariantViolated(f"slot {key} names another lease")
                    if (header.state is SlotState.QUARANTINED) != is_quarantine:
                        raise InvariantViolated(f"slot {key} is {header.state.name}, misfiled")
                    _place(seen, key, header.state)
        if seen != {key: header.state for key, header in self._headers.items()}:
            raise InvariantViolated("slots are lost, or in a place that is not their state's")

    def _free_all(self, keys: Iterable[SlotKey]) -> None:
        for key in sorted(keys):
            generation = self._headers[key].generation
            self._set(key, SlotHeader(state=SlotState.FREE, generation=generation))
            self._free[self._slot_bytes[key[0]]].append(key)

    def _set(self, key: SlotKey, header: SlotHeader) -> None:
        self._headers[key] = header
        self._on_change(key, header)


def _check_owner(owner: str) -> None:
    # It becomes part of a file name.
    if len(owner) > MAX_OWNER_BYTES or not _OWNER.match(owner):
        raise InvalidRequest("not the name of an instance", param="owner")


def _place(seen: dict[SlotKey, SlotState], key: SlotKey, state: SlotState) -> None:
    if key in seen:
        raise InvariantViolated(f"slot {key} is in two places")
    seen[key] = state
