"""Where and with what a bench ran, for its record."""

import importlib.metadata
import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil

_PACKAGES: Final = (
    "finback",
    "nats-py",
    "uvloop",
    "httptools",
    "msgpack",
    "numpy",
    "torch",
    "numba",
)
_TIMEOUT_S: Final = 10.0


def environment() -> dict[str, Any]:
    """Versions, commit, machine and load, as they are now. Imports nothing heavy."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(Path(__file__).resolve().parent),
        "versions": {"python": platform.python_version(), **_versions()},
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus(),
        # What else ran: figures of a busy machine are figures of that.
        "load_average_1m": round(os.getloadavg()[0], 2),
    }


def commit(folder: Path) -> str | None:
    """The source's commit, `-dirty` if files differ from it; None outside a repository."""
    head = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    if head is None:
        return None
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if changed else head


def gpus() -> list[str]:
    """Names and drivers of NVIDIA devices, as `nvidia-smi` tells them."""
    told = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return [line.strip() for line in told.splitlines()] if told else []


def device_used_bytes() -> int | None:
    """Memory in use on all NVIDIA devices, by whatever process; None where there is none."""
    told = _output("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    if not told:
        return None
    try:
        return sum(int(line) for line in told.splitlines()) * 2**20
    except ValueError:
        return None


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
