"""What both kinds of expert kernels begin and end with: rows sorted by expert, and choices added up."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

_SCAN: Final = 2048


@triton.jit(do_not_specialize=["num_pairs"])
def _sort(
    experts_ptr, order_ptr, owners_ptr, firsts_ptr, counter_ptr, num_pairs,
    BLOCK_ROWS: tl.constexpr, SCAN: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One expert: where its pairs begin, which they are, and the blocks they make."""
    expert = tl.program_id(0)
    start, count = 0, 0
    for at in range(0, num_pairs, SCAN):
        index = at + tl.arange(0, SCAN)
        keys = tl.load(experts_ptr + index, mask=index < num_pairs, other=-1)
        start += tl.sum(((keys < expert) & (keys >= 0)).to(tl.int32), axis=0)
        count += tl.sum((keys == expert).to(tl.int32), axis=0)
    place = start
    for at in range(0, num_pairs, SCAN):
        index = at + tl.arange(0, SCAN)
        keys = tl.load(experts_ptr + index, mask=index < num_pairs, other=-1)
        own = (keys == expert).to(tl.int32)
        rank = place + tl.cumsum(own, axis=0) - 1
        tl.store(order_ptr + rank, index, mask=own == 1)
        place += tl.sum(own, axis=0)
    num_blocks = (count + BLOCK_ROWS - 1) // BLOCK_ROWS
    base = tl.atomic_add(counter_ptr, num_blocks)
    for at in range(0, num_blocks, MOST):
        block = at + tl.arange(0, MOST)
        used = block < num_blocks
        first = start + block * BLOCK_ROWS
        tl.store(owners_ptr + base + block, expert + tl.zeros_like(block), mask=used)
        tl.store(firsts_ptr + 2 * (base + block), first, mask=used)
        last = tl.minimum(first + BLOCK_ROWS, start + count)
        tl.store(firsts_ptr + 2 * (base + block) + 1, last, mask=used)


@triton.jit
def _add(
    each_ptr, experts_ptr, out_ptr, size, NUM_CHOICES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row, BLOCK channels: its choices one after the other."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(NUM_CHOICES):
        pair = row * NUM_CHOICES + choice
        there = tl.load(experts_ptr + pair) >= 0
        each = tl.load(each_ptr + pair * size + dims, mask=inside & there, other=0.0)
        total += each.to(tl.float32)
    tl.store(out_ptr + row * size + dims, total, mask=inside)


@triton.jit
def block_rows(block, firsts_ptr, owners_ptr, order_ptr, BLOCK_ROWS: tl.constexpr):
    """(expert, pairs of this block, which of them are there)."""
    expert = tl.load(owners_ptr + block)
    first = tl.load(firsts_ptr + 2 * block)
    end = tl.load(firsts_ptr + 2 * block + 1)
    at = first + tl.arange(0, BLOCK_ROWS)
    inside = at < end
    return expert, tl.load(order_ptr + at, mask=inside, other=0), inside


class Blocks(NamedTuple):
    """Pairs (row, choice) sorted by expert and cut into blocks of one expert each, in no order.

    `owners` int32 [B]: a block's expert, -1 for none; `firsts` int32 [B, 2]: its first place in `order`
    int32 [pairs], and the one behind its last.
    """

    owners: torch.Tensor
    firsts: torch.Tensor
    order: torch.Tensor


def cut_blocks(experts: torch.Tensor, num_experts: int, rows: int) -> Blocks:
    """Of int64 [N, k], on the device: shapes depend on N and k alone, so that it can be captured."""
    num_pairs = experts.numel()
    most = min(num_pairs, num_experts + num_pairs // rows)
    words = torch.full((1 + 3 * most + num_pairs,), -1, dtype=torch.int32, device=experts.device)
    counter, owners = words[:1].zero_(), words[1 : 1 + most]
    firsts, order = words[1 + most : 1 + 3 * most], words[1 + 3 * most :]
    scan = min(_SCAN, triton.next_power_of_2(num_pairs))
    _sort[(num_experts,)](
        experts, order, owners, firsts, counter, num_pairs,
        BLOCK_ROWS=rows, SCAN=scan, MOST=16, num_warps=4,
    )  # fmt: skip
    return Blocks(owners=owners, firsts=firsts.view(most, 2), order=order)


def added(each: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """float32 [N, size] of each [N * k, size], choice by choice; -1 in experts [N, k] is none."""
    num_rows, num_choices = experts.shape
    size = each.shape[1]
    out = torch.empty((num_rows, size), dtype=torch.float32, device=each.device)
    block = min(1024, triton.next_power_of_2(size))
    _add[(num_rows, triton.cdiv(size, block))](
        each, experts, out, size, NUM_CHOICES=num_choices, BLOCK=block, num_warps=4
    )
    return out
