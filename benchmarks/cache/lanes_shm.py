"""Lane `shm`: copy and checksum of a block, against the plain copy of it."""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from finback.shared.lanes.arena_format import (
    SlotHeader,
    SlotState,
    pack_extent,
    plan_extent,
    write_slot,
)
from finback.shared.lanes.shm import ArenaReader, ArenaWriter
from finback.shared.lanes.ticket import Ticket
from finback.shared.wire.messages.cache import Slot

SIZES = (300_000, 1_000_000, 2_000_000, 4_000_000)
GROUP = 8
EXTENT_BYTES = 256 * 1024 * 1024


def make_arena(folder: Path, slot_bytes: int) -> list[Slot]:
    """One extent of random bytes; every slot is committed."""
    header = plan_extent(1, slot_bytes, EXTENT_BYTES)
    if header is None:
        raise SystemExit("no room for one slot")
    path = folder / header.name
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, header.file_bytes)
    data = np.memmap(path, np.uint8, mode="r+")
    data[:64] = np.frombuffer(pack_extent(header).ljust(64, b"\0"), np.uint8)
    table = memoryview(data)  # type: ignore[arg-type]  # numpy's stubs name no buffer
    committed = SlotHeader(state=SlotState.COMMITTED, generation=5, lease_id="01" * 16, owner="a")
    for index in range(header.num_slots):
        write_slot(table, index, committed)
    data[header.data_offset :] = np.random.default_rng(1).integers(
        0, 256, header.file_bytes - header.data_offset, dtype=np.uint8
    )
    return [
        Slot(
            slot_id=index,
            location=header.name,
            offset=header.slot_offset(index),
            length=slot_bytes,
            generation=5,
        )
        for index in range(header.num_slots)
    ]


def rate(act: Callable[[int], object], indexes: range, size: int) -> float:
    """GB/s of acts on `size` bytes each."""
    begun = time.perf_counter()
    for index in indexes:
        act(index)
    return len(indexes) * size / (time.perf_counter() - begun) / 1e9


def measure_size(size: int, rounds: int) -> dict[str, float]:
    """Medians of GB/s, and of ratios."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        slots = make_arena(folder, -(-size // 4096) * 4096)
        reader, writer = ArenaReader(folder), ArenaWriter(folder)
        source, out = bytearray(os.urandom(size)), bytearray(size)
        views = [writer.view(slot)[:size] for slot in slots]
        arrays = [np.frombuffer(view, np.uint8) for view in views]
        target = np.frombuffer(out, np.uint8)
        origin = np.frombuffer(source, np.uint8)
        tickets = [writer.write(slot, source) for slot in slots]
        found: dict[str, list[float]] = {"memcpy_out": [], "read": [], "memcpy_in": [], "write": []}
        acts: dict[str, Callable[[int], object]] = {
            "memcpy_out": lambda i: np.copyto(target, arrays[i]),
            "read": lambda i: _read(reader, tickets[i], out),
            "memcpy_in": lambda i: np.copyto(arrays[i], origin),
            "write": lambda i: writer.write(slots[i], source),
        }
        for _ in range(rounds):
            # In short turns: what else runs on the machine then disturbs both alike.
            for first in range(0, len(slots) - GROUP + 1, GROUP):
                for what, act in acts.items():
                    found[what].append(rate(act, range(first, first + GROUP), size))
        arrays.clear()
        for view in views:
            view.release()
        reader.close()
        writer.close()
    ratios = {
        "read_ratio": median(
            a / b for a, b in zip(found["read"], found["memcpy_out"], strict=True)
        ),
        "write_ratio": median(
            a / b for a, b in zip(found["write"], found["memcpy_in"], strict=True)
        ),
    }
    rates = {f"{what}_gb_s": median(values) for what, values in found.items()}
    return {key: round(value, 3) for key, value in {**rates, **ratios}.items()}


def _read(reader: ArenaReader, ticket: Ticket, out: bytearray) -> None:
    reader.read_now(ticket, memoryview(out))


def measure_shm(options: argparse.Namespace) -> dict[str, Any]:
    """By block size."""
    return {str(size): measure_size(size, options.rounds) for size in SIZES}
