"""The pool of snapshots against a list that is searched from the start, with a clock of our own."""

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from finback.shared.kv.state_snapshots import SnapshotPool

MAX_BYTES = 100
LIFE_S = 180.0
NAMES = [bytes([i]) * 32 for i in range(6)]


@dataclass
class _Kept:
    name: bytes
    tokens: bytes
    payload: bytes
    used_s: float


class SnapshotMachine(RuleBasedStateMachine):
    """`kept` is in the order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SnapshotPool(MAX_BYTES, LIFE_S)
        self.kept: list[_Kept] = []
        self.now_s = 1000.0

    def _expire(self) -> None:
        self.kept = [k for k in self.kept if self.now_s < k.used_s + LIFE_S]

    @rule(
        name=st.sampled_from(NAMES), tokens=st.sampled_from([b"a", b"b"]), size=st.integers(1, 120)
    )
    def put(self, name: bytes, tokens: bytes, size: int) -> None:
        self._expire()
        self.kept = [k for k in self.kept if k.name != name]
        payload = bytes([size % 251]) * size
        assert self.pool.put(name, tokens, payload, self.now_s) == (size <= MAX_BYTES)
        if size > MAX_BYTES:
            return
        while sum(len(k.payload) for k in self.kept) + size > MAX_BYTES:
            self.kept.pop(0)
        self.kept.append(_Kept(name, tokens, payload, self.now_s))

    @rule(name=st.sampled_from(NAMES))
    def take(self, name: bytes) -> None:
        self._expire()
        found = [k for k in self.kept if k.name == name]
        assert self.pool.take(name, self.now_s) == (found[0].payload if found else None)
        if found:
            self.kept.remove(found[0])
            found[0].used_s = self.now_s
            self.kept.append(found[0])

    @rule(seconds=st.sampled_from([0.0, 1.0, 90.0, 179.9, 180.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(blocks=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from([b"a", b"b"]))))
    def look(self, blocks: Any) -> None:
        self._expire()
        known = {(k.name, k.tokens) for k in self.kept}
        wanted = [i for i, pair in enumerate(blocks) if pair in known]
        assert self.pool.indexes(blocks, self.now_s) == wanted

    @invariant()
    def books_add_up(self) -> None:
        self.pool.check_integrity()


TestSnapshots = SnapshotMachine.TestCase
TestSnapshots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_counts_and_clear() -> None:
    pool = SnapshotPool(10, life_s=5.0)
    assert pool.put(b"a", b"t", b"12345", 0.0)
    assert pool.put(b"b", b"t", b"12345", 1.0)
    assert pool.put(b"c", b"t", b"1", 2.0)
    assert (len(pool), pool.num_evicted, b"a" in pool) == (2, 1, False)
    assert pool.take(b"b", 3.0) == b"12345"
    pool.expire(7.5)
    assert (len(pool), pool.num_expired, pool.num_hits) == (1, 1, 1)
    pool.clear()
    pool.check_integrity()
    assert len(pool) == 0
