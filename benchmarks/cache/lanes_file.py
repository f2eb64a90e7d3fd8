"""Lane `file`: reading and checking blocks, against plain direct reads of the same files."""

import argparse
import asyncio
import mmap
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from finback.shared.lanes.file_lane import FileLane
from finback.shared.lanes.ticket import Ticket

BLOCK_BYTES = 4 * 1024 * 1024
NUM_BLOCKS = 32
PIECE_BYTES = 1024 * 1024


def direct(paths: list[Path]) -> None:
    """O_DIRECT into one aligned buffer, nothing checked, in the pieces that the lane reads."""
    buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for at in range(0, BLOCK_BYTES, PIECE_BYTES):
            os.preadv(descriptor, [buffer], at)
        os.close(descriptor)


async def by_lane(lane: FileLane, tickets: list[Ticket], out: memoryview) -> None:
    """As a reader does, a block at a time."""
    for ticket in tickets:
        await lane.get(ticket, out)


async def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Medians in MB/s, taking turns; two readers at once as well."""
    lane = FileLane(folder, "bench", 1)
    await lane.start()
    found: dict[str, list[float]] = {"direct": [], "lane": [], "lane_two_readers": []}
    try:
        tickets = [await lane.put(os.urandom(BLOCK_BYTES)) for _ in range(NUM_BLOCKS)]
        os.sync()
        paths = [folder / ticket.location for ticket in tickets]
        outs = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(2)]
        half = NUM_BLOCKS // 2
        for _ in range(rounds):
            begun = time.perf_counter()
            await asyncio.to_thread(direct, paths)
            found["direct"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            await by_lane(lane, tickets, outs[0])
            found["lane"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            await asyncio.gather(
                by_lane(lane, tickets[:half], outs[0]), by_lane(lane, tickets[half:], outs[1])
            )
            found["lane_two_readers"].append(time.perf_counter() - begun)
    finally:
        await lane.close()
    total = NUM_BLOCKS * BLOCK_BYTES / 1e6
    rates = {f"{what}_mb_s": round(total / median(values), 1) for what, values in found.items()}
    pairs = zip(found["direct"], found["lane"], strict=True)
    return {**rates, "ratio": round(median(plain / read for plain, read in pairs), 3)}


def measure_file(options: argparse.Namespace) -> dict[str, Any]:
    """In a folder of `--dir`."""
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        return asyncio.run(measure(Path(name), options.rounds))
