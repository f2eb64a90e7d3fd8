"""The file of API keys, as the CLI writes it and the gateway reads it: a JSON object a line.

`{id, hash, name, created, revoked}`; the hash is SHA-256 of the whole key. Keys hold 256 random
bits, so there is nothing to guess and no need of a slow hash. Revoking adds nothing secret: the line
stays, marked.
"""

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from finback.services.supervisor.run_dir import write_private
from finback.shared import clock
from finback.shared.config import StackConfig
from finback.shared.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """One line. `created` is Unix seconds."""

    id: str
    hash: str
    name: str
    created: int
    revoked: bool = False


def default_path(config: StackConfig) -> Path:
    """Where a stack's keys are kept: as set, else in its run directory."""
    return Path(config.api_keys_file or Path(config.run_dir) / "api_keys.jsonl")


def read(path: Path) -> list[KeyRecord]:
    """All keys, revoked ones too; no file means none. Raises `ConfigError` for a broken file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [KeyRecord(**json.loads(line)) for line in lines if line.strip()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot read API keys from {path}: {error}") from error


def create(path: Path, name: str) -> tuple[str, KeyRecord]:
    """Add a key; the key itself is returned here and kept nowhere."""
    key_id = secrets.token_hex(4)
    key = f"fb-{key_id}-{secrets.token_urlsafe(32)}"
    record = KeyRecord(
        id=key_id,
        hash=hashlib.sha256(key.encode()).hexdigest(),
        name=name,
        created=int(clock.unix_s()),
    )
    _write(path, [*read(path), record])
    return key, record


def revoke(path: Path, key_id: str) -> KeyRecord:
    """Mark a key as revoked. Raises `ConfigError` if there is none of that id."""
    records = read(path)
    for index, record in enumerate(records):
        if record.id == key_id:
            records[index] = dataclasses.replace(record, revoked=True)
            _write(path, records)
            return records[index]
    raise ConfigError(f"no API key with id {key_id!r} in {path}; see finback keys list")


def _write(path: Path, records: Iterable[KeyRecord]) -> None:
    """Replace the file in one step; only its owner may read it."""
    text = "".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write API keys to {path}: {error.strerror}") from error
