"""Any sequence of calls, restarts and losses of the index, against a dictionary."""

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from finback.services.cache.segments.disk import Disk
from finback.services.cache.segments.store import SegmentStore
from support.segments import MIB, SALT, Clocks, block, hash_of, open_store, payload_of, read

NUMBERS = st.integers(0, 11)
SIZE = 30_000
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Kept:
    """What the twin knows of a block; `earlier`: ends that it had before."""

    expires_unix_s: float
    tenant: str
    earlier: tuple[float, ...] = ()


class SegmentStoreMachine(RuleBasedStateMachine):
    """The twin is a dictionary; room is never short, so nothing is evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clocks = Clocks()
        self.disk = Disk()
        self.kept: dict[int, Kept] = {}
        self.pinned: dict[str, set[int]] = {}
        self.store = self._open()

    def _open(self) -> SegmentStore:
        self.disk = Disk(punch=self.disk.can_punch)
        self.store = open_store(self.folder, clocks=self.clocks, segment_bytes=MIB, disk=self.disk)
        return self.store

    def _is_there(self, number: int) -> bool:
        kept = self.kept.get(number)
        if kept is None:
            return False
        is_pinned = any(number in numbers for numbers in self.pinned.values())
        return is_pinned or not 0 < kept.expires_unix_s <= self.clocks.unix_s

    @rule(number=NUMBERS, hours=st.sampled_from([0, 1, 5]), tenant=st.sampled_from("ab"))
    def put(self, number: int, hours: int, tenant: str) -> None:
        expires = self.clocks.unix_s + hours * HOUR_S if hours else 0.0
        record, payload = block(number, SIZE, expires_unix_s=expires, tenant=tenant)
        is_new = self.store.put(record, payload)
        before = self.kept.get(number)
        assert is_new == (before is None)
        if before is None:
            self.kept[number] = Kept(expires, tenant)
        elif before.expires_unix_s and (not expires or expires > before.expires_unix_s):
            earlier = (*before.earlier, before.expires_unix_s)
            self.kept[number] = replace(before, expires_unix_s=expires, earlier=earlier)

    @rule(tenant=st.sampled_from("ab"))
    def forget_tenant(self, tenant: str) -> None:
        gone = [number for number, kept in self.kept.items() if kept.tenant == tenant]
        assert self.store.forget(tenant=tenant) == len(gone)
        for number in gone:
            del self.kept[number]

    @rule(numbers=st.sets(NUMBERS, min_size=1, max_size=4))
    def forget_some(self, numbers: set[int]) -> None:
        gone = numbers & self.kept.keys()
        assert self.store.forget(hashes=[hash_of(number) for number in numbers]) == len(gone)
        for number in gone:
            del self.kept[number]

    @rule(name=st.sampled_from("xy"), numbers=st.sets(NUMBERS, min_size=1, max_size=3))
    def pin(self, name: str, numbers: set[int]) -> None:
        self.store.pin(name, SALT, [hash_of(number) for number in numbers])
        self.pinned[name] = numbers

    @rule(name=st.sampled_from("xy"))
    def unpin(self, name: str) -> None:
        assert self.store.unpin(name) == (self.pinned.pop(name, None) is not None)

    @rule(minutes=st.sampled_from([1, 30, 120]))
    def sweep(self, minutes: int) -> None:
        # In steps, as the service does it; a leap would be doubted.
        self.clocks.pass_s(minutes * 60)
        gone = [number for number in self.kept if not self._is_there(number)]
        assert self.store.sweep().num_expired == len(gone)
        for number in gone:
            del self.kept[number]

    @rule()
    def restart(self) -> None:
        self.store.close()
        self._open()

    @rule()
    def lose_the_index(self) -> None:
        """A block whose end was put off may have its first one again, if it was not copied since."""
        self.store.close()
        (self.folder / "local" / "index.sqlite").unlink()
        self._open()
        found = {record.hash: record.expires_unix_s for record in self.store.records()}
        assert found.keys() == {hash_of(number) for number in self.kept}
        for number, kept in self.kept.items():
            expires = found[hash_of(number)]
            assert expires == kept.expires_unix_s or expires in kept.earlier
            self.kept[number] = replace(kept, expires_unix_s=expires)

    @rule()
    def lose_the_holes(self) -> None:
        self.disk.can_punch = False

    @rule(numbers=st.lists(NUMBERS, unique=True, min_size=1))
    def look(self, numbers: list[int]) -> None:
        found = self.store.lookup(SALT, [hash_of(number) for number in numbers])
        assert found == [self._is_there(number) for number in numbers]

    @invariant()
    def all_is_as_the_twin_says(self) -> None:
        for number in range(12):
            found = read(self.store, number, SIZE)
            expected = payload_of(number, SIZE) if self._is_there(number) else found
            assert found == expected
            assert isinstance(found, bytes) == self._is_there(number)
        assert self.store.stats().total.num_blocks == len(self.kept)
        self.store.check_integrity()

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


SegmentStoreMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None
)
TestSegmentStore = SegmentStoreMachine.TestCase
