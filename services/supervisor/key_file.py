"""The file of API keys, as the CLI writes it and the gateway reads it: a JSON object a line.

The hash is SHA-256 of the whole key. Keys hold 256 random bits, so there is nothing to guess and no
need of a slow hash. Revoking adds nothing secret: the line stays, marked. Fields that an older
release did not write have defaults. Limits belong to the tenant: they are written to all its keys.
"""

import dataclasses
import fcntl
import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from finback.services.supervisor.run_dir import write_private
from finback.shared import clock
from finback.shared.config import StackConfig
from finback.shared.errors import ConfigError

SCOPES: Final = ("inference", "usage", "admin")
TRAFFIC_CLASSES: Final = ("chat", "agent", "batch")
LIMITS: Final = ("requests_per_min", "tokens_per_min", "max_concurrency")
_TENANT: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """One line. `created` and `expires` are Unix seconds, 0: never; `tenant` empty: the key's id.

    Limits: None: as the stack's settings say, 0: none. `models` empty: all.
    """

    id: str
    hash: str
    name: str
    created: int
    revoked: bool = False
    tenant: str = ""
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    max_concurrency: int | None = None
    scopes: tuple[str, ...] = ("inference",)
    models: tuple[str, ...] = ()
    expires: int = 0
    traffic_class: str = "chat"

    @property
    def owner(self) -> str:
        """Whose limits and usage it is."""
        return self.tenant or self.id


def default_path(config: StackConfig) -> Path:
    """Where a stack's keys are kept: as set, else in its run directory."""
    return Path(config.api_keys_file or Path(config.run_dir) / "api_keys.jsonl")


def read(path: Path) -> list[KeyRecord]:
    """All keys, revoked ones too; no file means none. Raises `ConfigError` for a broken file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [_record(json.loads(line)) for line in lines if line.strip()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot read API keys from {path}: {error}") from error


def create(path: Path, name: str, **values: Any) -> tuple[str, KeyRecord]:
    """Add a key; the key itself is returned here and kept nowhere. `values`: of the record."""
    key_id = secrets.token_hex(4)
    key = f"fb-{key_id}-{secrets.token_urlsafe(32)}"
    record = KeyRecord(
        id=key_id,
        hash=hashlib.sha256(key.encode()).hexdigest(),
        name=name,
        created=int(clock.unix_s()),
    )
    with _locked(path):
        records = read(path)
        inherited = _limits_of(records, values.get("tenant"))
        record = dataclasses.replace(record, **(inherited | values))
        _check(record)
        _write(path, _with_limits([*records, record], record.owner, values))
    return key, record


def change(path: Path, key_id: str, **values: Any) -> KeyRecord:
    """Change fields of a key, and limits of all its tenant's. Raises `ConfigError`: no such id."""
    with _locked(path):
        records = read(path)
        for index, record in enumerate(records):
            if record.id == key_id:
                records[index] = changed = dataclasses.replace(record, **values)
                _check(changed)
                _write(path, _with_limits(records, changed.owner, values))
                return changed
    raise ConfigError(f"no API key with id {key_id!r} in {path}; see finback keys list")


def revoke(path: Path, key_id: str) -> KeyRecord:
    """Mark a key as revoked. Raises `ConfigError` if there is none of that id."""
    return change(path, key_id, revoked=True)


def _record(raw: dict[str, Any]) -> KeyRecord:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    return KeyRecord(**values)


def _limits_of(records: Iterable[KeyRecord], owner: str | None) -> dict[str, Any]:
    """The limits that a tenant has already."""
    for record in records:
        if record.owner == owner:
            return {name: getattr(record, name) for name in LIMITS}
    return {}


def _with_limits(
    records: Iterable[KeyRecord], owner: str, values: dict[str, Any]
) -> Iterator[KeyRecord]:
    limits = {name: value for name, value in values.items() if name in LIMITS}
    for record in records:
        yield dataclasses.replace(record, **limits) if record.owner == owner else record


def _check(record: KeyRecord) -> None:
    if record.tenant and not _TENANT.match(record.tenant):
        raise ConfigError(
            f"the tenant {record.tenant[:80]!r} must be 1 to 64 letters, digits and . _ @ -"
        )
    for name, given, known in (
        ("scope", record.scopes, SCOPES),
        ("class", (record.traffic_class,), TRAFFIC_CLASSES),
    ):
        wrong = [value for value in given if value not in known]
        if wrong or not given:
            raise ConfigError(f"unknown {name} {wrong[0] if wrong else ''!r}: {', '.join(known)}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time: each writes what it has read."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = path.with_name(f".{path.name}.lock")
        lock.touch(mode=0o600)
        with lock.open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise ConfigError(f"cannot write API keys to {path}: {error.strerror}") from error


def _write(path: Path, records: Iterable[KeyRecord]) -> None:
    """Replace the file in one step; only its owner may read it."""
    text = "".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in records)
    write_private(path, text)
