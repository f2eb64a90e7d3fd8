"""Single blocks in and out of the pool, in the host layout; checked on the loop, copied on the device.

The block ids are looked up when the work is queued. That is safe, for the device works in order: a
block that its sequence loses meanwhile is written by its next owner only behind this.
"""

from collections.abc import Callable
from functools import partial

from finback.shared.engine.runner import Runner
from finback.shared.engine.sequence import Sequence, SequenceKey, State
from finback.shared.engine.table import SequenceTable
from finback.shared.errors import InvalidRequest, NotFound
from finback.shared.kv.layout import BlockGeometry

Work = Callable[[], None]


class BlockPort:
    """What `Engine.export_block` and `Engine.import_block` do."""

    def __init__(self, table: SequenceTable, runner: Runner, geometry: BlockGeometry) -> None:
        self._table = table
        self._runner = runner
        self._geometry = geometry

    def exporting(self, key: SequenceKey, index: int, out: memoryview) -> tuple[int, Work]:
        """(tokens in the block, the copy to run); see `Engine.export_block`."""
        sequence = self._sequence(key, index)
        size = self._geometry.block_size
        num_there = max(sequence.num_computed, sequence.num_kept)
        num_tokens = min(size, num_there - index * size)
        if num_tokens <= 0:
            raise NotFound(f"block {index} of {key[0]} is not computed")
        num_bytes = self._geometry.num_bytes(num_tokens)
        if len(out) < num_bytes:
            raise InvalidRequest(f"{num_bytes} bytes are needed for the block, not {len(out)}")
        block_id = sequence.block_ids[index]
        return num_tokens, partial(self._runner.pack_block, block_id, num_tokens, out[:num_bytes])

    def importing(self, key: SequenceKey, index: int, data: memoryview) -> Work | None:
        """The copy to run, None for a prefix hit; see `Engine.import_block`."""
        sequence = self._sequence(key, index)
        if sequence.state is not State.RESERVED:
            raise NotFound(f"{key[0]} takes no blocks any more")
        num_tokens, rest = divmod(len(data), self._geometry.token_bytes)
        if rest or not 0 < num_tokens <= self._geometry.block_size:
            raise InvalidRequest(f"{len(data)} bytes are not a block of this pool")
        if index < sequence.num_registered:
            return None
        return partial(self._runner.unpack_block, sequence.block_ids[index], num_tokens, data)

    def _sequence(self, key: SequenceKey, index: int) -> Sequence:
        sequence = self._table.by_key.get(key)
        if sequence is None or not 0 <= index < len(sequence.block_ids):
            raise NotFound(f"block {index} of {key[0]} is not here")
        return sequence
