"""What a sequence must keep beside its KV blocks: named rows by absolute position. Torch-free.

A layer with a sliding window needs the keys and values of the tokens just before the next one; a
compressor (DeepSeek V4) needs its lookback and the pending rows of an open window. All of it is a
*part* here: rows in a ring, the row of position t at t modulo the ring's length, so that refused
drafts need no undo: they are written again. State belongs to a position, not to a block: "the state
at P" is what computing token P needs of the tokens before it.

A snapshot is the state at one position as one contiguous payload, so that it travels, is checked
and is stored like a block: a header, then part by part [layer, row, ...] with the last rows before P in
order (zeros where that is before the first token). How many rows that are may depend on P: rows that
wait for an entry to close are none at multiples of the entry's length, which is where snapshots are kept.
"""

import math
import struct
from dataclasses import dataclass
from typing import Final

from finback.shared.errors import InvalidRequest
from finback.shared.kv.layout import ITEM_BYTES

STATE_VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sIqq")
_MAGIC: Final = b"fbst"
HEADER_BYTES: Final = _HEADER.size


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """One kind of row. `num_layers` layers have it, `shape` is a row of one layer.

    The state at P holds the rows of the last `lookback_tokens` + P modulo `period_tokens` positions: a
    window of W tokens has a lookback of W - 1; what a compressor of ratio m collects has the period m,
    and if entries overlap a lookback of m too. `dtype` is one of `ITEM_BYTES`.
    """

    name: str
    num_layers: int
    lookback_tokens: int
    shape: tuple[int, ...]
    dtype: str
    period_tokens: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype of {self.name} must be one of {sorted(ITEM_BYTES)}")
        least = min(self.num_layers, self.period_tokens, min(self.shape, default=0))
        if least < 1 or self.lookback_tokens < 0:
            raise ValueError(f"the sizes of {self.name} must be positive")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row over all its layers."""
        return self.num_layers * math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def rows_at(self, position: int) -> int:
        """How many rows the state at `position` holds."""
        return self.lookback_tokens + position % self.period_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """All state of a sequence. `replay_tokens`: so many tokens computed anew before P, from nothing
    but block KV, give the exact state at P (`state_policy.exact_replay_tokens` derives it).

    `window_tokens`: the widest window, for people and for the registry. `align_tokens`: a replay begins
    at multiples of it.
    """

    parts: tuple[StatePart, ...]
    replay_tokens: int
    window_tokens: int
    align_tokens: int = 1

    def payload_bytes_at(self, position: int) -> int:
        """Bytes of the state at `position`."""
        rows = sum(part.rows_at(position) * part.row_bytes for part in self.parts)
        return HEADER_BYTES + rows

    @property
    def payload_bytes(self) -> int:
        """Bytes of a snapshot: at multiples of all periods, the least that there is."""
        return self.payload_bytes_at(0)

    @property
    def most_payload_bytes(self) -> int:
        """No state is larger."""
        most = sum((p.lookback_tokens + p.period_tokens - 1) * p.row_bytes for p in self.parts)
        return HEADER_BYTES + most

    def ring_tokens(self, part: StatePart, rollback_tokens: int) -> int:
        """Rows of a part's ring: all before a token, its own, and those that may be taken back."""
        return part.lookback_tokens + part.period_tokens + rollback_tokens

    def slot_bytes(self, rollback_tokens: int) -> int:
        """Device memory of one sequence's state."""
        return sum(self.ring_tokens(part, rollback_tokens) * part.row_bytes for part in self.parts)

    def describe(self) -> str:
        """A stable text of the payload's layout, for the salt of what it fits."""
        parts = (
            f"{p.name}:{p.num_layers}x{p.lookback_tokens}+{p.period_tokens}x{p.shape}:{p.dtype}"
            for p in self.parts
        )
        return f"state/{STATE_VERSION} " + " ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHeader:
    """`position`: where the state belongs. `floor`: the first position that windows may look at."""

    position: int
    floor: int

    def pack_into(self, payload: memoryview) -> None:
        """Write the header of a payload."""
        _HEADER.pack_into(payload, 0, _MAGIC, STATE_VERSION, self.position, self.floor)


def read_header(payload: bytes | bytearray | memoryview, spec: StateSpec) -> StateHeader:
    """Check size and header of a snapshot. Raises `InvalidRequest` that names what is wrong."""
    if len(payload) < HEADER_BYTES:
        raise InvalidRequest(f"a state payload has {HEADER_BYTES} bytes at least")
    magic, version, position, floor = _HEADER.unpack_from(payload)
    if magic != _MAGIC or version != STATE_VERSION:
        raise InvalidRequest(f"the payload is no state of version {STATE_VERSION}")
    if not 0 <= floor <= position:
        raise InvalidRequest(f"a state at {position} cannot begin at {floor}")
    wanted = spec.payload_bytes_at(position)
    if len(payload) != wanted:
        raise InvalidRequest(f"the state at {position} has {wanted} bytes, not {len(payload)}")
    return StateHeader(position=int(position), floor=int(floor))
