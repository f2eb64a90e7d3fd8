"""Which set of compiled CPU kernels runs here: a pure choice from the processor's features.

`FINBACK_CPU_KERNELS` names a lower set than the best one (tests run every set that the machine has);
a set that the machine lacks is refused with the features that are missing.
"""

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

VARIABLE: Final = "FINBACK_CPU_KERNELS"
LANES_VARIABLE: Final = "FINBACK_SIMD_LANES"

Wide = Literal["none", "amx"]
"""How fast mode multiplies many rows: as few rows, or in bfloat16 by AMX tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernels:
    """A set of kernels. `lanes`: float32 values in a vector; `wide`: products of prompt chunks.

    `has_permute`: a register of 16 float32 can be a look-up table.
    """

    name: str
    lanes: int
    wide: Wide
    has_permute: bool = False


SETS: Final = (
    CpuKernels(name="portable", lanes=8, wide="none"),
    CpuKernels(name="avx2", lanes=8, wide="none"),
    CpuKernels(name="avx512", lanes=16, wide="none", has_permute=True),
    CpuKernels(name="amx", lanes=16, wide="amx", has_permute=True),
)
"""From the lowest to the best."""

# Names as in /proc/cpuinfo; every set of x86 needs those before it.
_NEEDS: Final = {
    "portable": frozenset[str](),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": frozenset({"avx512f", "avx512vl", "avx512bw", "avx512dq"}),
    "amx": frozenset({"amx_tile", "amx_bf16"}),
}


def missing_features(name: str, flags: frozenset[str]) -> list[str]:
    """What the processor lacks for a set, sorted."""
    order = [item.name for item in SETS]
    needed = [_NEEDS[item] for item in order[: order.index(name) + 1]]
    return sorted(frozenset().union(*needed) - flags)


def choose(flags: frozenset[str], asked: str = "auto") -> CpuKernels:
    """The set that was asked for, or the best. Raises `ValueError`, one line, if it cannot run."""
    names = [item.name for item in SETS]
    if asked == "auto":
        return next(item for item in reversed(SETS) if not missing_features(item.name, flags))
    if asked not in names:
        raise ValueError(f"{VARIABLE} is {asked!r}; use auto, {', '.join(names)}")
    missing = missing_features(asked, flags)
    if missing:
        raise ValueError(
            f"{VARIABLE} is {asked}, but the processor lacks {', '.join(missing)}; use auto"
        )
    return SETS[names.index(asked)]


@cache
def usable_flags() -> frozenset[str]:
    """Features of the processor that this process may use; asks the kernel for AMX state."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    found: frozenset[str] = frozenset()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            found = frozenset(line.partition(":")[2].split())
            break
    if "amx_tile" in found and not _permit_amx():
        found -= _NEEDS["amx"]
    return found


_ARCH_PRCTL: Final = 158
_REQUEST_STATE: Final = 0x1023
_TILE_DATA: Final = 18


def _permit_amx() -> bool:
    """Ask Linux for room for tile registers in all threads (arch_prctl(2), ARCH_REQ_XCOMP_PERM)."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA)) == 0


@cache
def chosen() -> CpuKernels:
    """The set of this process. Raises `ValueError` as `choose` does."""
    kernels = choose(usable_flags(), os.environ.get(VARIABLE) or "auto")
    lanes = os.environ.get(LANES_VARIABLE)
    if lanes:
        # For tests: the shapes of wide vectors compile for narrow processors too.
        wide: Wide = kernels.wide if lanes == "16" else "none"
        return CpuKernels(
            name=f"{kernels.name}-{lanes}",
            lanes=int(lanes),
            wide=wide,
            has_permute=kernels.has_permute and lanes == "16",
        )
    return kernels
