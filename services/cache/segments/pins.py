"""Named prefixes that are never evicted and do not expire, in a small file beside the index."""

import json
import os
import secrets
from pathlib import Path
from typing import Final

from finback.shared.errors import InvalidRequest

MAX_NAME_CHARS: Final = 200
MAX_PINS: Final = 1000
MAX_HASHES: Final = 65_536

Pins = dict[str, tuple[str, tuple[bytes, ...]]]  # name -> (salt, hashes)


def load(path: Path) -> Pins:
    """What was saved; nothing if there is no file. Raises ValueError if it is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    try:
        return {
            str(name): (str(salt), tuple(bytes.fromhex(hash_) for hash_ in hashes))
            for name, (salt, hashes) in found.items()
        }
    except (AttributeError, TypeError) as error:
        raise ValueError(str(error)) from None


def save(path: Path, pins: Pins) -> None:
    """Replace the file at once. Raises OSError."""
    data = {
        name: [salt, [hash_.hex() for hash_ in hashes]] for name, (salt, hashes) in pins.items()
    }
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with open(fresh, "x", opener=_private) as file:
            json.dump(data, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def check(pins: Pins, name: str, hashes: tuple[bytes, ...]) -> None:
    """Raise `InvalidRequest` for a pin that cannot be kept."""
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise InvalidRequest(f"name: 1 to {MAX_NAME_CHARS} printable characters", param="name")
    if not hashes or len(hashes) > MAX_HASHES:
        raise InvalidRequest(f"a pin holds 1 to {MAX_HASHES} blocks", param="hashes")
    if name not in pins and len(pins) >= MAX_PINS:
        raise InvalidRequest(f"there are {MAX_PINS} pins already; unpin some", param="name")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
