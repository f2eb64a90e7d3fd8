"""Groups of sequences that begin alike, against what the definition says."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from finback.shared.engine import prefix_groups

BLOCK_SIZE = 4
WIDTH = 8


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Block tables whose leading blocks come from a few chains, and context lengths."""
    chains = [[100 * (chain + 1) + i for i in range(WIDTH)] for chain in range(2)]
    rows, lens = [], []
    for row in range(draw(st.integers(1, 9))):
        chain, kept = draw(st.integers(0, 1)), draw(st.integers(0, WIDTH))
        rows.append(chains[chain][:kept] + [1000 + WIDTH * row + i for i in range(kept, WIDTH)])
        lens.append(draw(st.integers(1, WIDTH * BLOCK_SIZE)))
    return np.array(rows, dtype=np.int32), np.array(lens, dtype=np.int64)


@given(case=tables(), num_members=st.integers(2, 4))
@settings(max_examples=200, deadline=None)
def test_groups_share_what_they_say(case: tuple[np.ndarray, np.ndarray], num_members: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_groups, "MIN_SHARED_TOKENS", 2 * BLOCK_SIZE)
        block_tables, lens = case
        found = prefix_groups.find_groups(block_tables, lens, BLOCK_SIZE, num_members)
    whole = (lens - 1) // BLOCK_SIZE
    # By definition: who has two whole blocks, and the same second one as somebody else.
    able = [row for row in range(lens.size) if whole[row] >= 2]
    partners = {
        row: [other for other in able if block_tables[row, 1] == block_tables[other, 1]]
        for row in able
    }
    if found is None:
        assert all(len(others) < 2 for others in partners.values())
        return
    seen: list[int] = []
    for num_blocks, members in found.chunks:
        assert 2 <= len(members) <= num_members
        assert num_blocks >= 2
        seen += members
        for row in members:
            assert found.start_blocks[row] == num_blocks <= whole[row]
            assert (block_tables[row, :num_blocks] == block_tables[members[0], :num_blocks]).all()
    assert sorted(seen) == np.flatnonzero(found.start_blocks).tolist()
    for row, others in partners.items():
        if row not in seen:  # the one left over when the others filled their chunks
            assert len(others) % num_members in (0, 1)


def test_nothing_is_grouped_in_short_tables() -> None:
    one = np.zeros((2, 3), dtype=np.int32)
    lens = np.full(2, 9, dtype=np.int64)
    assert prefix_groups.find_groups(one, lens, 4, 8) is None
    assert prefix_groups.find_groups(np.zeros((2, 400), np.int32), lens, 4, 8) is None
