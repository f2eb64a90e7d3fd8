"""The device's state slots: a ring of rows for each part and sequence, and their snapshots.

The row of position t lies at t modulo the ring's length. Nothing is ever cleared: a window looks at
no position before its floor, and a sequence's own rows are there by then, whoever used the slot before.
"""

import warnings
from typing import Final

import torch

from finback.shared.errors import InvariantViolated
from finback.shared.kv.state import HEADER_BYTES, StateHeader, StatePart, StateSpec, read_header
from finback.shared.models.kv_pool import DTYPES


class StateSlots:
    """`rows[name]`: [layer, slot, ring, *shape] of each part of the spec.

    `rollback_tokens`: how many of the newest rows may be taken back, and how far a sequence may have
    gone past a position whose snapshot is still to be had.
    """

    def __init__(
        self, spec: StateSpec, *, num_slots: int, rollback_tokens: int, device: str = "cpu"
    ) -> None:
        self.spec: Final = spec
        self.num_slots: Final = num_slots
        self.rollback_tokens: Final = rollback_tokens
        self.rows = {
            part.name: torch.zeros(
                (part.num_layers, num_slots, spec.ring_tokens(part, rollback_tokens), *part.shape),
                dtype=DTYPES[part.dtype],
                device=device,
            )
            for part in spec.parts
        }

    @property
    def num_bytes(self) -> int:
        """Device memory taken."""
        return sum(rows.nbytes for rows in self.rows.values())

    def pack(self, slot: int, position: int, floor: int, num_computed: int) -> bytes:
        """The state at `position` of a sequence that has come to `num_computed`; see `StateSpec`.

        Rows before `floor`, which nobody looks at, are zeros.
        """
        if not 0 <= num_computed - position <= self.rollback_tokens:
            raise InvariantViolated(
                f"the state at {position} is gone, the sequence is at {num_computed}"
            )
        payload = bytearray(self.spec.payload_bytes_at(position))
        view = memoryview(payload)
        StateHeader(position=position, floor=floor).pack_into(view)
        for part, host in self._host_parts(view, position):
            first = max(floor, position - host.shape[1])
            ring = self.rows[part.name]
            places = _places(first, position, ring)
            host[:, host.shape[1] - places.numel() :].copy_(ring[:, slot, places])
        return bytes(payload)

    def unpack(self, slot: int, payload: bytes | memoryview) -> StateHeader:
        """Put a snapshot into a slot. Raises `InvalidRequest` for one that does not fit."""
        header = read_header(payload, self.spec)
        for part, host in self._host_parts(memoryview(payload), header.position):
            first = max(header.floor, header.position - host.shape[1])
            ring = self.rows[part.name]
            places = _places(first, header.position, ring)
            source = host[:, host.shape[1] - places.numel() :]
            ring[:, slot].index_copy_(1, places, source.to(ring.device))
        return header

    def _host_parts(
        self, payload: memoryview, position: int
    ) -> list[tuple[StatePart, torch.Tensor]]:
        """[layer, row, *shape] views of a payload; parts without rows at `position` are left out."""
        parts, offset = [], HEADER_BYTES
        for part in self.spec.parts:
            num_rows = part.rows_at(position)
            size = num_rows * part.row_bytes
            if size:
                shape = (part.num_layers, num_rows, *part.shape)
                flat = _flat(payload[offset : offset + size], DTYPES[part.dtype])
                parts.append((part, flat.view(shape)))
            offset += size
        return parts


def _places(first: int, end: int, ring: torch.Tensor) -> torch.Tensor:
    """Where the rows of positions `first` .. `end` - 1 lie."""
    return torch.arange(first, end, device=ring.device) % ring.shape[2]


def _flat(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    with warnings.catch_warnings():
        # A read-only payload is only ever read from.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=dtype)
