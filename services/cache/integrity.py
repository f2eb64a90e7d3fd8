"""Whether the book agrees with itself: every slot in one place, every name on one slot. Pure."""

from collections import Counter
from collections.abc import Mapping

from finback.services.cache.slot_table import SlotTable
from finback.services.cache.slots import Lease, SlotKey
from finback.shared.errors import InvariantViolated
from finback.shared.lanes.arena_format import SlotState

_LABELLED = (SlotState.RESERVED, SlotState.KEPT)


def check_slots(
    table: SlotTable,
    leases: Mapping[str, Lease],
    quarantined: Mapping[str, Lease],
    num_pins: Mapping[SlotKey, int],
) -> None:
    """Raise `InvariantViolated` at the first thing that is not as it must be."""
    seen: dict[SlotKey, SlotState] = {}
    for slot_bytes, key in table.free_slots():
        _place(seen, key, SlotState.FREE)
        if table.slot_bytes(key) != slot_bytes:
            raise InvariantViolated(f"slot {key} is free in another size class")
    for leases_of_kind, is_quarantine in ((leases, False), (quarantined, True)):
        for lease_id, lease in leases_of_kind.items():
            _check_lease(table, lease_id, lease, is_quarantine, seen)
    _check_pins(table, leases, num_pins, seen)
    if seen != {key: header.state for key, header in table.slots()}:
        raise InvariantViolated("slots are lost, or in a place that is not their state's")
    _check_index(table)


def _check_lease(
    table: SlotTable,
    lease_id: str,
    lease: Lease,
    is_quarantine: bool,
    seen: dict[SlotKey, SlotState],
) -> None:
    if not (lease.keys or lease.pins) or lease.lease_id != lease_id:
        raise InvariantViolated(f"lease {lease_id} is empty or misfiled")
    for key in lease.keys:
        header = table.header(key)
        if header.lease_id != lease_id or header.owner != lease.owner:
            raise InvariantViolated(f"slot {key} names another lease")
        if (header.state is SlotState.QUARANTINED) != is_quarantine:
            raise InvariantViolated(f"slot {key} is {header.state.name}, misfiled")
        _place(seen, key, header.state)


def _check_pins(
    table: SlotTable,
    leases: Mapping[str, Lease],
    num_pins: Mapping[SlotKey, int],
    seen: dict[SlotKey, SlotState],
) -> None:
    pins = Counter(key for lease in leases.values() for key in lease.pins)
    if pins != Counter(num_pins):
        raise InvariantViolated("pins are lost, or left behind")
    for key, header in table.slots():
        if header.state is SlotState.KEPT:
            _place(seen, key, SlotState.KEPT)
    for key in pins:
        state = table.header(key).state
        if state is SlotState.COMMITTED:  # given up while it was read
            _place(seen, key, state)
        elif state is not SlotState.KEPT:
            raise InvariantViolated(f"slot {key} is pinned and {state.name}")


def _check_index(table: SlotTable) -> None:
    names = dict(table.index.items())
    if len(set(names.values())) != len(names):
        raise InvariantViolated("two names for one slot")
    for name, key in names.items():
        header = table.header(key)
        if header.label is None or header.state not in _LABELLED:
            raise InvariantViolated(f"the name of slot {key} leads to no block")
        if (header.label.salt, header.label.kind, header.label.hash) != name:
            raise InvariantViolated(f"slot {key} is found by another's name")
    indexed = set(names.values())
    for key, header in table.slots():
        if (header.label is not None) != (key in indexed):
            raise InvariantViolated(f"slot {key} has a label and is not found by it")
        if header.state is SlotState.KEPT and header.label is None:
            raise InvariantViolated(f"slot {key} is kept as nothing")


def _place(seen: dict[SlotKey, SlotState], key: SlotKey, state: SlotState) -> None:
    if key in seen:
        raise InvariantViolated(f"slot {key} is in two places")
    seen[key] = state
