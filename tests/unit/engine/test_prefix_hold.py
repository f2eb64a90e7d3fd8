"""Holds on prefixes: whatever is held, restored and given up, the pool's books add up."""

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from finback.shared.engine.block_pool import BlockPool
from finback.shared.engine.prefix_hold import PrefixHold, PrefixHolds
from finback.shared.engine.sequence import TokenIds

SIZE = 2
SALT = b"tenant"


def prompt(length: int, last: int) -> TokenIds:
    """Prompts that are prefixes of each other but for their last token."""
    return np.append(np.arange(length), last).astype(np.int32)


class HoldMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 7))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.holds = PrefixHolds(self.pool, SIZE, b"key")
        self.live: list[PrefixHold] = []
        self.owned: list[int] = []
        self.told: set[bytes] = set()
        self.pool.on_change = self._on_change

    def _on_change(self, name: bytes, is_there: bool) -> None:
        assert (name in self.told) != is_there
        (self.told.add if is_there else self.told.remove)(name)

    @rule(length=st.integers(0, 9), last=st.integers(50, 52))
    def hold(self, length: int, last: int) -> None:
        tokens = prompt(length, last)
        hold = self.holds.hold(tokens, SALT)
        assert len(hold.hashes) == (tokens.size - 1) // SIZE
        assert hold.hashes == self.holds.chain(tokens, SALT)[: len(hold.hashes)]
        # A twin: which of them can be found, one by one.
        known = [self.pool.find(name) is not None for name in hold.hashes]
        assert [index in hold.block_ids for index in range(len(known))] == known
        assert hold.num_device == (known.index(False) if False in known else len(known))
        self.live.append(hold)

    @rule(data=st.data(), spare=st.integers(0, 2))
    def take_room(self, data: Any, spare: int) -> None:
        hold = self._some(data)
        if hold is None or not hold.missing:
            return
        index = data.draw(st.sampled_from(hold.missing))
        num_free = self.pool.num_free
        room = self.holds.take_room(hold, index, spare)
        assert (room is None) == (hold.is_released or num_free <= spare)

    @rule(data=st.data(), is_good=st.booleans())
    def land(self, data: Any, is_good: bool) -> None:
        hold = self._some(data)
        if hold is None or not hold.pending:
            return
        index = data.draw(st.sampled_from(sorted(hold.pending)))
        is_there = self.holds.land(hold, index, is_good=is_good)
        assert is_there == (index in hold.block_ids)
        assert is_there or not is_good
        if is_there:
            assert self.pool.find(hold.hashes[index]) is not None

    @rule(data=st.data())
    def release(self, data: Any) -> None:
        hold = self._some(data)
        if hold is not None:
            self.holds.release(hold)
            self.holds.release(hold)
            self.live.remove(hold)
            # What was on its way lands nowhere.
            assert not self.holds.land(hold, 0, is_good=True)

    @rule()
    def give_up(self) -> None:
        expected = self.pool.num_free + self.holds.num_to_give_up([])
        while self.holds.give_up_one():
            pass
        assert len(self.holds) == 0 and self.pool.num_free == expected
        self.live.clear()

    @rule(count=st.integers(1, 3))
    def others_take(self, count: int) -> None:
        self.owned += self.pool.allocate(count) or []

    @rule()
    def others_give(self) -> None:
        self.pool.release(self.owned)
        self.owned = []

    def _some(self, data: Any) -> PrefixHold | None:
        return data.draw(st.sampled_from(self.live)) if self.live else None

    @invariant()
    def books_add_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        refs = [*self.holds.block_ids(), *self.owned]
        for block_id in range(self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == refs.count(block_id)
        assert self.told == set(self.pool.hashes())


TestHolds = HoldMachine.TestCase
TestHolds.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
