"""The index against plain sets of blocks, one a view."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from finback.services.router.holder_sets import HolderSets
from finback.services.router.prefix_index import IndexView, PrefixIndex, keys_of


def name(number: int) -> bytes:
    return bytes([number]) * 32


def joined(numbers: list[int]) -> bytes:
    return b"".join(map(name, numbers))


NUMBERS = st.lists(st.integers(0, 12), max_size=8)
VIEWS = st.integers(0, 3)
SALTS, TIERS = st.sampled_from("st"), st.sampled_from(["host", "file"])


class Index(RuleBasedStateMachine):
    """Views are opened, filled, activated, cleared and dropped in any order."""

    @initialize(is_tight=st.booleans())
    def begin(self, is_tight: bool) -> None:
        self.index = PrefixIndex()
        if is_tight:  # numbers of sets are used again soon
            self.index._sets._collect_at = 2
        self.views: dict[int, tuple[IndexView, set[tuple[str, str, int]], bool]] = {}

    def view(self, at: int) -> tuple[IndexView, set[tuple[str, str, int]]]:
        if at not in self.views:
            self.views[at] = (self.index.open_view(f"i{at}"), set(), False)
        return self.views[at][:2]

    @rule(at=VIEWS, salt=SALTS, tier=TIERS, numbers=NUMBERS)
    def store(self, at: int, salt: str, tier: str, numbers: list[int]) -> None:
        view, blocks = self.view(at)
        view.store(salt, tier, joined(numbers))
        blocks |= {(salt, tier, n) for n in numbers}

    @rule(at=VIEWS, salt=SALTS, tier=TIERS, numbers=NUMBERS)
    def remove(self, at: int, salt: str, tier: str, numbers: list[int]) -> None:
        view, blocks = self.view(at)
        view.remove(salt, tier, joined(numbers))
        blocks -= {(salt, tier, n) for n in numbers}

    @rule(at=VIEWS)
    def activate(self, at: int) -> None:
        view, blocks = self.view(at)
        view.activate()
        self.views[at] = (view, blocks, True)

    @rule(at=VIEWS)
    def clear(self, at: int) -> None:
        view, blocks = self.view(at)
        view.clear()
        blocks.clear()

    @rule(at=VIEWS)
    def drop(self, at: int) -> None:
        self.view(at)[0].drop()
        del self.views[at]

    @rule()
    def sweep(self) -> None:
        for _ in range(256):
            self.index.sweep()
        assert not self.index.needs_sweep
        assert len(self.index) == len(self.truth(only_active=False))

    @rule()
    def collect(self) -> None:
        self.index._sets._collect_at = 2

    def truth(self, *, only_active: bool = True) -> dict[int, set[tuple[str, str, str]]]:
        """Holders by block number."""
        found: dict[int, set[tuple[str, str, str]]] = {}
        for at, (_, blocks, is_active) in self.views.items():
            for salt, tier, number in blocks:
                if is_active or not only_active:
                    found.setdefault(number, set()).add((f"i{at}", salt, tier))
        return found

    @invariant()
    def every_block_has_its_holders(self) -> None:
        if not hasattr(self, "index"):
            return
        truth, holders = self.truth(), self.index.holders()
        for number in range(13):
            found = set()
            for mask, count in self.index.segments(keys_of(name(number))):
                assert count == 1
                found |= {holder for bit, holder in holders.items() if mask >> bit & 1}
            assert found == truth.get(number, set())
        sizes = Counter(holder for found in truth.values() for holder in found)
        assert self.index.num_held() == dict(sizes)


Index.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestIndex = Index.TestCase


def test_segments_end_where_nobody_holds_a_block() -> None:
    index = PrefixIndex()
    one, two = index.open_view("one"), index.open_view("two")
    one.store("s", "device", joined([0, 1, 2, 5]))
    two.store("s", "device", joined([0, 2]))
    one.activate()
    two.activate()
    found = index.segments(keys_of(joined([0, 1, 2, 3, 5])))
    assert [count for _, count in found] == [1, 1, 1]
    assert found[0][0] == found[2][0] != found[1][0]
    assert index.segments(keys_of(joined([9, 0]))) == []


def test_a_full_index_takes_no_new_blocks() -> None:
    index = PrefixIndex(max_blocks=3)
    view = index.open_view("one")
    view.activate()
    view.store("s", "device", joined([0, 1, 2, 3, 4]))
    assert len(index) == 3 and index.num_refused == 2
    view.remove("s", "device", joined([0, 1, 2, 3, 4]))
    view.store("s", "device", joined([3, 4]))
    assert len(index) == 2 and index.num_held() == {("one", "s", "device"): 2}


def test_too_many_sets_blur_to_the_newest_holder() -> None:
    sets = HolderSets(max_sets=3)
    one, two = sets.number_of(1, fallback=1), sets.number_of(2, fallback=2)
    assert sets.number_of(3, fallback=2) == two and sets.num_blurred == 1
    assert one != two


def test_torn_hashes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        keys_of(b"x" * 31)
