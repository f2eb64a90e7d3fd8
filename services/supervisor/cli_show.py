"""`finback models` and `finback config`."""

import json
import sys
from pathlib import Path
from typing import Any

from finback.services.supervisor import locate
from finback.shared import config as settings
from finback.shared.errors import Unavailable


def models(given: Path | None, *, key: str | None, as_json: bool) -> int:
    """What `GET /v1/models` says."""
    import httpx

    from finback.services.supervisor.ask import message_of

    found = locate.running(given)
    sent = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx.get(f"{found.state.http}/v1/models", headers=sent, timeout=10.0)
    except httpx.HTTPError as error:
        raise Unavailable(f"{found.state.http}: {error or type(error).__name__}") from error
    if reply.status_code != 200:
        raise Unavailable(message_of(reply.content, f"HTTP {reply.status_code}"))
    if as_json:
        sys.stdout.write(json.dumps(reply.json()) + "\n")
    else:
        _table(reply.json()["data"])
    return 0


def _table(rows: list[dict[str, Any]]) -> None:
    """Every field that the API gives, one column each."""
    from rich.console import Console
    from rich.table import Table

    columns = [name for name in dict.fromkeys(n for row in rows for n in row) if name != "object"]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name)
    for row in rows:
        table.add_row(*("" if row.get(name) is None else str(row[name]) for name in columns))
    Console(highlight=False).print(table)


def config(file: Path | None, overrides: dict[str, Any], *, as_json: bool) -> int:
    """Effective settings; secrets are masked."""
    loaded, sources = settings.load(file, None, overrides)
    rows: list[tuple[str, Any, str, str]] = []
    for name, (_, told) in settings.settings().items():
        value = getattr(loaded, name)
        shown = "***" if told.is_secret and value else value
        rows.append(
            (name, shown, sources[name], told.help + (f" [{told.unit}]" if told.unit else ""))
        )
    if as_json:
        out = {name: {"value": value, "source": source} for name, value, source, _ in rows}
        sys.stdout.write(json.dumps(out, indent=2) + "\n")
        return 0
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("setting", "value", "from", "what it is"):
        table.add_column(column, overflow="fold")
    for name, value, source, told_help in rows:
        style = "dim" if source == "default" else ""
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        table.add_row(*(Text(cell, style=style) for cell in (name, text, source, told_help)))
    Console(highlight=False).print(table)
    return 0
