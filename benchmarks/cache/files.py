"""The file tier: reads against plain direct reads of the same sizes, puts, and opening.

    python benchmarks/cache/files.py --folder /path/on/the/disk [--keep]

Each round reads another prefix, in an order of its own: with plain `preadv` and O_DIRECT from a file of its own (a record a
call, then 8 MiB a call, each with one thread and with two), and through the store, checksums
included. `of_best` is the store's rate by that of the fastest plain way over all rounds.
"""

import argparse
import itertools
import json
import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import xxhash

from finback.services.cache.segments.format import PAGE, pages
from finback.services.cache.segments.record import BlockRecord, Miss
from finback.services.cache.segments.store import SegmentStore
from finback.shared.bench.environment import environment

SALT: Final = "bench"
RUN_BYTES: Final = 8 * 1024 * 1024
PREFIX_BLOCKS: Final = 32
# (name, payload bytes): SmolLM2's blocks of 64 tokens in bfloat16 with their token ids, and others.
SIZES: Final = (("smollm2", 1_474_816), ("large", 4_194_560), ("small", 131_328))


@dataclass(slots=True)
class Payloads:
    """Random bytes, a different slice for each block."""

    data: memoryview

    def of(self, number: int, size: int) -> memoryview:
        """The payload of a block."""
        at = number * 4099 % (self.data.nbytes - size)
        return self.data[at : at + size]


def hash_of(number: int) -> bytes:
    """A block's name."""
    return blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def record_of(number: int, payload: memoryview) -> BlockRecord:
    """A block's record."""
    return BlockRecord(
        salt=SALT,
        hash=hash_of(number),
        length=payload.nbytes,
        checksum=xxhash.xxh3_128_digest(payload),
        expires_unix_s=time.time() + 86_400,
        first_block=number % PREFIX_BLOCKS,
    )


def opened(folder: Path, **more: Any) -> SegmentStore:
    """An open store without a quota to speak of."""
    store = SegmentStore(folder, max_bytes=2**40, cluster_key=bytes(32), **more)
    store.open()
    return store


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


class PlainReads:
    """A file of random bytes, read past the page cache."""

    def __init__(self, path: Path, num_bytes: int, payloads: Payloads) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        self._fd = os.open(path, flags, 0o600)
        chunk = mmap.mmap(-1, RUN_BYTES)
        chunk[:] = payloads.data[:RUN_BYTES]
        for offset in range(0, num_bytes, RUN_BYTES):
            os.pwrite(self._fd, chunk, offset)
        os.fsync(self._fd)
        self._threads = ThreadPoolExecutor(2)

    def read(self, offset: int, outs: list[memoryview], per_call: int, threads: int) -> None:
        """Fill `outs` from `offset` on, `per_call` of them with each call."""
        groups = [outs[at : at + per_call] for at in range(0, len(outs), per_call)]
        starts = itertools.accumulate((sum(o.nbytes for o in g) for g in groups), initial=offset)
        jobs = list(zip(groups, starts, strict=False))
        if threads == 1:
            for group, start in jobs:
                os.preadv(self._fd, group, start)
        else:
            list(self._threads.map(lambda job: os.preadv(self._fd, *job), jobs))

    def read_prefix(
        self, span: int, outs: list[memoryview], per_call: int, threads: int, first: int
    ) -> None:
        """The records of a prefix, `span` bytes each."""
        self.read(first * span, outs, per_call, threads)

    def close(self) -> None:
        """Close the file."""
        self._threads.shutdown()
        os.close(self._fd)


def plain_ways(span: int) -> Iterator[tuple[str, int, int]]:
    """(name, records a call, threads)."""
    for threads in (1, 2):
        yield f"plain_record_{threads}", 1, threads
        yield f"plain_run_{threads}", max(1, RUN_BYTES // span), threads


def measure_reads(
    folder: Path, name: str, size: int, rounds: int, payloads: Payloads
) -> dict[str, Any]:
    """MB/s of each way over the rounds, in turns."""
    span = PAGE + pages(size)
    total = rounds * PREFIX_BLOCKS
    store = opened(folder / name, compress=False)
    put_s = [timed(lambda n=n: put(store, n, size, payloads)) for n in range(total)]  # type: ignore[misc]  # a default binds the loop's value
    store.close()
    store = opened(folder / name)
    plain = PlainReads(folder / f"plain-{name}", total * span, payloads)
    outs = [memoryview(mmap.mmap(-1, span)) for _ in range(PREFIX_BLOCKS)]
    times: dict[str, list[float]] = {}
    ways: dict[str, Callable[[int], object]] = {
        way: partial(plain.read_prefix, span, outs, per_call, threads)
        for way, per_call, threads in plain_ways(span)
    }
    ways["store"] = partial(read_prefix, store, size, outs, payloads)
    ways["store_single"] = partial(read_single, store, outs)
    order = list(ways)
    drawn = random.Random(0)
    for number in range(rounds):
        drawn.shuffle(order)  # what comes behind a slow one finds another machine
        for way in order:
            spent = timed(partial(ways[way], number * PREFIX_BLOCKS))
            times.setdefault(way, []).append(spent)
    plain.close()
    store.close()
    shutil.rmtree(folder / name)
    (folder / f"plain-{name}").unlink()
    return reads_row(name, size, times, put_s)


def reads_row(
    name: str, size: int, times: dict[str, list[float]], put_s: list[float]
) -> dict[str, Any]:
    """Rates of the payload bytes, without the first round."""
    moved = PREFIX_BLOCKS * size / 1e6
    rates = {way: round(moved / median(spent[1:]), 1) for way, spent in times.items()}
    best = max(rate for way, rate in rates.items() if way.startswith("plain"))
    return {
        "what": "read",
        "blocks": name,
        "payload_bytes": size,
        "mb_s": rates,
        "of_best": round(rates["store"] / best, 3),
        "of_same_call_one_thread": round(rates["store"] / rates["plain_run_1"], 3),
        "single_of_record": round(rates["store_single"] / rates["plain_record_1"], 3),
        "puts_s": round(1 / median(put_s), 1),
        "put_mb_s": round(size / 1e6 / median(put_s), 1),
    }


def put(store: SegmentStore, number: int, size: int, payloads: Payloads) -> None:
    """One put that has to succeed."""
    payload = payloads.of(number, size)
    if not store.put(record_of(number, payload), payload):
        raise SystemExit(f"block {number} was refused: {store.stats().counts}")


def put_all(store: SegmentStore, count: int, payloads: Payloads) -> None:
    """Many small blocks."""
    for number in range(count):
        put(store, number, 1000, payloads)


def read_prefix(
    store: SegmentStore, size: int, outs: list[memoryview], payloads: Payloads, first: int
) -> None:
    """One prefix with one call, and proof that it is the right one."""
    found = store.read_many(SALT, [hash_of(first + at) for at in range(PREFIX_BLOCKS)], outs)
    if any(isinstance(record, Miss) for record in found):
        raise SystemExit(f"a miss: {found}")
    if outs[1][: size : size // 8] != payloads.of(first + 1, size)[:: size // 8]:
        raise SystemExit("wrong bytes")


def read_single(store: SegmentStore, outs: list[memoryview], first: int) -> None:
    """One block a call."""
    for at, out in enumerate(outs):
        store.read_into(SALT, hash_of(first + at), out)


def measure_small(folder: Path, count: int, payloads: Payloads) -> list[dict[str, Any]]:
    """Puts of small records, and how long opening takes with an index and without."""
    store = opened(folder / "many")
    put_s = timed(lambda: put_all(store, count, payloads))
    hashes = [hash_of(number) for number in range(0, count, max(1, count // 10_000))]
    lookup_s = timed(lambda: store.lookup(SALT, hashes))
    store.sweep()
    shutil.copytree(folder / "many", folder / "crashed")
    close_s = timed(store.close)
    open_s = open_time(folder / "many")
    crashed_s = open_time(folder / "crashed")
    (folder / "crashed" / "local" / "index.sqlite").unlink()
    rebuild_s = open_time(folder / "crashed")
    return [
        {
            "what": "many",
            "num_blocks": count,
            "payload_bytes": 1000,
            "puts_s": round(count / put_s),
            "lookups_s": round(len(hashes) / lookup_s),
            "close_s": round(close_s, 3),
            "open_s": round(open_s, 3),
            "open_after_crash_s": round(crashed_s, 3),
            "open_without_index_s": round(rebuild_s, 3),
        }
    ]


def open_time(folder: Path) -> float:
    """Seconds until a store is open."""
    store = SegmentStore(folder, max_bytes=2**40, cluster_key=bytes(32))
    seconds = timed(store.open)
    store.close()
    return seconds


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=".", help="where the files go, on the disk to measure")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--count", type=int, default=100_000, help="small records")
    parser.add_argument("--keep", action="store_true", help="add the result to results/")
    options = parser.parse_args()
    about = environment()
    payloads = Payloads(memoryview(np.random.default_rng(0).bytes(64 * 1024 * 1024)))
    folder = Path(tempfile.mkdtemp(prefix="finback-files-", dir=options.folder))
    rows: list[dict[str, Any]] = []
    try:
        for name, size in SIZES:
            rows.append(measure_reads(folder, name, size, options.rounds, payloads))
            print(json.dumps(rows[-1]), flush=True)
        for row in measure_small(folder, options.count, payloads):
            rows.append(row)
            print(json.dumps(row), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record = {
        "benchmark": "cache_files",
        "unix_s": int(time.time()),
        "rounds": options.rounds,
        "environment": about,
        "rows": rows,
    }
    if options.keep:
        results = Path(__file__).parents[1] / "results" / "cache_files.jsonl"
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
