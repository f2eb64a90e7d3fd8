"""`finback keys`."""

import json
import sys
import time
from pathlib import Path

from finback.services.supervisor import key_file
from finback.shared import config as settings


def _file(given: Path | None) -> Path:
    config, _ = settings.load(overrides={"run_dir": str(given) if given else None})
    return key_file.default_path(config)


def create(given: Path | None, name: str, *, as_json: bool) -> int:
    """Make a key and print it. From the first one on, the gateway asks for a key."""
    path = _file(given)
    is_first = not path.exists()
    key, record = key_file.create(path, name)
    if as_json:
        told = {"key": key, "id": record.id, "name": record.name}
        sys.stdout.write(json.dumps(told) + "\n")
        return 0
    sys.stdout.write(key + "\n")
    if is_first:
        sys.stderr.write("from now on every request needs a key; this one is not shown again\n")
    return 0


def list_(given: Path | None, *, as_json: bool) -> int:
    """Ids, names, dates and whether they are still good."""
    records = key_file.read(_file(given))
    if as_json:
        rows = [
            {"id": r.id, "name": r.name, "created": r.created, "revoked": r.revoked}
            for r in records
        ]
        sys.stdout.write(json.dumps(rows) + "\n")
        return 0
    for record in records:
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created))
        end = "  revoked" if record.revoked else ""
        sys.stdout.write(f"{record.id}  {day}  {record.name}{end}\n")
    return 0


def revoke(given: Path | None, key_id: str) -> int:
    """End a key."""
    record = key_file.revoke(_file(given), key_id)
    sys.stdout.write(f"revoked {record.id} ({record.name})\n")
    return 0
