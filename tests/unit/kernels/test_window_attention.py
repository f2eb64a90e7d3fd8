"""Windows over rings against loops over positions: chunks, floors, and rings that go round."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.kernels.store_window.reference import store_window
from finback.kernels.window_attention.reference import window_attention

HEADS, KV_HEADS, DIM = 4, 2, 8


def _naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, window: int, floor: int
) -> torch.Tensor:
    """Rows from position `first` on; k, v: [all positions, kv_heads, dim]."""
    out = torch.empty(q.shape[0], HEADS, DIM)
    for row in range(q.shape[0]):
        own = first + row
        seen = range(max(0, floor, own - window + 1), own + 1)
        for head in range(HEADS):
            pair = head // (HEADS // KV_HEADS)
            scores = torch.stack([q[row, head] @ k[at, pair] * 0.3 for at in seen])
            weights = scores.softmax(0)
            out[row, head] = sum(w * v[at, pair] for w, at in zip(weights, seen, strict=True))
    return out


@settings(deadline=None, max_examples=40)
@given(
    window=st.integers(1, 9),
    rollback=st.integers(0, 4),
    steps=st.lists(st.lists(st.integers(1, 14), min_size=2, max_size=2), min_size=1, max_size=4),
    starts=st.lists(st.integers(0, 12), min_size=2, max_size=2),
    seed=st.integers(0, 99),
)
def test_rows_see_their_window(
    window: int, rollback: int, steps: list[list[int]], starts: list[int], seed: int
) -> None:
    """Two sequences in slots 2 and 0; each begins at `start`, which is its floor, in a used ring."""
    torch.manual_seed(seed)
    ring = torch.randn(3, window + rollback, 2, KV_HEADS, DIM)
    slots, floors = torch.tensor([2, 0]), torch.tensor(starts)
    totals = [start + sum(step[i] for step in steps) for i, start in enumerate(starts)]
    q = [torch.randn(total, HEADS, DIM) for total in totals]
    k, v = ([torch.randn(total, KV_HEADS, DIM) for total in totals] for _ in range(2))
    at = list(starts)
    for counts in steps:
        spans = [slice(begin, begin + n) for begin, n in zip(at, counts, strict=True)]
        mine, keys, values = (
            torch.cat([part[i][span] for i, span in enumerate(spans)]) for part in (q, k, v)
        )
        cu = torch.tensor([0, counts[0], sum(counts)])
        lens = torch.tensor([span.stop for span in spans])
        found = window_attention(mine, keys, values, ring, slots, cu, lens, floors, window, 0.3)
        store_window(keys, values, ring, slots, cu, lens)
        wanted = [
            _naive(q[i][span], k[i], v[i], span.start, window, starts[i])
            for i, span in enumerate(spans)
        ]
        torch.testing.assert_close(found, torch.cat(wanted))
        at = [span.stop for span in spans]


def test_a_bfloat16_ring_rounds_chunks_alike() -> None:
    """A key is the same number whether it comes from the ring or from the step's own rows."""
    torch.manual_seed(0)
    q = torch.randn(6, HEADS, DIM)
    k, v = torch.randn(6, KV_HEADS, DIM), torch.randn(6, KV_HEADS, DIM)
    found = []
    for ends in ([6], [1, 2, 3, 4, 5, 6]):
        ring = torch.zeros(1, 5, 2, KV_HEADS, DIM, dtype=torch.bfloat16)
        where, begin = (torch.tensor([0]), torch.tensor([0])), 0
        for end in ends:
            rows, lens = slice(begin, end), torch.tensor([end])
            cu = torch.tensor([0, end - begin])
            mixed = window_attention(
                q[rows], k[rows], v[rows], ring, where[0], cu, lens, where[1], 4, 0.3
            )
            store_window(k[rows], v[rows], ring, where[0], cu, lens)
            begin = end
        found.append(mixed[-1])
    torch.testing.assert_close(found[0], found[1])
