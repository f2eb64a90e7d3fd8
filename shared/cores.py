"""How many cores this process may use. Torch-free."""

import os
from pathlib import Path
from typing import Final

_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")


def num_cores(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """The least of its affinity and the quotas of its control groups, rounded up; at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    for folder in _folders(cgroups, own):
        quota = _quota(folder)
        if quota is not None:
            cores = min(cores, max(1, quota))
    return cores


def _folders(cgroups: Path, own: Path) -> list[Path]:
    """The groups this process is in, innermost first: any of them may set a limit (cgroup v2, then v1)."""
    found = [cgroups, cgroups / "cpu"]
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = cgroups if not controllers else cgroups / "cpu"
        if controllers and "cpu" not in controllers.split(","):
            continue
        inner = base / path.lstrip("/")
        found += [inner, *(part for part in inner.parents if part.is_relative_to(base))]
    return list(dict.fromkeys(found))


def _quota(folder: Path) -> int | None:
    """Whole cores of one group's quota; None: it has none."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit() or not int(period):
        return None  # "max", or -1 of v1
    return -(-int(quota) // int(period))
