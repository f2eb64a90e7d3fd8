"""What this machine's processor can do for the compiled CPU kernels."""

import importlib.util
from functools import cache


@cache
def cpu_reason() -> str | None:
    """Why compiled CPU kernels cannot run here, or None. Imports nothing heavy."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    return None
