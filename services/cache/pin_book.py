"""Named prefixes that are never given up: which blocks they are, kept in the arena's folder."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from finback.services.cache.segments import pins as files
from finback.shared.errors import NotFound, Unavailable

FILE_NAME: Final = "pins.json"
# Holds what headers say is pinned, when the file that says by whom was damaged.
RECOVERED: Final = "recovered"

Pin = tuple[str, tuple[bytes, ...]]  # salt, hashes


class PinBook:
    """Pins by name; every change is on disk before it counts."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self.is_damaged = False
        try:
            self._pins = files.load(self._path)
        except (OSError, ValueError):
            self._pins, self.is_damaged = {}, True
        self._names = self._count()

    @property
    def pins(self) -> Mapping[str, Pin]:
        """All of them."""
        return self._pins

    def __contains__(self, block: tuple[str, bytes]) -> bool:
        """Whether a (salt, hash) is pinned by any name."""
        return block in self._names

    def pin(self, name: str, salt: str, hashes: Iterable[bytes]) -> Pin | None:
        """Replace the pin of that name; returns the one that was there."""
        found = tuple(hashes)
        files.check(self._pins, name, found)
        before = self._pins.get(name)
        self._save({**self._pins, name: (salt, found)})
        return before

    def unpin(self, name: str) -> Pin:
        """Take the pin away; NotFound if there is none."""
        if name not in self._pins:
            raise NotFound(f"no pin is called {name[:80]!r}", param="name")
        before = self._pins[name]
        self._save({other: pin for other, pin in self._pins.items() if other != name})
        return before

    def recover(self, blocks: Iterable[tuple[str, bytes]]) -> None:
        """Pin again what headers say is pinned; one pin a salt."""
        by_salt: dict[str, list[bytes]] = {}
        for salt, digest in blocks:
            by_salt.setdefault(salt, []).append(digest)
        for number, (salt, hashes) in enumerate(sorted(by_salt.items())):
            self.pin(f"{RECOVERED}-{number}", salt, hashes)

    def _save(self, pins: dict[str, Pin]) -> None:
        try:
            files.save(self._path, pins)
        except OSError as error:
            raise Unavailable(f"the pins cannot be saved: {error.strerror}") from error
        self._pins = pins
        self._names = self._count()

    def _count(self) -> Counter[tuple[str, bytes]]:
        return Counter((salt, digest) for salt, hashes in self._pins.values() for digest in hashes)
