"""`finback keys`."""

import json
import sys
import time
from pathlib import Path

from finback.services.supervisor import locate
from finback.shared import api_keys
from finback.shared import config as settings


def keys_file(given: Path | None) -> tuple[Path, bool]:
    """Where keys are kept, and whether the settings tell the gateway to ask for them."""
    config, _ = settings.load(overrides={"run_dir": str(given) if given else None})
    if config.api_keys_file:
        return Path(config.api_keys_file), True
    return locate.run_dir(given).root / "api_keys.json", False


def create(given: Path | None, name: str, *, as_json: bool) -> int:
    """Make a key and print it."""
    path, is_used = keys_file(given)
    key, record = api_keys.create(path, name)
    if as_json:
        told = {"key": key, "id": record.key_id, "name": record.name, "file": str(path)}
        sys.stdout.write(json.dumps(told) + "\n")
        return 0
    sys.stdout.write(key + "\n")
    if not is_used:
        sys.stderr.write(f"asked for once started with: finback up --set api_keys_file={path}\n")
    return 0


def list_(given: Path | None, *, as_json: bool) -> int:
    """Ids, names and dates."""
    records = api_keys.read(keys_file(given)[0]).values()
    if as_json:
        rows = [
            {"id": r.key_id, "name": r.name, "created_unix_s": r.created_unix_s} for r in records
        ]
        sys.stdout.write(json.dumps(rows) + "\n")
        return 0
    for record in records:
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created_unix_s))
        sys.stdout.write(f"{record.key_id}  {day}  {record.name}\n")
    return 0


def revoke(given: Path | None, key_id: str) -> int:
    """End a key."""
    record = api_keys.revoke(keys_file(given)[0], key_id)
    sys.stdout.write(f"revoked {record.key_id} ({record.name})\n")
    return 0
