"""State slots whose exactness can be checked: what a row of a window layer is, is known or it is wrong.

A row of window layer l is the digest of the tokens up to it, if everything that it depends on was
right: the rows of the window below, back to the first token. Whatever was computed from a window that
began too late, or from rows that somebody else wrote, is -1, and so is all that follows from it.
"""

import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

_HEADER = struct.Struct("<qq")


class SimState:
    """Rings of `num_layers` window layers, [slot, layer, row] of the position modulo the length."""

    def __init__(self, num_slots: int, num_layers: int, window: int, rollback: int) -> None:
        self.num_layers, self.window, self.rollback = num_layers, window, rollback
        self.length = window + rollback
        self.rings = np.full((num_slots, num_layers, self.length), -7, dtype=np.int64)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a snapshot."""
        return _HEADER.size + 8 * self.num_layers * (self.window - 1)

    def step(
        self, slot: int, start: int, end: int, floor: int, digest_of: Callable[[int], int]
    ) -> list[bool]:
        """Compute positions `start` .. `end` - 1; is what leaves the last layer exact, for each?

        `digest_of`: of the sequence's tokens up to a position.
        """
        known: list[dict[int, int]] = [{} for _ in range(self.num_layers)]
        for layer, rows in enumerate(known):
            for position in range(max(floor, start - self.window + 1, 0), start):
                rows[position] = int(self.rings[slot, layer, position % self.length])
        exact = []
        for position in range(start, end):
            is_right = True
            for rows in known:
                rows[position] = digest_of(position) if is_right else -1
                seen = range(max(0, position - self.window + 1), position + 1)
                is_right = is_right and all(rows.get(at) == digest_of(at) for at in seen)
            exact.append(is_right)
        for position in range(max(start, end - self.length), end):
            for layer, rows in enumerate(known):
                self.rings[slot, layer, position % self.length] = rows[position]
        return exact

    def pack(self, slot: int, position: int, floor: int, num_computed: int) -> bytes:
        """As `StateSlots.pack`."""
        assert 0 <= num_computed - position <= self.rollback
        rows = np.zeros((self.num_layers, self.window - 1), dtype="<i8")
        for at in range(max(floor, position - self.window + 1), position):
            rows[:, at - position] = self.rings[slot, :, at % self.length]
        return _HEADER.pack(position, floor) + rows.tobytes()

    def unpack(self, slot: int, payload: bytes) -> tuple[int, int]:
        """As `StateSlots.unpack`; (position, floor)."""
        position, floor = _HEADER.unpack_from(payload)
        flat: npt.NDArray[np.int64] = np.frombuffer(payload, dtype="<i8", offset=_HEADER.size)
        rows = flat.reshape(self.num_layers, self.window - 1)
        for at in range(max(floor, position - self.window + 1), position):
            self.rings[slot, :, at % self.length] = rows[:, at - position]
        return position, floor
