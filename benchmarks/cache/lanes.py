"""How fast KV moves: lane `shm` against memcpy, lane `nats` beside tokens, lane `file` against the disk.

    python benchmarks/cache/lanes.py [--lanes shm,nats,file] [--rounds 5] [--seconds 4] [--dir /some/disk] [--keep]

All checksums are included. In a round each measurement takes its turn, on the same buffers; shown are
medians, and the ratios of one round. Targets: shm 0.55 of memcpy, file 0.8 of direct reads, nats
300 MB/s with tokens under 20 ms (p99). With `--keep` one JSON line goes to `results/cache_lanes.jsonl`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

from cache.lanes_file import measure_file
from cache.lanes_nats import measure_nats
from cache.lanes_shm import measure_shm

from finback.shared.bench.environment import environment

RESULTS = Path(__file__).parents[1] / "results" / "cache_lanes.jsonl"
LANES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "shm": measure_shm,
    "nats": measure_nats,
    "file": measure_file,
}


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", default=",".join(LANES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="for lane `file`")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name in options.lanes.split(","):
        found[name] = LANES[name](options)
        print(name, json.dumps(found[name], indent=1))
    if options.keep:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"environment": environment(), **found}) + "\n")


if __name__ == "__main__":
    main()
