"""`finback usage`: what each tenant has used, from the stack's own count."""

import csv
import json
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from finback.shared import clock, durations
from finback.shared import config as settings
from finback.shared.errors import ConfigError
from finback.shared.usage_store import UsageCounts, UsageKey, UsageStore, usage_path

Row = tuple[UsageKey, UsageCounts]
COLUMNS: Final = (
    "hour",
    "tenant",
    "model",
    "outcome",
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
)


def usage(
    given: Path | None, *, tenant: str | None, since: str, as_json: bool, as_csv: bool
) -> int:
    """Rows by the hour for scripts, sums for people."""
    if as_json and as_csv:
        raise ConfigError("--json and --csv exclude each other; give one of them")
    config, _ = settings.load(overrides={"run_dir": str(given) if given else None})
    rows = _read(UsageStore(usage_path(config)), tenant, since)
    if as_json:
        sys.stdout.write(json.dumps([_fields(row) for row in rows]) + "\n")
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(_fields(row) for row in rows)
    else:
        _show(rows)
    return 0


def _read(store: UsageStore, tenant: str | None, since: str) -> list[Row]:
    try:
        return store.read(since_s=clock.unix_s() - durations.seconds_of(since), tenant=tenant)
    except ValueError as error:
        raise ConfigError(f"--since: {error}") from error
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(f"cannot read the usage: {error}") from error


def _fields(row: Row) -> dict[str, Any]:
    key, counts = row
    hour = datetime.fromtimestamp(key.hour_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return dict(zip(COLUMNS, (hour, *_kind(key), *_numbers(counts)), strict=True))


def _show(rows: Iterable[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    sums: dict[tuple[str, str, str], UsageCounts] = defaultdict(UsageCounts)
    for key, counts in rows:
        sums[_kind(key)] += counts
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in COLUMNS[1:]:
        table.add_column(name.replace("_", " "), justify="left" if name in COLUMNS[:4] else "right")
    for kind, counts in sorted(sums.items()):
        table.add_row(kind[0] or "-", *kind[1:], *map(str, _numbers(counts)))
    Console(highlight=False).print(table)


def _kind(key: UsageKey) -> tuple[str, str, str]:
    return key.tenant, key.model, key.outcome


def _numbers(counts: UsageCounts) -> tuple[int, int, int, int]:
    return (
        counts.num_requests,
        counts.num_prompt_tokens,
        counts.num_cached_tokens,
        counts.num_completion_tokens,
    )
