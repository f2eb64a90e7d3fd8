"""What lies in the file for a payload: plain, compressed, encrypted, or both.

Encrypted: AES-256-GCM with the segment's own key and a random nonce; the header's body and the
record's place are authenticated with it. The checksum, which would tell equal payloads apart from
others without any key, moves behind the encryption: 16 bytes before the payload, zeros in the header.
"""

import importlib
import secrets
import zlib
from dataclasses import replace
from typing import Any, Final

from finback.services.cache.segments.format import (
    AES_GCM,
    NONCE_BYTES,
    PAGE,
    ZLIB,
    ZSTD,
    RecordHeader,
    pack_record,
    pages,
    where,
)
from finback.services.cache.segments.keys import KeyRing
from finback.services.cache.segments.record import CHECKSUM_BYTES, BlockRecord, Miss
from finback.shared.errors import ConfigError

_TAG_BYTES: Final = 16


class Packer:
    """Packs by the store's options, and unpacks whatever a header says.

    Compression is zstandard where it is installed, else zlib; only kept where it saves a page.
    """

    def __init__(self, keys: KeyRing, *, compress: bool = False, encrypt: bool = False) -> None:
        self._keys = keys
        self._encrypt = encrypt
        self._compress = compress
        self._zstd = _optional("zstandard")
        self._aead = _optional("cryptography.hazmat.primitives.ciphers.aead")
        if encrypt and keys.is_empty:
            raise ConfigError("encrypting the file tier needs a cluster key (FINBACK_CLUSTER_KEY)")
        if encrypt and self._aead is None:
            raise ConfigError("encrypting the file tier needs: pip install finback[encrypt]")

    @property
    def is_plain(self) -> bool:
        """Whether payloads are stored as they are."""
        return not (self._encrypt or self._compress)

    def pack(
        self, record: BlockRecord, payload: memoryview, segment_id: int, offset: int
    ) -> tuple[RecordHeader, bytes | memoryview]:
        """The header and the bytes to store behind its page, for a record at this place."""
        flags, data = 0, payload
        if self._compress:
            flags, data = self._compressed(payload)
        if not self._encrypt:
            return _header(record, len(data), flags), data
        nonce = secrets.token_bytes(NONCE_BYTES)
        plain = record.checksum + bytes(data)
        hidden = replace(record, checksum=bytes(CHECKSUM_BYTES))
        header = _header(hidden, len(plain) + _TAG_BYTES, flags | AES_GCM, nonce)
        extra = where(segment_id, offset) + pack_record(header)
        return header, self._cipher(segment_id).encrypt(nonce, plain, extra)

    def unpack(
        self, header: RecordHeader, stored: memoryview, segment_id: int, offset: int
    ) -> tuple[BlockRecord, bytes]:
        """The record (with its checksum) and the payload, not yet compared. Raises `Miss`."""
        record, data = header.record, bytes(stored)
        if header.flags & AES_GCM:
            data = self._decrypt(header, data, segment_id, offset)
            record = replace(record, checksum=data[:CHECKSUM_BYTES])
            data = data[CHECKSUM_BYTES:]
        return record, self._decompressed(header.flags, data, record.length)

    def _decrypt(self, header: RecordHeader, data: bytes, segment_id: int, offset: int) -> bytes:
        if self._aead is None:
            raise Miss("io", "encrypted, and `cryptography` is not installed")
        extra = where(segment_id, offset) + pack_record(header)
        try:
            plain: bytes = self._cipher(segment_id).decrypt(header.nonce, data, extra)
        except importlib.import_module("cryptography.exceptions").InvalidTag:
            raise Miss("corrupt", "the encrypted payload is damaged") from None
        return plain

    def _cipher(self, segment_id: int) -> Any:
        assert self._aead is not None
        return self._aead.AESGCM(self._keys.of_segment(segment_id).aead)

    def _compressed(self, payload: memoryview) -> tuple[int, memoryview]:
        if self._zstd is not None:
            flag, data = ZSTD, self._zstd.ZstdCompressor(level=1).compress(payload)
        else:
            flag, data = ZLIB, zlib.compress(payload, 1)
        if pages(len(data)) < pages(len(payload)):
            return flag, memoryview(data)
        return 0, payload

    def _decompressed(self, flags: int, data: bytes, length: int) -> bytes:
        if flags & ZLIB:
            return _unzlib(data, length)
        if flags & ZSTD:
            if self._zstd is None:
                raise Miss("io", "compressed, and `zstandard` is not installed")
            return _unzstd(self._zstd, data, length)
        return data


def _unzlib(data: bytes, length: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, length)
    except zlib.error as error:
        raise Miss("corrupt", f"the compressed payload is damaged ({error})") from None


def _unzstd(zstd: Any, data: bytes, length: int) -> bytes:
    try:
        done: bytes = zstd.ZstdDecompressor().decompress(data, length)
        return done
    except zstd.ZstdError as error:
        raise Miss("corrupt", f"the compressed payload is damaged ({error})") from None


def _header(
    record: BlockRecord, stored: int, flags: int, nonce: bytes = bytes(NONCE_BYTES)
) -> RecordHeader:
    return RecordHeader(
        record=record, span=PAGE + pages(stored), stored=stored, flags=flags, nonce=nonce
    )


def _optional(module: str) -> Any | None:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
