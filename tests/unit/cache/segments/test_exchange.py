"""A prefix goes from one cluster to another, under that one's key."""

import io
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.services.cache.segments.exchange_format import read_blocks, read_head
from finback.services.cache.segments.record import BlockRecord
from finback.services.cache.segments.store import SegmentStore
from finback.shared.errors import InvalidRequest, NotFound
from finback.shared.kv.block_hash import extend_all, prompt_root
from support.segments import KEY, SALT, aligned, open_store, payload_of

BLOCK_SIZE = 16
NUM_BLOCKS = 5
TOKENS = np.arange(NUM_BLOCKS * BLOCK_SIZE, dtype="<i4").tobytes()


def _hashes(key: bytes, cache_salt: bytes) -> list[bytes]:
    return extend_all(prompt_root(key, cache_salt, BLOCK_SIZE), TOKENS, BLOCK_SIZE, key)


def _payload(number: int) -> bytes:
    width = 4 * BLOCK_SIZE
    return payload_of(number) + TOKENS[number * width : (number + 1) * width]


def _fill(store: SegmentStore, hashes: list[bytes]) -> None:
    for number, hash_ in enumerate(hashes):
        payload = _payload(number)
        record = BlockRecord(
            salt=SALT,
            hash=hash_,
            length=len(payload),
            checksum=xxhash.xxh3_128_digest(payload),
            expires_unix_s=0.0,
            tenant="here",
            first_block=number,
        )
        assert store.put(record, payload)


@pytest.fixture
def exported(tmp_path: Path) -> bytes:
    """The whole prefix as a file."""
    store = open_store(tmp_path / "from", encrypt=True)
    hashes = _hashes(KEY, b"a")
    _fill(store, hashes)
    file = io.BytesIO()
    assert store.export(SALT, [*hashes, bytes(32)], file, block_size=BLOCK_SIZE) == NUM_BLOCKS
    with pytest.raises(NotFound):
        store.export(SALT, hashes[1:], io.BytesIO(), block_size=BLOCK_SIZE)
    with pytest.raises(InvalidRequest, match="block_size"):
        store.export(SALT, hashes, io.BytesIO(), block_size=100_000)
    store.close()
    return file.getvalue()


def test_the_other_cluster_finds_the_prefix_under_its_own_hashes(
    tmp_path: Path, exported: bytes
) -> None:
    other_key = bytes(reversed(KEY))
    store = open_store(tmp_path / "to", cluster_key=other_key)
    salt, hashes = store.import_(io.BytesIO(exported), cache_salt="b", tenant="there")
    assert (salt, hashes) == (SALT, _hashes(other_key, b"b"))
    for number, hash_ in enumerate(hashes):
        out = aligned(12_288)
        record = store.read_into(salt, hash_, out)
        assert out[: record.length] == _payload(number)
        assert (record.tenant, record.first_block) == ("there", number)
    again, _ = store.import_(io.BytesIO(exported), cache_salt="b")
    assert again == SALT
    assert store.stats().total.num_blocks == NUM_BLOCKS
    store.close()


def test_damaged_files_are_refused(tmp_path: Path, exported: bytes) -> None:
    store = open_store(tmp_path / "to")

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, len(exported) * 8 - 1), st.booleans())
    def check(bit: int, is_cut: bool) -> None:
        data = bytearray(exported)
        data[bit // 8] ^= 1 << bit % 8
        file = io.BytesIO(bytes(data[: bit // 8]) if is_cut else bytes(data))
        try:
            head = read_head(file)
            blocks = [payload for payload, _ in read_blocks(file, head)]
        except InvalidRequest as error:
            assert error.param == "file"
        else:  # a bit of the head's texts
            assert not is_cut
            assert blocks == [_payload(number) for number in range(len(blocks))]

    check()
    with pytest.raises(InvalidRequest, match="not an exported prefix"):
        store.import_(io.BytesIO(b"nothing"))
    assert list(store.records()) == []
    store.close()
