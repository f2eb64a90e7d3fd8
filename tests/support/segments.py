"""Blocks and stores for tests of the cache's file tier."""

import mmap
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import xxhash

from finback.services.cache.segments.record import BlockRecord, Miss
from finback.services.cache.segments.store import SegmentStore

KEY: Final = bytes(range(32))
SALT: Final = "salt-of-a-model"
MIB: Final = 1024 * 1024


def hash_of(number: int) -> bytes:
    """A block's name."""
    return blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def payload_of(number: int, size: int = 9000) -> bytes:
    """What block `number` holds; always the same."""
    return random.Random(number * 1_000_003 + size).randbytes(size)


def block(number: int, size: int = 9000, **more: Any) -> tuple[BlockRecord, bytes]:
    """A record and its payload; `more` are other fields of the record."""
    payload = payload_of(number, size)
    fields: dict[str, Any] = {"salt": SALT, "hash": hash_of(number), "expires_unix_s": 0.0}
    fields |= {"length": size, "checksum": xxhash.xxh3_128_digest(payload)} | more
    return BlockRecord(**fields), payload


def aligned(size: int) -> memoryview:
    """A buffer as an arena's slots are."""
    return memoryview(mmap.mmap(-1, size))


@dataclass(slots=True)
class Clocks:
    """Both clocks of a store, moved by hand."""

    unix_s: float = 1_700_000_000.0
    monotonic_s: float = 100.0

    def pass_s(self, seconds: float) -> None:
        """Time goes by."""
        self.unix_s += seconds
        self.monotonic_s += seconds


@dataclass(slots=True)
class Log:
    """Keeps the lines that a store writes."""

    lines: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def __getattr__(self, level: str) -> Callable[..., None]:
        def write(event: str, **fields: Any) -> None:
            self.lines.append((level, event, fields))

        return write

    def has(self, part: str) -> bool:
        """Whether some line says so, in its event or a field."""
        return any(part in event or part in str(fields) for _, event, fields in self.lines)


def open_store(
    folder: Path,
    *,
    max_bytes: int = 64 * MIB,
    cluster_key: bytes = KEY,
    clocks: Clocks | None = None,
    log: Log | None = None,
    **more: Any,
) -> SegmentStore:
    """An open store with segments of 1 MiB."""
    clocks = clocks or Clocks()
    more.setdefault("segment_bytes", MIB)
    store = SegmentStore(
        folder,
        max_bytes=max_bytes,
        cluster_key=cluster_key,
        now=lambda: clocks.unix_s,
        monotonic=lambda: clocks.monotonic_s,
        log=log or Log(),
        **more,
    )
    store.open()
    return store


def read(store: SegmentStore, number: int, size: int = 9000, salt: str = SALT) -> bytes | str:
    """The block's payload, or why it is missing."""
    out = aligned(size)
    try:
        record = store.read_into(salt, hash_of(number), out)
    except Miss as miss:
        return miss.reason
    return bytes(out[: record.length])


def segment_files(folder: Path) -> list[Path]:
    """All segments, of all writers."""
    return sorted(folder.glob("*/seg-*.kv"))
