"""Copies blocks from the arena into the pool, all blocks' first layers first. On a thread of its own.

Bytes go through a buffer that fits the processor's cache: hashed there, then put where the pool wants
them. The pool's room is written while a step runs, which is safe, for nobody else has that room: its
reference is only given back when the arrival is over.
"""

from collections.abc import Callable
from dataclasses import dataclass

from finback.shared.engine.arrival import Arrival
from finback.shared.kv.layout import BlockGeometry
from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.shm import ArenaReader
from finback.shared.lanes.shm_parts import BlockRead
from finback.shared.lanes.ticket import Ticket

PutLayers = Callable[[int, int, int, memoryview], None]
"""(block id, first layer, end, [layer, k/v, token, head, dim]) into the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A stored block, its name, the tokens it must be of (int32 LE), and its room in the pool."""

    hash: bytes
    ticket: Ticket
    tokens: bytes
    block_id: int


def copy_layers(
    arrival: Arrival,
    incoming: list[Incoming],
    reader: ArenaReader,
    geometry: BlockGeometry,
    put: PutLayers,
) -> CorruptData | None:
    """Run an arrival to its end. Returns what was wrong with block `arrival.num_good`, if it was."""
    num_good, error = 0, None
    try:
        reads = [BlockRead(reader, one.ticket) for one in incoming]
        if _copy(arrival, incoming, reads, geometry, put):
            num_good, error = _judge(incoming, reads)
    except CorruptData as gone:
        error = gone
    finally:
        arrival.conclude(num_good)
    return error


def _copy(
    arrival: Arrival,
    incoming: list[Incoming],
    reads: list[BlockRead],
    geometry: BlockGeometry,
    put: PutLayers,
) -> bool:
    """False: it was given up."""
    layer_bytes = geometry.block_bytes // geometry.num_layers
    buffer = memoryview(bytearray(layer_bytes * max(end - first for first, end in arrival.parts)))
    for first, end in arrival.parts:
        part = buffer[: layer_bytes * (end - first)]
        for one, read in zip(incoming, reads, strict=True):
            if arrival.is_given_up:
                return False
            read.next(part)
            put(one.block_id, first, end, part)
        if end < geometry.num_layers:
            arrival.tell(end)
    return True


def _judge(incoming: list[Incoming], reads: list[BlockRead]) -> tuple[int, CorruptData | None]:
    """(leading blocks that are good, why the next one is not)."""
    for index, (one, read) in enumerate(zip(incoming, reads, strict=True)):
        tokens = memoryview(bytearray(len(one.tokens)))
        try:
            read.next(tokens)
            read.finish()
            if tokens != one.tokens:
                raise CorruptData("tokens", "the block holds other tokens")
        except CorruptData as error:
            return index, error
    return len(incoming), None
