"""Compressed entries in Triton: one program an entry; programs without one do nothing.

The number of programs depends on the shape of the step alone, so that it can be captured.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl


@triton.jit
def _channels(
    contents_ptr, gates_ptr, rows_ptr, table_ptr, entry, channels, num_rows, width,
    SIZE: tl.constexpr, OVERLAP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(some channels of the entry, rounded as it is stored; the sum of their squares)."""
    best = tl.full(channels.shape, float("-inf"), dtype=tl.float32)
    total = tl.zeros(channels.shape, dtype=tl.float32)
    mixed = tl.zeros(channels.shape, dtype=tl.float32)
    for start in range(0, num_rows, ROWS):
        at = start + tl.arange(0, ROWS)
        rows = tl.load(rows_ptr + entry * num_rows + at, mask=at < num_rows, other=-1)
        there = (rows >= 0)[:, None]
        places = tl.maximum(rows, 0).to(tl.int64) * width
        if OVERLAP:  # of two windows the first gives its first half of channels
            places += tl.where(at < num_rows // 2, 0, SIZE)
        places = places[:, None] + channels[None, :]
        gates = tl.load(gates_ptr + places, mask=there, other=float("-inf"))
        contents = tl.load(contents_ptr + places, mask=there, other=0.0)
        new = tl.maximum(best, tl.max(gates, axis=0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        fade, weights = tl.exp(best - safe), tl.exp(gates - safe[None, :])
        total = total * fade + tl.sum(weights, axis=0)
        mixed = mixed * fade + tl.sum(contents * weights, axis=0)
        best = new
    pooled = (mixed / total).to(table_ptr.dtype.element_ty).to(tl.float32)
    return pooled, tl.sum(pooled * pooled, axis=0)


@triton.jit
def _store(
    contents_ptr, gates_ptr, rows_ptr, targets_ptr, table_ptr, weight_ptr, cos_ptr, sin_ptr,
    num_rows, width, eps,
    SIZE: tl.constexpr, HALF: tl.constexpr, OVERLAP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Even and odd channels apart, since a rotation mixes a pair."""
    entry = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + entry).to(tl.int64)
    if target < 0:
        return
    pairs = tl.arange(0, SIZE // 2)
    even, squares = _channels(
        contents_ptr, gates_ptr, rows_ptr, table_ptr, entry, 2 * pairs, num_rows, width, SIZE,
        OVERLAP, ROWS,
    )  # fmt: skip
    odd, more = _channels(
        contents_ptr, gates_ptr, rows_ptr, table_ptr, entry, 2 * pairs + 1, num_rows, width, SIZE,
        OVERLAP, ROWS,
    )  # fmt: skip
    kind = table_ptr.dtype.element_ty
    factor = 1.0 / tl.sqrt((squares + more) / SIZE + eps)
    even = even * factor * tl.load(weight_ptr + 2 * pairs).to(tl.float32)
    odd = odd * factor * tl.load(weight_ptr + 2 * pairs + 1).to(tl.float32)
    even, odd = even.to(kind).to(tl.float32), odd.to(kind).to(tl.float32)
    angle = pairs - (SIZE // 2 - HALF)
    turns = angle >= 0
    cos = tl.load(cos_ptr + entry * HALF + angle, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + entry * HALF + angle, mask=turns, other=0.0)
    place = table_ptr + target * SIZE
    tl.store(place + 2 * pairs, (even * cos - odd * sin).to(kind))
    tl.store(place + 2 * pairs + 1, (even * sin + odd * cos).to(kind))


def store_entries(
    contents: torch.Tensor,
    gates: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
    overlap: bool,
) -> None:
    """See reference.py; C is a power of two."""
    num_entries, num_rows = rows.shape
    if num_entries:
        _store[(num_entries,)](
            contents, gates, rows, targets, table, weight, cos, sin, num_rows,
            contents.shape[1], eps, SIZE=table.shape[1], HALF=cos.shape[1], OVERLAP=overlap,
            ROWS=8, num_warps=4,
        )  # fmt: skip
