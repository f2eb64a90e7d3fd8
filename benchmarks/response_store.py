"""What storing costs a turn: one write and one read of a response with its whole context.

    python benchmarks/response_store.py

For each size the medians of `ROUNDS` writes and reads, in milliseconds, as the event loop waits for
them, and how long the loop itself was kept from turning meanwhile.
"""

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from finback.services.gateway.store import Store
from finback.services.gateway.store_limits import StoreLimits
from finback.services.gateway.store_rows import Kept

ROUNDS: Final = 20
WORDS: Final = 20_000
SIZES: Final = ((1, 200), (30, 27_000), (30, 160_000))  # (turns, characters of a turn)
LIMITS: Final = StoreLimits(retention_s=3600.0, max_tenant_values=10**6, max_tenant_bytes=2**40)


def words(rng: random.Random, count: int) -> list[str]:
    """Made-up words of three to nine letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(rng.choices(letters, k=rng.randint(3, 9))) for _ in range(count)]


def context(turns: int, chars: int) -> list[dict[str, Any]]:
    """Text that compresses about as well as prose."""
    rng = random.Random(turns)
    vocabulary = words(rng, WORDS)
    weights = [1 / (at + 1) for at in range(WORDS)]
    texts = (" ".join(rng.choices(vocabulary, weights, k=chars // 6)) for _ in range(turns))
    return [{"id": f"m{at}", "type": "message", "content": text} for at, text in enumerate(texts)]


async def longest_pause_ms(stop: asyncio.Event) -> float:
    """The longest time that the loop did not turn, until `stop`."""
    longest, last = 0.0, time.perf_counter()
    while not stop.is_set():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last - 0.001), now
    return longest * 1000


async def measure(store: Store, turns: int, chars: int) -> str:
    """One line of the table."""
    items = context(turns, chars)
    stop = asyncio.Event()
    watching = asyncio.create_task(longest_pause_ms(stop))
    writes, reads = [], []
    for at in range(ROUNDS):
        name = f"r-{turns}-{chars}-{at}"
        body = {"id": name, "status": "completed", "output": [{"id": f"o{at}", "text": "x" * 200}]}
        begun = time.perf_counter()
        await store.responses.keep(Kept(response_id=name, tenant="t", body=body, items=items))
        writes.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        await store.responses.get("t", name, with_items=True)
        reads.append(time.perf_counter() - begun)
    stop.set()
    write_ms, read_ms = (sorted(times)[ROUNDS // 2] * 1000 for times in (writes, reads))
    pause_ms = await watching
    size = turns * chars / 1024
    return f"{turns:5d} {size:9.0f} {write_ms:9.2f} {read_ms:9.2f} {pause_ms:9.1f}"


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(str(Path(folder) / "responses.sqlite"), LIMITS, max_bytes=2**34)
        await store.open()
        print("turns       KiB  write ms   read ms  pause ms")
        for turns, chars in SIZES:
            print(await measure(store, turns, chars))
        await store.close()


if __name__ == "__main__":
    asyncio.run(main())
