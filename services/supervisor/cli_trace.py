"""`finback trace`."""

import dataclasses
import json
import sys
from pathlib import Path

from finback.services.supervisor import locate, trace_tree
from finback.shared import config as settings
from finback.shared.errors import ConfigError


def trace(given: Path | None, wanted: str, *, as_json: bool) -> int:
    """Draw one trace, of a stack that runs or has run in this folder."""
    run_dir = locate.run_dir(given)
    state = run_dir.read_state()
    folder = Path(state.trace_dir) if state and state.trace_dir else _trace_dir(run_dir.root)
    spans = trace_tree.find(trace_tree.read(folder), wanted)
    if not spans:
        raise ConfigError(f"no trace of {wanted} in {folder}")
    if as_json:
        ordered = sorted(spans, key=lambda span: span.start_ns)
        sys.stdout.write(json.dumps([dataclasses.asdict(span) for span in ordered]) + "\n")
        return 0
    from rich.console import Console

    from finback.services.supervisor import waterfall

    waterfall.draw(spans, Console())
    return 0


def _trace_dir(run_dir: Path) -> Path:
    config, _ = settings.load(overrides={"run_dir": str(run_dir)})
    return Path(config.trace_dir)
