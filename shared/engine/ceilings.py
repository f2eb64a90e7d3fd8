"""What this machine reaches at most: memory traffic and matrix products, measured.

`python -m finback.shared.engine.ceilings cpu` prints one JSON line. Each figure is the best of
several runs: a ceiling is what was reached once, not what is usual beside other work. `copy` counts
bytes read and written; `read` is a matrix-vector product over a matrix far larger than the caches.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Final

import torch

from finback.shared.cores import num_cores
from finback.shared.engine.device import choose_device, set_num_threads

NUM_RUNS: Final = 12
_MIB: Final = 2**20
# (bytes copied, columns of the matrix that is read, sizes and dtypes of products)
_CPU: Final = (256 * _MIB, 8192, ((2048, torch.float32), (1024, torch.bfloat16)))
_ACCELERATOR: Final = (4096 * _MIB, 16384, ((8192, torch.bfloat16),))


def measure(device: str) -> dict[str, float | str]:
    """copy and read in bytes/s, the best product in FLOP/s with its dtype."""
    num_bytes, columns, products = _CPU if device == "cpu" else _ACCELERATOR
    if device == "cpu":
        set_num_threads(num_cores())
    found: dict[str, float | str] = {"device": device}
    found["copy_bytes_per_s"] = _copy(device, num_bytes)
    found["read_bytes_per_s"] = _read(device, columns)
    rates = {str(dtype): _product(device, size, dtype) for size, dtype in products}
    best = max(rates, key=lambda name: rates[name])
    return found | {"flops_per_s": rates[best], "flops_dtype": best.removeprefix("torch.")}


def _copy(device: str, num_bytes: int) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _best_s(device, lambda: target.copy_(source))


def _read(device: str, columns: int) -> float:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    matrix = torch.rand(columns, columns, dtype=dtype, device=device)
    vector = torch.rand(columns, dtype=dtype, device=device)
    return matrix.nbytes / _best_s(device, lambda: torch.mv(matrix, vector))


def _product(device: str, size: int, dtype: torch.dtype) -> float:
    # Random values: products of zeros run faster on some devices.
    left = torch.rand(size, size, device=device).to(dtype)
    right = torch.rand(size, size, device=device).to(dtype)
    return float(2 * size**3 / _best_s(device, lambda: left @ right))


def _best_s(device: str, launch: Callable[[], object]) -> float:
    """Seconds of the fastest of `NUM_RUNS` after one that is not counted.

    On an accelerator a run is several launches, so that the wait at its end weighs little.
    """
    launches = 1 if device == "cpu" else 8
    best = float("inf")
    for run in range(NUM_RUNS + 1):
        started = time.perf_counter()
        for _ in range(launches):
            launch()
        if device != "cpu":
            torch.accelerator.synchronize()
        if run:
            best = min(best, (time.perf_counter() - started) / launches)
    return best


def main() -> None:
    """Command line: the device's name."""
    device = choose_device(sys.argv[1] if len(sys.argv) > 1 else "auto")
    sys.stdout.write(json.dumps(measure(device)) + "\n")


if __name__ == "__main__":
    main()
