"""What the arena keeps: what may go first, how much there is of whom, and what became of the rest.

It listens to the book. Times: `used_s` monotonic, `wall_s` wall clock.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from finback.services.cache.eviction import EvictionQueue, Rank, rank_of
from finback.services.cache.slots import BlockName, SlotKey, name_of
from finback.shared.lanes.arena_format import BlockKind, BlockLabel, SlotHeader, TrafficClass

# Names of blocks that were given up lately, and why: the cause of a miss.
_MAX_GONE: Final = 16_384


@dataclass(frozen=True, slots=True)
class Now:
    """The two clocks, read once an operation."""

    mono_s: float
    wall_s: float


class KeptBlocks:
    """Queues and sums over the kept slots; implements `BookListener`."""

    def __init__(self, slot_bytes: Callable[[SlotKey], int], now: Now) -> None:
        self._slot_bytes = slot_bytes
        self._adopted = now
        self._used_s: dict[SlotKey, float] = {}
        # Only slots that no lease and no name pins: by what they can make room for.
        self._queues: defaultdict[tuple[BlockKind, int], EvictionQueue] = defaultdict(EvictionQueue)
        self._tenants: defaultdict[bytes, EvictionQueue] = defaultdict(EvictionQueue)
        self._expiries = EvictionQueue()
        self.num_bytes: Counter[tuple[BlockKind, TrafficClass]] = Counter()
        self.num_blocks: Counter[tuple[BlockKind, TrafficClass]] = Counter()
        self.tenant_bytes: Counter[bytes] = Counter()
        self.evicted: Counter[str] = Counter()  # by reason, not yet fetched
        self._gone: OrderedDict[BlockName, str] = OrderedDict()
        # Told of each block that comes or goes: its label, and whether it is there now.
        self.on_change: Callable[[BlockLabel, bool], None] | None = None

    # --- BookListener

    def kept(self, key: SlotKey, header: SlotHeader) -> None:
        """Count a block in."""
        label = _label(header)
        self._used_s[key] = self._adopted.mono_s - max(0.0, self._adopted.wall_s - header.used_s)
        self._count(key, label, 1)
        self._gone.pop(name_of(label), None)
        self._changed(label, True)

    def idle(self, key: SlotKey, header: SlotHeader) -> None:
        """The block may be given up, unless it is pinned."""
        if header.is_pinned:
            return
        label = _label(header)
        rank = rank_of(header, self._used_s[key])
        self._queue(key, label).push(key, rank)
        self._tenants[label.tenant].push(key, (0, rank[1], rank[2]))
        if header.expiry_s:
            self._expiries.push(key, (0, header.expiry_s, rank[2]))

    def dropped(self, key: SlotKey, header: SlotHeader, reason: str) -> None:
        """Count a block out, and remember why."""
        label = _label(header)
        self.busy(key, header)
        del self._used_s[key]
        self._count(key, label, -1)
        self.evicted[reason] += 1
        self.note_gone(name_of(label), reason)
        self._changed(label, False)

    # --- more that changes

    def busy(self, key: SlotKey, header: SlotHeader) -> None:
        """The block may not be given up."""
        label = _label(header)
        self._queue(key, label).discard(key)
        self._expiries.discard(key)
        owned = self._tenants.get(label.tenant)
        if owned is not None:
            owned.discard(key)
            if not owned:
                del self._tenants[label.tenant]

    def used(self, key: SlotKey, at_s: float) -> None:
        """Remember a use. Queues learn it when the slot is idle the next time."""
        self._used_s[key] = max(at_s, self._used_s[key])

    def relabelled(self, key: SlotKey, before: BlockLabel, after: BlockLabel) -> None:
        """The class has changed."""
        self._count(key, before, -1)
        self._count(key, after, 1)

    def note_gone(self, name: BlockName, reason: str) -> None:
        """Remember why a block is not there."""
        self._gone[name] = reason
        if len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)

    # --- asked

    def why_gone(self, name: BlockName) -> str:
        """Why a block is not there: `absent` if it never was, or long ago."""
        return self._gone.get(name, "absent")

    def used_s(self, key: SlotKey) -> float:
        """When a kept slot was last used."""
        return self._used_s[key]

    def expired(self, wall_s: float) -> SlotKey | None:
        """A block whose time is over, if there is one that may go."""
        first = self._expiries.first()
        return first[1] if first is not None and first[0][1] <= wall_s else None

    def victim(
        self, kind: BlockKind, slot_bytes: int, max_class: TrafficClass
    ) -> tuple[Rank, SlotKey] | None:
        """What goes first of one kind and size, up to a class."""
        first = self._queues[kind, slot_bytes].first()
        return first if first is not None and first[0][0] <= max_class else None

    def victim_of(self, tenant: bytes) -> SlotKey | None:
        """What goes first of one tenant: what was unused for longest, of any class."""
        owned = self._tenants.get(tenant)
        first = owned.first() if owned else None
        return first[1] if first is not None else None

    def oldest_of_kind(self, kind: BlockKind) -> tuple[Rank, SlotKey] | None:
        """What goes first of one kind, of any size."""
        found = [
            first
            for (of_kind, _), queue in self._queues.items()
            if of_kind is kind and (first := queue.first()) is not None
        ]
        return min(found, default=None)

    def rank(self, key: SlotKey, header: SlotHeader) -> Rank | None:
        """The rank of a slot that may be given up; None if it may not."""
        return self._queue(key, _label(header)).rank(key)

    def kind_bytes(self, kind: BlockKind) -> int:
        """Bytes of all slots of a kind."""
        return sum(size for (of, _), size in self.num_bytes.items() if of is kind)

    def _queue(self, key: SlotKey, label: BlockLabel) -> EvictionQueue:
        return self._queues[label.kind, self._slot_bytes(key)]

    def _count(self, key: SlotKey, label: BlockLabel, sign: int) -> None:
        size = sign * self._slot_bytes(key)
        self.num_bytes[label.kind, label.traffic_class] += size
        self.num_blocks[label.kind, label.traffic_class] += sign
        self.tenant_bytes[label.tenant] += size
        if not self.tenant_bytes[label.tenant]:
            del self.tenant_bytes[label.tenant]

    def _changed(self, label: BlockLabel, is_there: bool) -> None:
        if self.on_change is not None and label.kind is BlockKind.BLOCK:
            self.on_change(label, is_there)


def _label(header: SlotHeader) -> BlockLabel:
    if header.label is None:
        raise ValueError("a kept slot has a label")
    return header.label
