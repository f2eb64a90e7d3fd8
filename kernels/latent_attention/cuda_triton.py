"""Attention over chosen latent rows in Triton: a row is read once for all heads, as key and as value.

A program takes one query row with all its heads and a share of its rows; where there are fewer query
rows than the device has multiprocessors, shares are cut (split KV) and put together by a second
kernel. The accumulator [heads, D] stays in registers.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from finback.kernels.triton_launch import num_multiprocessors


@triton.jit
def _attend(
    queries, table_ptr, rows_ptr, first, last, num_rows, scale, best, total, mixed,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take rows [first, last) of one query's list in, online (Milakov and Gimelshein, 2018)."""
    dims = tl.arange(0, SIZE)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        rows = tl.load(rows_ptr + at, mask=at < last, other=-1)
        there = rows >= 0
        places = tl.where(there, rows, 0).to(tl.int64) * SIZE
        keys = tl.load(
            table_ptr + places[:, None] + dims[None, :], mask=there[:, None], other=0.0
        )  # fmt: skip
        scores = tl.dot(queries, tl.trans(keys)) * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, axis=1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - safe[:, None])
        fade = tl.exp2(best - safe)
        total = total * fade + tl.sum(weights, axis=1)
        mixed = mixed * fade[:, None]
        mixed = tl.dot(weights.to(keys.dtype), keys, mixed)
        best = new
    return best, total, mixed


@triton.jit
def _partial(
    queries_ptr, window_ptr, window_rows_ptr, entries_ptr, entry_rows_ptr, sinks_ptr, out_ptr,
    parts_ptr, stats_ptr, num_window, num_entries, share, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """One query row, one share of (window rows, entries); the whole result if there is one share."""
    query = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, SIZE)
    places = (query * HEADS + heads)[:, None] * SIZE + dims[None, :]
    queries = tl.load(queries_ptr + places)
    best = tl.full([HEADS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([HEADS], dtype=tl.float32)
    mixed = tl.zeros([HEADS, SIZE], dtype=tl.float32)
    first, last = part * share, (part + 1) * share
    best, total, mixed = _attend(
        queries, window_ptr, window_rows_ptr + query * num_window, first,
        tl.minimum(last, num_window), num_window, scale, best, total, mixed, SIZE, BLOCK,
    )  # fmt: skip
    best, total, mixed = _attend(
        queries, entries_ptr, entry_rows_ptr + query * num_entries,
        tl.maximum(first - num_window, 0), tl.minimum(last - num_window, num_entries),
        num_entries, scale, best, total, mixed, SIZE, BLOCK,
    )  # fmt: skip
    if IS_WHOLE:
        sink = tl.load(sinks_ptr + heads).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(best, sink)
        fade = tl.exp2(best - top)
        total = total * fade + tl.exp2(sink - top)
        result = mixed * (fade / total)[:, None]
        tl.store(out_ptr + places, result.to(out_ptr.dtype.element_ty))
    else:
        row = query * tl.num_programs(1) + part
        tl.store(parts_ptr + (row * HEADS + heads)[:, None] * SIZE + dims[None, :], mixed)
        tl.store(stats_ptr + (row * HEADS + heads) * 2, best)
        tl.store(stats_ptr + (row * HEADS + heads) * 2 + 1, total)


@triton.jit
def _combine(
    parts_ptr, stats_ptr, sinks_ptr, out_ptr, num_parts,
    HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One head of one query row: the shares in order, and the sink."""
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, SIZE)
    best = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
    total = 1.0
    mixed = tl.zeros([SIZE], dtype=tl.float32)
    for part in range(num_parts):
        row = (query * num_parts + part) * HEADS + head
        own = tl.load(stats_ptr + row * 2)
        new = tl.maximum(best, own)
        fade, weight = tl.exp2(best - new), tl.exp2(own - new)
        total = total * fade + tl.load(stats_ptr + row * 2 + 1) * weight
        mixed = mixed * fade + tl.load(parts_ptr + row * SIZE + dims) * weight
        best = new
    place = (query * HEADS + head) * SIZE + dims
    tl.store(out_ptr + place, (mixed / total).to(out_ptr.dtype.element_ty))


class LaunchShape(NamedTuple):
    """Rows a step, shares (0: as many as fill the device), and Triton's own two."""

    block: int = 64
    num_parts: int = 0
    num_warps: int = 8
    num_stages: int = 2


def latent_attention(
    queries: torch.Tensor,
    window: torch.Tensor,
    window_rows: torch.Tensor,
    entries: torch.Tensor,
    entry_rows: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
    *,
    shape: LaunchShape | None = None,
) -> torch.Tensor:
    """See reference.py. H is a power of two from 16 on, D a power of two; all of one dtype."""
    num_queries, num_heads, size = queries.shape
    if num_heads < 16 or num_heads & (num_heads - 1) or size & (size - 1):
        raise ValueError(f"heads and size must be powers of two, not {num_heads} and {size}")
    out = torch.empty_like(queries)
    if num_queries == 0:
        return out
    shape = shape or LaunchShape()
    num_rows = window_rows.shape[1] + entry_rows.shape[1]
    num_parts = shape.num_parts or _num_parts(num_queries, num_rows, queries.device)
    share = triton.cdiv(triton.cdiv(num_rows, num_parts), shape.block) * shape.block
    num_parts = triton.cdiv(num_rows, share)
    parts, stats = queries, queries  # not touched when there is one share
    if num_parts > 1:
        kind: Any = {"dtype": torch.float32, "device": queries.device}
        parts = torch.empty((num_queries, num_parts, num_heads, size), **kind)
        stats = torch.empty((num_queries, num_parts, num_heads, 2), **kind)
    _partial[(num_queries, num_parts)](
        queries, window, window_rows, entries, entry_rows, sinks, out, parts, stats,
        window_rows.shape[1], entry_rows.shape[1], share, scale * 1.4426950408889634,
        HEADS=num_heads, SIZE=size, BLOCK=shape.block, IS_WHOLE=num_parts == 1,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    if num_parts > 1:
        _combine[(num_queries, num_heads)](
            parts, stats, sinks, out, num_parts, HEADS=num_heads, SIZE=size, num_warps=4
        )
    return out


def _num_parts(num_queries: int, num_rows: int, device: torch.device) -> int:
    """Enough shares for every multiprocessor, none of them under 64 rows."""
    wanted = triton.cdiv(num_multiprocessors(device), num_queries)
    return int(max(1, min(wanted, num_rows // 64)))
