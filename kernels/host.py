"""What this machine's processor can do for the compiled CPU kernels."""

import importlib.util
import platform
import sys
from functools import cache

from finback.kernels import cpu_features


@cache
def cpu_reason() -> str | None:
    """Why compiled CPU kernels cannot run here, or None. Imports nothing heavy."""
    if sys.platform != "linux" or sys.maxsize < 2**63 - 1:
        return "needs 64-bit Linux"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    if platform.machine() in ("x86_64", "AMD64"):
        missing = cpu_features.missing_features("avx2", cpu_features.usable_flags())
        if missing:
            return f"the processor lacks {', '.join(missing)}"
    try:
        cpu_features.chosen()
    except ValueError as error:
        return str(error)
    return None
