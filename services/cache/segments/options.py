"""How a segment store is set up, checked."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from finback.shared.errors import ConfigError

MIN_BYTES: Final = 1024 * 1024
SEGMENT_BYTES: Final = 256 * 1024 * 1024
_WRITER: Final = re.compile(r"^[a-z0-9][a-z0-9._-]{0,62}$")

# (salt, hashes) of blocks that are no longer in the store, or that a sweep found with other
# writers; called with the store's locks held, maybe from within `open`
OnRemoved = Callable[[str, list[bytes]], None]


class Count(Protocol):
    """`Metrics.count`, or something that takes the same."""

    def __call__(self, name: str, amount: float = 1, /, **labels: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Settings of one store; bytes are those on the disk. `tenant_bytes` 0: no limit."""

    folder: Path
    writer: str
    max_bytes: int
    tenant_bytes: int
    segment_bytes: int
    compact_bytes_s: int
    compress: bool
    encrypt: bool
    direct: bool
    read_others: bool
    now: Callable[[], float]
    monotonic: Callable[[], float]
    log: Any
    count: Count
    on_removed: OnRemoved
    on_found: OnRemoved

    def __post_init__(self) -> None:
        if not _WRITER.match(self.writer):
            raise ConfigError(f"writer {self.writer!r}: a-z, 0-9, '.', '_', '-', at most 63")
        for name in ("max_bytes", "segment_bytes"):
            if getattr(self, name) < MIN_BYTES:
                raise ConfigError(f"{name} must be at least {MIN_BYTES}, not {getattr(self, name)}")
        for name in ("tenant_bytes", "compact_bytes_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative")

    @property
    def own_folder(self) -> Path:
        """Where this writer's segments and index lie."""
        return self.folder / self.writer


def ignore_count(name: str, amount: float = 1, /, **labels: str) -> None:
    """Counts nothing."""


def ignore_names(salt: str, hashes: list[bytes]) -> None:
    """Tells nobody."""
