"""The pool against a twin that scans lists."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from finback.shared.engine.block_pool import BlockPool
from finback.shared.errors import InvariantViolated


class SlowPool:
    """Blocks as a list of dicts; every question is answered by looking at all of them."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks: list[dict[str, Any]] = [
            {"ref": 0, "content": None, "freed": -1} for _ in range(num_blocks)
        ]
        self.clock = 0

    def num_free(self) -> int:
        return sum(block["ref"] == 0 for block in self.blocks)

    def match(self, wanted: list[tuple[bytes, bytes]]) -> list[int]:
        found: list[int] = []
        for pair in wanted:
            where = [i for i, block in enumerate(self.blocks) if block["content"] == pair]
            if not where:
                break
            found += where
        return found

    def may_evict(self, block_id: int) -> bool:
        """Only the least recently freed one, and only when no block without content is free."""
        free = [block for block in self.blocks if block["ref"] == 0]
        block = self.blocks[block_id]
        if block["content"] is None:
            return True
        return all(b["content"] is not None and b["freed"] >= block["freed"] for b in free)


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 6))
    def start(self, num_blocks: int) -> None:
        self.pool, self.twin = BlockPool(num_blocks), SlowPool(num_blocks)
        self.owned: list[list[int]] = []

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        got = self.pool.allocate(count)
        assert (got is None) == (count > self.twin.num_free())
        for block_id in got or ():
            assert self.twin.blocks[block_id]["ref"] == 0
            assert self.twin.may_evict(block_id)
            self.twin.blocks[block_id] = {"ref": 1, "content": None, "freed": -1}
        if got:
            self.owned.append(got)

    @rule(data=st.data())
    def release(self, data: Any) -> None:
        if not self.owned:
            return
        block_ids = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.pool.release(block_ids)
        for block_id in reversed(block_ids):
            block = self.twin.blocks[block_id]
            block["ref"] -= 1
            self.twin.clock += 1
            block["freed"] = self.twin.clock

    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c"]))
    def register(self, data: Any, name: bytes) -> None:
        held = [b for ids in self.owned for b in ids if self.twin.blocks[b]["content"] is None]
        if not held:
            return
        block_id = data.draw(st.sampled_from(held))
        is_new = all((b["content"] or (b"",))[0] != name for b in self.twin.blocks)
        assert self.pool.register(block_id, name, name + b"tokens") == is_new
        if is_new:
            self.twin.blocks[block_id]["content"] = (name, name + b"tokens")

    @rule(names=st.lists(st.sampled_from([b"a", b"b", b"c"]), unique=True))
    def acquire(self, names: list[bytes]) -> None:
        wanted = [(name, name + b"tokens") for name in names]
        found = self.pool.match(wanted)
        assert found == self.twin.match(wanted)
        assert self.pool.count_free(found) == sum(self.twin.blocks[b]["ref"] == 0 for b in found)
        self.pool.acquire(found)
        for block_id in found:
            self.twin.blocks[block_id]["ref"] += 1
        if found:
            self.owned.append(found)

    @rule(data=st.data())
    def unregister(self, data: Any) -> None:
        block_id = data.draw(st.integers(0, len(self.twin.blocks) - 1))
        self.pool.unregister([block_id])
        self.twin.blocks[block_id]["content"] = None

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert self.pool.num_free == self.twin.num_free()
        assert self.pool.num_cached == sum(b["content"] is not None for b in self.twin.blocks)
        for block_id, block in enumerate(self.twin.blocks):
            assert self.pool.ref_count(block_id) == block["ref"]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_a_colliding_hash_is_no_hit() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1) or []
    pool.register(block_id, b"hash", b"these tokens")
    assert pool.match([(b"hash", b"those tokens")]) == []
    assert pool.match([(b"hash", b"these tokens")]) == [block_id]


def test_freeing_twice_is_a_bug() -> None:
    pool = BlockPool(1)
    taken = pool.allocate(1) or []
    pool.release(taken)
    with pytest.raises(InvariantViolated, match="freed twice"):
        pool.release(taken)


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    chain = pool.allocate(3) or []
    for index, block_id in enumerate(chain):
        pool.register(block_id, bytes([index]), b"")
    pool.release(chain)
    assert pool.allocate(1) == [chain[2]]
    assert pool.match([(bytes([i]), b"") for i in range(3)]) == chain[:2]


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)
