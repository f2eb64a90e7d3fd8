"""Long prompts on the bus: token ids above 256 KiB travel in pieces and are put together here.

Gateways send pieces to prefill, prefill to decode. The pieces may overtake the request that
announces them, because they are other subjects, so both sides of the wait are kept, bounded.
"""

import asyncio
from collections import OrderedDict
from typing import Final

from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.prefill import TokenChunk

MAX_CHUNK_BYTES: Final = 256 * 1024
_MAX_OPEN: Final = 256
_MAX_CHUNKS: Final = 256


def split_token_ids(token_ids: bytes) -> tuple[bytes, ...]:
    """Cut token ids (int32 LE) into pieces that fit a message; at least one, maybe empty."""
    starts = range(0, max(len(token_ids), 1), MAX_CHUNK_BYTES)
    return tuple(token_ids[start : start + MAX_CHUNK_BYTES] for start in starts)


class _Open:
    def __init__(self) -> None:
        self.pieces: dict[int, bytes] = {}
        self.arrived = asyncio.Event()


class ChunkAssembler:
    """Pieces of prompts that are not complete yet, by (request_id, attempt)."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[str, int], _Open] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, chunk: TokenChunk) -> None:
        """Take one piece; the oldest unfinished prompt goes when there are too many."""
        if not 0 < chunk.index < _MAX_CHUNKS or len(chunk.token_ids) > MAX_CHUNK_BYTES:
            raise InvalidRequest("a piece of a prompt is out of range", reason="chunk")
        entry = self._entry((chunk.request_id, chunk.attempt))
        entry.pieces[chunk.index] = chunk.token_ids
        entry.arrived.set()

    async def join(self, request_id: str, attempt: int, first: bytes, num_chunks: int) -> bytes:
        """Wait for the pieces 1 .. num_chunks - 1 that follow `first`; the caller sets a timeout."""
        if num_chunks <= 1:
            return first
        if num_chunks > _MAX_CHUNKS:
            raise InvalidRequest("the prompt has too many pieces", reason="chunk")
        entry = self._entry((request_id, attempt))
        try:
            while any(index not in entry.pieces for index in range(1, num_chunks)):
                entry.arrived.clear()
                await entry.arrived.wait()
        finally:
            self._open.pop((request_id, attempt), None)
        return first + b"".join(entry.pieces[index] for index in range(1, num_chunks))

    def _entry(self, key: tuple[str, int]) -> _Open:
        entry = self._open.setdefault(key, _Open())
        while len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        return entry
