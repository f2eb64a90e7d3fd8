"""`finback doctor`."""

import sys
from pathlib import Path

from finback.services.supervisor import checks
from finback.shared import config as settings


def doctor(given: Path | None, *, as_json: bool) -> int:
    """Report every check; exit code 1 if something needed is missing."""
    config, _ = settings.load(overrides={"run_dir": str(given) if given else None})
    findings = checks.all_findings(config)
    if as_json:
        sys.stdout.write(checks.to_json(findings) + "\n")
    else:
        _show(findings)
    return 1 if any(finding.level == "missing" for finding in findings) else 0


def _show(findings: list[checks.Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    marks = {"ok": ("ok", "green"), "note": ("note", "yellow"), "missing": ("MISSING", "red")}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in findings:
        word, colour = marks[finding.level]
        found = finding.found + (f"\n{finding.hint}" if finding.hint else "")
        table.add_row(finding.what, Text(word, style=colour), found)
    Console(highlight=False).print(table)
