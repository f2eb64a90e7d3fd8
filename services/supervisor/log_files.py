"""Log files that children append to directly, so that they outlive the supervisor; rotated by copy."""

import os
from pathlib import Path
from typing import Final

MAX_LOG_BYTES: Final = 16 * 1024 * 1024
TAIL_BYTES: Final = 16 * 1024


def open_for_append(path: Path) -> int:
    """A descriptor for a child's output. O_APPEND: its writes stay whole when we truncate."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def rotate(path: Path, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Keep one older file: copy what is there to `<name>.1`, then truncate in place.

    Lines written between the copy and the truncation are lost; the writer needs no signal.
    """
    try:
        if path.stat().st_size < max_bytes:
            return False
        content = path.read_bytes()
        older = path.with_name(path.name + ".1")
        older.write_bytes(content)
        older.chmod(0o600)
        os.truncate(path, 0)
    except OSError:
        return False
    return True


def last_line(path: Path) -> str:
    """The last line that says something: a child's reason for ending."""
    lines = [line.strip() for line in tail(path).splitlines() if line.strip()]
    return lines[-1] if lines else ""


def tail(path: Path, max_bytes: int = TAIL_BYTES) -> str:
    """The end of a log, at most `max_bytes` of it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
