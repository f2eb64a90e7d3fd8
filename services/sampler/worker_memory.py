"""What this process holds: the allocator's own count, and a bound on its address space."""

import contextlib
import ctypes
import resource
import sys
from functools import cache
from pathlib import Path
from typing import Final

_FIELDS: Final = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd",
    "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]  # read by ctypes


@cache
def _mallinfo2() -> "ctypes._NamedFuncPointer | None":
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.restype = _MallInfo
    return found


def allocated_bytes() -> int:
    """Bytes that the C allocator has given out in the main arena; 0 where it does not tell."""
    count = _mallinfo2()
    if count is None:
        return 0
    info = count()
    return int(info.uordblks + info.hblkhd)


def give_back_unused() -> None:
    """Ask the allocator to return free pages to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def limit_growth(num_bytes: int) -> None:
    """Let the address space grow by `num_bytes` at most; an allocation beyond ends the process."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, shared pages included; 0 if it cannot be told."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def die_with_parent() -> None:
    """On Linux: be killed when the process that forked this one ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig, sigkill = 1, 9
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, sigkill)
