"""What the router costs: the policy alone, and over the bus beside a stream of arrivals.

    .venv/bin/python benchmarks/cache/router.py policy
    .venv/bin/python benchmarks/cache/router.py bus

What is measured is said in `router_policy.py` and `router_bus.py`; results go to
`benchmarks/results/router.jsonl`.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "tests"), str(Path(__file__).parents[1])]

from cache.router_bus import bus
from cache.router_policy import policy

RESULTS = Path(__file__).parents[1] / "results" / "router.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("policy", "bus"))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--no-save", action="store_true")
    given = parser.parse_args()
    if given.what == "policy":
        rows = [policy(given.seconds, is_separate) for is_separate in (False, True)]
    else:
        rows = [asyncio.run(bus(given.seconds))]
    for row in rows:
        line = json.dumps({**row, "at": time.strftime("%Y-%m-%d"), "cpus": os.cpu_count()})
        print(line)
        if not given.no_save:
            with RESULTS.open("a") as out:
                out.write(line + "\n")


if __name__ == "__main__":
    main()
