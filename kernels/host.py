"""What this machine's processor can do for the compiled CPU kernels."""

import importlib.util
import platform
import sys
from functools import cache
from pathlib import Path


@cache
def cpu_reason() -> str | None:
    """Why compiled CPU kernels cannot run here, or None. Imports nothing heavy."""
    if sys.platform != "linux" or sys.maxsize < 2**63 - 1:
        return "needs 64-bit Linux"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    if platform.machine() in ("x86_64", "AMD64"):
        missing = {"avx2", "fma", "f16c"} - _x86_flags()
        if missing:
            return f"the processor lacks {', '.join(sorted(missing))}"
    return None


def _x86_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()
