"""API keys: hashed in one private file, made and revoked by the CLI, checked by the gateway.

A key is `fb-<id>-<secret>` with 256 random bits, so one SHA-256 is hash enough: there is nothing to
guess. The file is read again when it changes, so that both making and revoking take effect at once.
"""

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from finback.shared import clock
from finback.shared.errors import ConfigError, NotFound

_PREFIX = "fb"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """What is kept of a key. `name` is the tenant that its requests count for."""

    key_id: str
    name: str
    sha256: str
    created_unix_s: float


def read(path: Path) -> dict[str, KeyRecord]:
    """Keys by id; no file means none. Raises `ConfigError` for a file that is not ours."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return {item["key_id"]: KeyRecord(**item) for item in raw["keys"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read API keys from {path}: {error}") from error


def create(path: Path, name: str) -> tuple[str, KeyRecord]:
    """Add a key; the key itself is returned here and kept nowhere."""
    key_id, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
    key = f"{_PREFIX}-{key_id}-{secret}"
    record = KeyRecord(
        key_id=key_id, name=name, sha256=_hash(key), created_unix_s=round(clock.unix_s(), 3)
    )
    _write(path, {**read(path), key_id: record})
    return key, record


def revoke(path: Path, key_id: str) -> KeyRecord:
    """Remove a key. Raises `NotFound` if there is none of that id."""
    records = read(path)
    if key_id not in records:
        raise NotFound(f"no API key with id {key_id!r} in {path}")
    record = records.pop(key_id)
    _write(path, records)
    return record


class KeyRing:
    """The gateway's view: checks keys, and looks whether the file has changed before it does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._records: Mapping[str, KeyRecord] = {}
        self._refresh()

    def check(self, key: str) -> KeyRecord | None:
        """The record of a valid key, else None."""
        self._refresh()
        parts = key.split("-", 2)
        record = self._records.get(parts[1]) if len(parts) == 3 else None
        # Compared in constant time, for an unknown id as well.
        expected = record.sha256 if record else "0" * 64
        return record if hmac.compare_digest(_hash(key), expected) else None

    def _refresh(self) -> None:
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        except FileNotFoundError:
            stamp = (0, 0, 0)
        if stamp != self._stamp:
            self._records = read(self._path)
            self._stamp = stamp


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _write(path: Path, records: Mapping[str, KeyRecord]) -> None:
    """Replace the file in one step; only its owner may read it."""
    text = json.dumps({"keys": [asdict(record) for record in records.values()]}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError as error:
        raise ConfigError(f"cannot write API keys to {path}: {error.strerror}") from error
