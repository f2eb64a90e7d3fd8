"""`finback keys`."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from finback.services.supervisor import key_file
from finback.services.supervisor.key_file import KeyRecord
from finback.shared import clock, durations
from finback.shared import config as settings
from finback.shared.errors import ConfigError

DEFAULT: Final = "default"
NEVER: Final = "never"
_MAX_LIMIT: Final = 2**40


def create(given: Path | None, name: str, values: dict[str, Any], *, as_json: bool) -> int:
    """Make a key and print it. From the first one on, the gateway asks for a key."""
    path = _file(given)
    is_first = not path.exists()
    key, record = key_file.create(path, name, **values)
    if as_json:
        sys.stdout.write(json.dumps({"key": key, **_shown(record)}) + "\n")
        return 0
    sys.stdout.write(key + "\n")
    if is_first:
        sys.stderr.write("from now on every request needs a key; this one is not shown again\n")
    return 0


def list_(given: Path | None, *, as_json: bool) -> int:
    """What each key is for, and whether it is still good."""
    records = key_file.read(_file(given))
    if as_json:
        sys.stdout.write(json.dumps([_shown(record) for record in records]) + "\n")
        return 0
    for record in records:
        sys.stdout.write("  ".join(_columns(record)) + "\n")
    return 0


def set_(given: Path | None, key_id: str, values: dict[str, Any]) -> int:
    """Change a key, and its tenant's limits."""
    if not values:
        raise ConfigError("say what to change, for example --rpm 60; see finback keys set --help")
    record = key_file.change(_file(given), key_id, **values)
    sys.stdout.write("  ".join(_columns(record)) + "\n")
    return 0


def revoke(given: Path | None, key_id: str) -> int:
    """End a key."""
    record = key_file.revoke(_file(given), key_id)
    sys.stdout.write(f"revoked {record.id} ({record.name})\n")
    return 0


def values_of(
    *,
    tenant: str | None,
    rpm: str | None,
    tpm: str | None,
    concurrency: str | None,
    expires: str | None,
    scopes: Sequence[str] | None,
    models: Sequence[str] | None,
    traffic_class: str | None,
) -> dict[str, Any]:
    """The options that were given, as fields of a record. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    limits = {"requests_per_min": rpm, "tokens_per_min": tpm, "max_concurrency": concurrency}
    for name, text in limits.items():
        if text is not None:
            values[name] = _limit(name, text)
    if tenant is not None:
        values["tenant"] = tenant
    if expires is not None:
        values["expires"] = _expiry(expires)
    if scopes:
        values["scopes"] = tuple(dict.fromkeys(scopes))
    if models:
        values["models"] = tuple(dict.fromkeys(models))
    if traffic_class is not None:
        values["traffic_class"] = traffic_class
    return values


def _file(given: Path | None) -> Path:
    config, _ = settings.load(overrides={"run_dir": str(given) if given else None})
    return key_file.default_path(config)


def _limit(name: str, text: str) -> int | None:
    if text == DEFAULT:
        return None
    if not text.isascii() or not text.isdigit() or int(text) > _MAX_LIMIT:
        raise ConfigError(
            f"{name} must be a whole number up to {_MAX_LIMIT} (0: no limit) or {DEFAULT!r}, "
            f"not {text[:40]!r}"
        )
    return int(text)


def _expiry(text: str) -> int:
    if text == NEVER:
        return 0
    try:
        return int(clock.unix_s()) + durations.seconds_of(text)
    except ValueError as error:
        raise ConfigError(f"--expires: {error}, or {NEVER!r}") from error


def _shown(record: KeyRecord) -> dict[str, Any]:
    """All but the hash."""
    fields = {name: value for name, value in asdict(record).items() if name != "hash"}
    return {**fields, "tenant": record.owner}


def _columns(record: KeyRecord) -> list[str]:
    columns = [record.id, _day(record.created), f"{record.name} ({record.owner})"]
    units = zip(key_file.LIMITS, ("requests/min", "tokens/min", "at once"), strict=True)
    limits = [(getattr(record, name), unit) for name, unit in units]
    columns += [f"{limit or 'any number of'} {unit}" for limit, unit in limits if limit is not None]
    if record.scopes != ("inference",):
        columns.append(f"scope {','.join(record.scopes)}")
    if record.models:
        columns.append(f"models {','.join(record.models)}")
    if record.traffic_class != "chat":
        columns.append(f"class {record.traffic_class}")
    if record.expires:
        is_over = clock.unix_s() >= record.expires
        columns.append(f"{'expired' if is_over else 'expires'} {_day(record.expires)}")
    if record.revoked:
        columns.append("revoked")
    return columns


def _day(unix_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))
