"""The bytes of a segment file (version 1): a header page, then records, all in whole 4 KiB pages.

    segment  page 0: magic, version, cluster key id, segment id, created, writer, XXH3-128 of these
    record   page 0: magic, MAC, body length, body; then the stored payload, padded with zeros
    dead     the same page with another magic: the span is free, and may be a hole

A record's MAC is keyed by segment, and covers segment id and offset: a header that was copied from
elsewhere, or that stands in some payload, is not taken for one.
"""

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from finback.services.cache.segments.keys import KEY_ID_BYTES, MAC_BYTES, SegmentKeys, mac
from finback.services.cache.segments.record import CHECKSUM_BYTES, BlockRecord
from finback.shared.kv.block_hash import HASH_BYTES

MAGIC: Final = b"FINBKSG1"
VERSION: Final = 1
PAGE: Final = 4096
LIVE: Final = b"FBRC"
DEAD: Final = b"FBRX"
NONCE_BYTES: Final = 12
ZLIB: Final = 1
AES_GCM: Final = 2
ZSTD: Final = 4

# magic, version, key id, segment id, created, length of the writer's name
_SEGMENT: Final = struct.Struct(f"<8sH6x{KEY_ID_BYTES}sQdH")
# magic, MAC, body length
_HEAD: Final = struct.Struct(f"<4s{MAC_BYTES}sH")
# span, length, stored, first block, created, expires, flags, lengths of salt, tenant, class
_BODY: Final = struct.Struct(f"<QQQQddBBHB{HASH_BYTES}s{CHECKSUM_BYTES}s{NONCE_BYTES}s")
_DEAD: Final = struct.Struct("<QB")
_WHERE: Final = struct.Struct("<4sQQ")


class ForeignSegment(Exception):
    """A file that is not read: of another cluster, another version, or no segment at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """Page 0 of a segment."""

    segment_id: int
    created_unix_s: float
    writer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """A live record's header page. `stored`: payload bytes in the file, packed by `flags`."""

    record: BlockRecord
    span: int
    stored: int
    flags: int = 0
    nonce: bytes = bytes(NONCE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadHeader:
    """A header page of a span whose record is gone; `is_hole`: its payload takes no room."""

    span: int
    is_hole: bool


def segment_name(segment_id: int) -> str:
    """The file's name; never used again once the file is gone."""
    return f"seg-{segment_id:016x}.kv"


def pages(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def pack_segment(header: SegmentHeader, key_id: bytes) -> bytes:
    """Page 0."""
    writer = header.writer.encode()
    fixed = _SEGMENT.pack(
        MAGIC, VERSION, key_id, header.segment_id, header.created_unix_s, len(writer)
    )
    body = fixed + writer
    return (body + xxhash.xxh3_128_digest(body)).ljust(PAGE, b"\0")


def parse_segment(page: bytes, key_id: bytes) -> SegmentHeader:
    """Raises `ForeignSegment`, whose text says why the file is left alone."""
    if len(page) < PAGE or page[: len(MAGIC)] != MAGIC:
        raise ForeignSegment("it is no segment, or its header is damaged")
    _, version, found_key, segment_id, created, writer_length = _SEGMENT.unpack_from(page)
    if version != VERSION:
        raise ForeignSegment(f"it has format version {version}, this program reads {VERSION}")
    end = _SEGMENT.size + writer_length
    if end + 16 > PAGE or xxhash.xxh3_128_digest(page[:end]) != page[end : end + 16]:
        raise ForeignSegment("its header is damaged")
    if found_key != key_id:
        raise ForeignSegment(
            f"it belongs to the cluster key with id {found_key.hex()}, ours has id {key_id.hex()}"
        )
    writer = page[_SEGMENT.size : end].decode(errors="replace")
    return SegmentHeader(segment_id=segment_id, created_unix_s=created, writer=writer)


def pack_record(header: RecordHeader) -> bytes:
    """The body of a record's header page, as it is sealed and authenticated."""
    record = header.record
    texts = [text.encode() for text in (record.salt, record.tenant, record.traffic_class)]
    fixed = _BODY.pack(
        header.span,
        record.length,
        header.stored,
        record.first_block,
        record.created_unix_s,
        record.expires_unix_s,
        header.flags,
        len(texts[0]),
        len(texts[1]),
        len(texts[2]),
        record.hash,
        record.checksum,
        header.nonce,
    )
    return fixed + b"".join(texts)


def seal_page(keys: SegmentKeys, segment_id: int, offset: int, body: bytes) -> bytes:
    """The header page of a live record (not padded)."""
    return _seal(LIVE, keys, segment_id, offset, body)


def pack_dead(keys: SegmentKeys, segment_id: int, offset: int, header: DeadHeader) -> bytes:
    """The whole page that marks a span as free."""
    body = _DEAD.pack(header.span, header.is_hole)
    return _seal(DEAD, keys, segment_id, offset, body).ljust(PAGE, b"\0")


def _seal(magic: bytes, keys: SegmentKeys, segment_id: int, offset: int, body: bytes) -> bytes:
    return _HEAD.pack(magic, _mac(magic, keys, segment_id, offset, body), len(body)) + body


def _mac(magic: bytes, keys: SegmentKeys, segment_id: int, offset: int, body: bytes) -> bytes:
    return mac(keys.mac, _WHERE.pack(magic, segment_id, offset) + body)


def where(segment_id: int, offset: int) -> bytes:
    """What binds a payload to its place."""
    return _WHERE.pack(LIVE, segment_id, offset)


def is_plain_record(
    page: bytes | memoryview, keys: SegmentKeys, segment_id: int, offset: int, span: int,
    record: BlockRecord,
) -> bool:  # fmt: skip
    """Whether this is the sealed header of that very record, its payload stored as it is.

    A quick yes for what a reader nearly always finds; after a no ask `parse_page` what it is.
    """
    magic, tag, length = _HEAD.unpack_from(page)
    body = bytes(page[_HEAD.size : _HEAD.size + length])
    if magic != LIVE or len(body) != length or length < _BODY.size:
        return False
    if _mac(magic, keys, segment_id, offset, body) != tag:
        return False
    found = _BODY.unpack_from(body)
    plain = (span, record.length, record.length, record.first_block)
    texts = record.salt + record.tenant + record.traffic_class
    return (
        found[:4] == plain
        and found[6] == 0
        and found[10:12] == (record.hash, record.checksum)
        and found[7] == len(record.salt.encode())
        and found[8] == len(record.tenant.encode())
        and body[_BODY.size :] == texts.encode()
    )


def parse_page(
    page: bytes, keys: SegmentKeys, segment_id: int, offset: int
) -> RecordHeader | DeadHeader | None:
    """What a header page says; None if it is none, or damaged."""
    if len(page) < _HEAD.size or page[:4] not in (LIVE, DEAD):
        return None
    magic, tag, length = _HEAD.unpack_from(page)
    body = bytes(page[_HEAD.size : _HEAD.size + length])
    if len(body) != length or _mac(magic, keys, segment_id, offset, body) != tag:
        return None
    if magic == DEAD:
        span, is_hole = _DEAD.unpack(body)
        return DeadHeader(span=span, is_hole=bool(is_hole))
    return _parse_body(body)


def _parse_body(body: bytes) -> RecordHeader:
    (
        span, length, stored, first_block, created, expires, flags, salt, tenant, traffic_class,
        hash_, checksum, nonce,
    ) = _BODY.unpack_from(body)  # fmt: skip
    texts, at = [], _BODY.size
    for size in (salt, tenant, traffic_class):
        texts.append(body[at : at + size].decode())
        at += size
    record = BlockRecord(
        salt=texts[0],
        hash=hash_,
        length=length,
        checksum=checksum,
        expires_unix_s=expires,
        tenant=texts[1],
        traffic_class=texts[2],
        created_unix_s=created,
        used_unix_s=created,
        first_block=first_block,
    )
    return RecordHeader(record=record, span=span, stored=stored, flags=flags, nonce=nonce)
