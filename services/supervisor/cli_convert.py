"""`finback models convert`: a DeepSeek V4 folder under the other set of names."""

import sys
from pathlib import Path

from finback.services.supervisor.cli_inspect import size
from finback.shared.errors import ConfigError


def convert(folder: Path, out: Path, *, layout: str, dtype: str, max_shard_bytes: int) -> int:
    """Exit code 1: nothing usable was written, for the reason told."""
    from finback.shared.models.deepseek_v4.convert import convert as run  # torch; only here

    shows = sys.stderr.isatty()
    try:
        written = run(
            folder,
            out,
            layout=layout,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            on_progress=_show if shows else None,
        )
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if shows:
        sys.stderr.write("\n")
    total = sum(path.stat().st_size for path in written)
    sys.stdout.write(f"{out}: {size(total)} in {len(written)} files, {layout} names\n")
    return 0


def _show(done: int, total: int) -> None:
    sys.stderr.write(f"\r{size(done)} of {size(total)}")
    sys.stderr.flush()
