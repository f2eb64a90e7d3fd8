"""The arena's bookkeeping against a slow twin, through random lives with restarts in between."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from finback.services.cache.arena_book import ArenaBook
from finback.services.cache.slots import SlotKey, size_class
from finback.shared.errors import InvalidRequest, InvariantViolated, NotFound
from finback.shared.lanes.arena_format import SlotHeader, SlotState

SLOT_BYTES = 4096
LEASE_MS = 10_000


class Ignore:
    """Nobody cares what becomes of blocks here."""

    def kept(self, key: SlotKey, header: SlotHeader) -> None: ...

    def idle(self, key: SlotKey, header: SlotHeader) -> None: ...

    def dropped(self, key: SlotKey, header: SlotHeader, reason: str) -> None: ...


@dataclass
class TwinSlot:
    """A slot as the twin sees it: a line in a list, nothing indexed."""

    key: SlotKey
    state: SlotState = SlotState.FREE
    owner: str = ""
    lease_id: str = ""
    deadline_s: float = 0.0


class BookMachine(RuleBasedStateMachine):
    """Two writers, one extent class, a clock, and kills of the book in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.stored: dict[SlotKey, SlotHeader] = {}
        self.twin: list[TwinSlot] = []
        self.num_leases = 0
        self.num_extents = 0
        self.generations: dict[SlotKey, int] = {}
        self.book = ArenaBook(self.store, Ignore())
        self.add_extent(num_slots=3)

    def store(self, key: SlotKey, header: SlotHeader) -> None:
        self.stored[key] = header

    @property
    def lease_ids(self) -> list[str]:
        return sorted({slot.lease_id for slot in self.twin if slot.lease_id})

    @precondition(lambda self: self.num_extents < 3)
    @rule(num_slots=st.integers(1, 4))
    def add_extent(self, num_slots: int) -> None:
        extent_id = self.num_extents
        self.num_extents += 1
        self.book.adopt(extent_id, SLOT_BYTES, [SlotHeader()] * num_slots, self.now_s)
        for index in range(num_slots):
            self.stored[extent_id, index] = SlotHeader()
            self.twin.append(TwinSlot((extent_id, index)))

    @rule(owner=st.sampled_from(["prefill-a", "prefill-b"]), num_blocks=st.integers(1, 5))
    def reserve(self, owner: str, num_blocks: int) -> None:
        self.num_leases += 1
        lease_id = f"{self.num_leases:032x}"
        num_free = sum(slot.state is SlotState.FREE for slot in self.twin)
        keys = self._reserve(lease_id, owner, num_blocks)
        assert len(keys) == min(num_blocks, num_free)
        for slot in self.twin:
            if slot.key in keys:
                assert slot.state is SlotState.FREE
                slot.state, slot.owner, slot.lease_id = SlotState.RESERVED, owner, lease_id
                slot.deadline_s = self.now_s + LEASE_MS / 1000
        assert sorted(self._reserve(lease_id, owner, num_blocks) if keys else []) == sorted(keys)

    def _reserve(self, lease_id: str, owner: str, num_blocks: int) -> list[SlotKey]:
        return self.book.reserve(
            lease_id=lease_id,
            owner=owner,
            owner_epoch=1,
            num_blocks=num_blocks,
            slot_bytes=SLOT_BYTES,
            lease_ms=LEASE_MS,
            now_s=self.now_s,
        )

    @precondition(lambda self: self.lease_ids)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(self.lease_ids))
        mine = [slot for slot in self.twin if slot.lease_id == lease_id]
        chosen = data.draw(st.lists(st.sampled_from(mine), unique_by=lambda slot: slot.key))
        written = [(slot.key, 7, bytes([slot.key[1]] * 16)) for slot in chosen]
        if mine[0].state is SlotState.QUARANTINED:
            with pytest.raises(NotFound):
                self.book.commit(lease_id, written, self.now_s)
            return
        self.book.commit(lease_id, written, self.now_s)
        for slot in chosen:
            slot.state = SlotState.COMMITTED
        for slot in mine:
            slot.deadline_s = self.now_s + LEASE_MS / 1000

    @precondition(lambda self: self.lease_ids)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(self.lease_ids))
        mine = [slot for slot in self.twin if slot.lease_id == lease_id]
        is_held = mine[0].state is not SlotState.QUARANTINED
        assert self.book.renew([lease_id, "f" * 32], self.now_s) == [lease_id] * is_held
        for slot in mine:
            slot.deadline_s = self.now_s + LEASE_MS / 1000

    @precondition(lambda self: self.lease_ids)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(self.lease_ids))
        self.book.release([lease_id])
        for slot in self.twin:
            if slot.lease_id == lease_id:
                self._free(slot)

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 11.0]))
    def expire(self, seconds: float) -> None:
        self.now_s += seconds
        self.book.expire(self.now_s)
        for slot in self.twin:
            if slot.deadline_s > self.now_s:
                continue
            if slot.state is SlotState.COMMITTED:
                self._free(slot)
            elif slot.state is SlotState.RESERVED:
                slot.state = SlotState.QUARANTINED

    @rule(owner=st.sampled_from(["prefill-a", "prefill-b"]), epoch=st.sampled_from([0, 1, 2]))
    def writer_dies(self, owner: str, epoch: int) -> None:
        self.book.writer_died(owner, epoch)
        for slot in self.twin:
            if slot.owner == owner and epoch >= 1 and slot.state is not SlotState.COMMITTED:
                self._free(slot)

    @rule(seconds=st.sampled_from([0.0, 1.0]))
    def restart(self, seconds: float) -> None:
        """The process is killed: a new book knows what the arena holds, leases start afresh."""
        self.now_s += seconds
        self.book = ArenaBook(self.store, Ignore())
        for extent_id in range(self.num_extents):
            headers = [self.stored[key] for key in sorted(self.stored) if key[0] == extent_id]
            self.book.adopt(extent_id, SLOT_BYTES, headers, self.now_s)
        for slot in self.twin:
            if slot.state in (SlotState.RESERVED, SlotState.COMMITTED):
                slot.deadline_s = self.now_s + LEASE_MS / 1000

    def _free(self, slot: TwinSlot) -> None:
        slot.state, slot.owner, slot.lease_id = SlotState.FREE, "", ""

    @invariant()
    def agrees(self) -> None:
        self.book.check_integrity()
        for slot in self.twin:
            header = self.book.header(slot.key)
            assert (header.state, header.owner, header.lease_id) == (
                slot.state,
                slot.owner,
                slot.lease_id,
            )
            assert header == self.stored[slot.key]

    @invariant()
    def generations_only_rise(self) -> None:
        for key, header in self.book.slots():
            assert header.generation >= self.generations.get(key, 0)
            self.generations[key] = header.generation


TestBook = BookMachine.TestCase
TestBook.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def make_book(num_slots: int = 2) -> ArenaBook:
    book = ArenaBook(lambda key, header: None, Ignore())
    book.adopt(1, SLOT_BYTES, [SlotHeader()] * num_slots, 0.0)
    return book


def reserve(book: ArenaBook, lease_id: str, owner: str = "prefill-a") -> list[SlotKey]:
    return book.reserve(
        lease_id=lease_id,
        owner=owner,
        owner_epoch=1,
        num_blocks=1,
        slot_bytes=SLOT_BYTES,
        lease_ms=LEASE_MS,
        now_s=0.0,
    )


def test_commit_refuses_what_the_lease_does_not_hold() -> None:
    book = make_book()
    (mine,) = reserve(book, "a" * 32)
    (other,) = reserve(book, "b" * 32)
    with pytest.raises(InvalidRequest, match="does not hold"):
        book.commit("a" * 32, [(mine, 1, b"x" * 16), (other, 1, b"x" * 16)], 0.0)
    assert book.header(mine).state is SlotState.RESERVED


@pytest.mark.parametrize(
    ("length", "checksum"), [(-1, b"x" * 16), (SLOT_BYTES + 1, b"x" * 16), (1, b"short")]
)
def test_commit_refuses_impossible_content(length: int, checksum: bytes) -> None:
    book = make_book()
    (key,) = reserve(book, "a" * 32)
    with pytest.raises(InvalidRequest):
        book.commit("a" * 32, [(key, length, checksum)], 0.0)


def test_a_committed_slot_is_not_committed_again_with_other_content() -> None:
    book = make_book()
    (key,) = reserve(book, "a" * 32)
    book.commit("a" * 32, [(key, 1, b"x" * 16)], 0.0)
    book.commit("a" * 32, [(key, 1, b"x" * 16)], 0.0)
    with pytest.raises(InvalidRequest, match="another content"):
        book.commit("a" * 32, [(key, 2, b"x" * 16)], 0.0)


@pytest.mark.parametrize("owner", ["", "Prefill", "a/../b", "x" * 65])
def test_owner_must_be_an_instance_name(owner: str) -> None:
    with pytest.raises(InvalidRequest, match="instance"):
        reserve(make_book(), "a" * 32, owner)


def test_a_lease_belongs_to_one_owner() -> None:
    book = make_book()
    reserve(book, "a" * 32)
    with pytest.raises(InvalidRequest, match="another owner"):
        reserve(book, "a" * 32, "prefill-b")


def test_an_extent_in_use_is_not_dropped() -> None:
    book = make_book()
    reserve(book, "a" * 32)
    assert book.idle_extents(except_slot_bytes=8192) == []
    with pytest.raises(InvariantViolated):
        book.drop_extent(1)
    book.release(["a" * 32])
    assert book.idle_extents(except_slot_bytes=8192) == [1]
    book.drop_extent(1)
    assert book.num_free(SLOT_BYTES) == 0
    book.check_integrity()


@pytest.mark.parametrize("num_bytes", [1, 4096, 4097, 100_000, 1 << 20, 2_949_120, 2_949_121])
def test_size_class_wastes_less_than_an_eighth_or_a_page(num_bytes: int) -> None:
    slot_bytes = size_class(num_bytes)
    assert slot_bytes % 4096 == 0
    assert 0 <= slot_bytes - num_bytes < max(4096, num_bytes / 8)
    assert size_class(slot_bytes) == slot_bytes
