"""Random bit flips in arena, files and messages that are then read: is each one found?

    python benchmarks/cache/corruption.py [--runs 1000] [--seed 1] [--keep]

A run puts random bytes on one of the ways they travel, flips one bit, or up to 8, of what a reader will
read, and reads. Right is a miss (`CorruptData`, `WireError`), wrong an answer, equal or not: a flip that
is not found counts as undetected even where the answer happens to be right. Bytes that no reader reads
(padding, other slots, the scheduling fields of a slot header) are never flipped, so every flip counts.

Ways: `arena` a block's bytes; `slot` the part of its header that readers use; `extent` the header of the
extent, before it is opened; `file` a file of lane `file`; `tokens`, `handoff` messages, whole bodies;
`piece` a piece of lane `nats` on its way; `payload` a stored block with its tokens behind it.
Prints a table and exits with 1 if anything was wrong. With `--keep` one JSON line goes to
`results/cache_corruption.jsonl`.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from cache.corruption_cases import Cases

from finback.shared.bench.environment import environment

RESULTS = Path(__file__).parents[1] / "results" / "cache_corruption.jsonl"


async def run_all(num_runs: int, seed: int) -> dict[str, dict[str, int]]:
    """Counts by way: runs, detected, wrong answers."""
    drawn = random.Random(seed)
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=root) as name:
        cases = Cases(Path(name), drawn)
        await cases.open()
        try:
            found = {way: {"runs": 0, "detected": 0, "wrong": 0} for way in cases.ways}
            for number in range(num_runs):
                way = list(cases.ways)[number % len(cases.ways)]
                outcome = await cases.ways[way]()
                found[way]["runs"] += 1
                found[way]["detected"] += outcome == "miss"
                found[way]["wrong"] += outcome == "wrong"
        finally:
            await cases.close()
    return found


def main() -> None:
    """Run, tell, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(run_all(options.runs, options.seed))
    for way, counts in found.items():
        print(
            f"{way:8} {counts['runs']:5} runs {counts['detected']:5} found {counts['wrong']} wrong"
        )
    total = {
        key: sum(counts[key] for counts in found.values()) for key in ("runs", "detected", "wrong")
    }
    print(f"{'all':8} {total['runs']:5} runs {total['detected']:5} found {total['wrong']} wrong")
    if options.keep:
        line = {"environment": environment(), "seed": options.seed, "total": total, "ways": found}
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    sys.exit(0 if total["wrong"] == 0 and total["detected"] == total["runs"] else 1)


if __name__ == "__main__":
    main()
