"""A sequence's state at a multiple of 128 tokens as one run of bytes, and back.

There both kinds of open windows are empty, so what is kept is: the last window - 1 rows of every
layer's ring, and of a CSA layer the rows that its next entry overlaps, main and index: the halves
"for the next entry", contents and biased gates. Without those rows the next entry would be wrong
although the first tokens look right.
"""

from collections.abc import Iterator

import torch

from finback.shared.models.deepseek_v4.config import BLOCK_TOKENS, V4Config
from finback.shared.models.deepseek_v4.memory import LayerMemory, Tail, V4Memory
from finback.shared.models.deepseek_v4.memory_shape import has_indexer, has_overlap


def snapshot_bytes(config: V4Config, item_bytes: int) -> int:
    """Length of a snapshot whose rings have items of `item_bytes`."""
    total = config.num_layers * (config.window - 1) * config.head_dim * item_bytes
    for ratio in config.ratios:
        if has_overlap(ratio):
            total += 2 * 4 * ratio * config.head_dim
        if has_indexer(ratio):
            total += 2 * 4 * ratio * config.index_head_dim
    return total


def take_snapshot(memory: V4Memory, slot: int, position: int) -> torch.Tensor:
    """uint8 [snapshot_bytes]: the state after `position` tokens, a positive multiple of 128."""
    _check(position)
    parts = [
        part.contiguous().view(torch.uint8).flatten() for part in _parts(memory, slot, position)
    ]
    return torch.cat(parts)


def restore_snapshot(memory: V4Memory, slot: int, position: int, data: torch.Tensor) -> None:
    """Fill a slot from `take_snapshot`'s bytes. Raises ValueError for bytes of another length."""
    _check(position)
    at = 0
    for part, rows, columns, table in _targets(memory, slot, position):
        num_bytes = part.numel() * part.element_size()
        piece = data[at : at + num_bytes]
        if piece.numel() != num_bytes:
            raise ValueError(f"a snapshot of this model has more than {data.numel()} bytes")
        table[rows, :columns] = piece.clone().view(part.dtype).view(part.shape)
        at += num_bytes
    if at != data.numel():
        raise ValueError(f"a snapshot of this model has {at} bytes, not {data.numel()}")


def _check(position: int) -> None:
    if position < BLOCK_TOKENS or position % BLOCK_TOKENS:
        raise ValueError(f"snapshots are of multiples of {BLOCK_TOKENS} tokens, not {position}")


def _parts(memory: V4Memory, slot: int, position: int) -> Iterator[torch.Tensor]:
    for part, _, _, _ in _targets(memory, slot, position):
        yield part


_Target = tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]


def _targets(memory: V4Memory, slot: int, position: int) -> Iterator[_Target]:
    """(rows as they are now, their indexes, columns, table) of all that a snapshot holds."""
    config = memory.config
    for ratio, layer in zip(config.ratios, memory.layers, strict=True):
        yield _ring_part(layer, slot, position, config.window - 1)
        if has_overlap(ratio):
            yield from _tail_parts(layer.tail, slot, position, ratio)
        if has_indexer(ratio):
            yield from _tail_parts(layer.index_tail, slot, position, ratio)


def _ring_part(layer: LayerMemory, slot: int, position: int, num_rows: int) -> _Target:
    rows = _rows(slot, position, num_rows, layer.ring_rows)
    return layer.ring[rows], rows, layer.ring.shape[1], layer.ring


def _tail_parts(tail: Tail | None, slot: int, position: int, ratio: int) -> Iterator[_Target]:
    if tail is None:
        raise ValueError("a compressed layer has a tail")
    rows = _rows(slot, position, ratio, tail.num_rows)
    half = tail.contents.shape[1] // 2
    for table in (tail.contents, tail.gates):
        yield table[rows, :half], rows, half, table


def _rows(slot: int, position: int, num_rows: int, ring_rows: int) -> torch.Tensor:
    return slot * ring_rows + torch.arange(position - num_rows, position) % ring_rows
