"""Long prompts in pieces."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.shared.engine.token_chunks import MAX_CHUNK_BYTES, ChunkAssembler, split_token_ids
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.prefill import TokenChunk


def chunk(index: int, data: bytes) -> TokenChunk:
    return TokenChunk(request_id="r", attempt=1, index=index, token_ids=data)


@given(size=st.integers(0, 4 * MAX_CHUNK_BYTES), order=st.randoms())
def test_pieces_in_any_order_join(size: int, order: st.DataObject) -> None:
    token_ids = bytes(size)
    first, *rest = split_token_ids(token_ids)
    assert all(0 < len(piece) <= MAX_CHUNK_BYTES for piece in rest)

    async def main() -> bytes:
        assembler = ChunkAssembler()
        late = list(enumerate(rest, start=1))
        order.shuffle(late)  # type: ignore[attr-defined]  # a random.Random in fact
        early, late = late[: len(late) // 2], late[len(late) // 2 :]
        for index, piece in early:
            assembler.add(chunk(index, piece))
        task = asyncio.create_task(assembler.join("r", 1, first, 1 + len(rest)))
        await asyncio.sleep(0)
        for index, piece in late:
            assembler.add(chunk(index, piece))
        joined = await task
        assert len(assembler) == 0
        return joined

    assert asyncio.run(main()) == token_ids


def test_bad_pieces_are_refused() -> None:
    assembler = ChunkAssembler()
    for bad in (chunk(0, b""), chunk(10_000, b""), chunk(1, bytes(MAX_CHUNK_BYTES + 1))):
        with pytest.raises(InvalidRequest):
            assembler.add(bad)


def test_open_prompts_are_bounded() -> None:
    async def main() -> int:
        assembler = ChunkAssembler()
        for i in range(1000):
            assembler.add(TokenChunk(request_id=f"r{i}", attempt=1, index=1, token_ids=b""))
        return len(assembler)

    assert asyncio.run(main()) <= 256
