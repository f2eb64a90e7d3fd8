"""All slots of the arena: their headers, which are free, and which block is in which. Pure."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from finback.services.cache.index import BlockIndex
from finback.services.cache.slots import SlotKey
from finback.shared.errors import InvariantViolated
from finback.shared.lanes.arena_format import SlotHeader, SlotState

OnChange = Callable[[SlotKey, SlotHeader], None]


class SlotTable:
    """Headers by slot, free slots by size. Every change is told to `on_change`, to be stored."""

    def __init__(self, on_change: OnChange) -> None:
        self._on_change = on_change
        self._headers: dict[SlotKey, SlotHeader] = {}
        self._slot_bytes: dict[int, int] = {}  # by extent
        self._free: defaultdict[int, list[SlotKey]] = defaultdict(list)  # by slot size
        self._num_busy: Counter[int] = Counter()  # by extent
        self._by_state: Counter[SlotState] = Counter()
        self.index = BlockIndex()

    def add_extent(self, extent_id: int, slot_bytes: int) -> None:
        """Take in an extent, as yet without slots."""
        if extent_id in self._slot_bytes:
            raise InvariantViolated(f"extent {extent_id:x} is there already")
        self._slot_bytes[extent_id] = slot_bytes

    def add_slot(self, key: SlotKey, header: SlotHeader) -> None:
        """Take in a slot as it was found."""
        self._remember(key, header)
        if header.state is SlotState.FREE:
            self._free[self._slot_bytes[key[0]]].append(key)

    def drop_extent(self, extent_id: int) -> None:
        """Forget an extent, all of whose slots are free."""
        if self._num_busy[extent_id]:
            raise InvariantViolated(f"extent {extent_id:x} is in use")
        keys = self.keys_of(extent_id)
        free = self._free[self._slot_bytes.pop(extent_id)]
        free[:] = [key for key in free if key[0] != extent_id]
        for key in keys:
            self._by_state[self._headers.pop(key).state] -= 1
        del self._num_busy[extent_id]

    def idle_extents(self, except_slot_bytes: int) -> list[int]:
        """Extents of other size classes with no slot in use: they can make room."""
        return [
            extent_id
            for extent_id, slot_bytes in self._slot_bytes.items()
            if slot_bytes != except_slot_bytes and not self._num_busy[extent_id]
        ]

    def extents(self) -> dict[int, int]:
        """Slot sizes in bytes by extent."""
        return dict(self._slot_bytes)

    def keys_of(self, extent_id: int) -> list[SlotKey]:
        """The slots of one extent."""
        keys: list[SlotKey] = []
        while (key := (extent_id, len(keys))) in self._headers:
            keys.append(key)
        return keys

    def slot_bytes(self, key: SlotKey) -> int:
        """The size of a slot."""
        return self._slot_bytes[key[0]]

    def num_free(self, slot_bytes: int) -> int:
        """Free slots of one size class."""
        return len(self._free.get(slot_bytes, ()))

    def num_free_above(self, slot_bytes: int) -> int:
        """Free slots of all larger size classes."""
        return sum(len(keys) for size, keys in self._free.items() if size > slot_bytes)

    def larger_free(self, slot_bytes: int) -> int | None:
        """The next larger size class with a free slot."""
        return min((s for s, keys in self._free.items() if s > slot_bytes and keys), default=None)

    def header(self, key: SlotKey) -> SlotHeader:
        """What is known about a slot."""
        return self._headers[key]

    def has(self, key: SlotKey) -> bool:
        """Whether there is such a slot."""
        return key in self._headers

    def slots(self) -> Iterator[tuple[SlotKey, SlotHeader]]:
        """All slots."""
        return iter(self._headers.items())

    def free_slots(self) -> Iterator[tuple[int, SlotKey]]:
        """(size class, slot) of all that are free."""
        for slot_bytes, keys in self._free.items():
            for key in keys:
                yield slot_bytes, key

    def _free_all(self, keys: Iterable[SlotKey]) -> None:
        for key in sorted(keys):
            before = self._headers[key]
            if before.label is not None:
                self.index.remove(before.label, key)
            self._set(key, SlotHeader(state=SlotState.FREE, generation=before.generation))
            self._free[self._slot_bytes[key[0]]].append(key)

    def _set(self, key: SlotKey, header: SlotHeader) -> None:
        self._remember(key, header)
        self._on_change(key, header)

    def _remember(self, key: SlotKey, header: SlotHeader) -> None:
        before = self._headers.get(key)
        if before is not None:
            self._by_state[before.state] -= 1
            self._num_busy[key[0]] -= before.state is not SlotState.FREE
        self._headers[key] = header
        self._by_state[header.state] += 1
        self._num_busy[key[0]] += header.state is not SlotState.FREE
