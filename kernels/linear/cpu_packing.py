"""Weights in the layout that the CPU's matrix tiles read: column tiles, k inside, columns innermost.

f32, f16, bf16: [k][TILE_COLUMNS].
q8: groups of 32 k: scale float16 [TILE_COLUMNS], int8 [32][TILE_COLUMNS]; w = q * scale.
q4: groups of 32 k: scale and minimum float16 [2][TILE_COLUMNS], bytes [16][TILE_COLUMNS], the low half
of a byte is an even k, the high half the odd one after it; w = q * scale + minimum.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from finback.kernels.compiled import compiled
from finback.kernels.linear.cpu_tiles import GROUP, Q4_GROUP_BYTES, Q8_GROUP_BYTES, TILE_COLUMNS

F32: Final = 0
F16: Final = 1
BF16: Final = 2
Q8: Final = 3
Q4: Final = 4

_ITEM_BYTES: Final = {F32: 4, F16: 2, BF16: 2}
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """Column tiles of one or several matrices [out, in] side by side.

    `tiles`: int64 [num_tiles, 2], address and kind of each. `num_columns` counts the real ones: the
    last tile may be padded with zeros. `owners` keep the memory.
    """

    tiles: npt.NDArray[np.int64]
    num_columns: int
    num_k: int
    owners: tuple[Bytes, ...]

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return sum(owner.nbytes for owner in self.owners)


def tile_bytes(kind: int, num_k: int) -> int:
    """Bytes of one tile."""
    if kind == Q4:
        return num_k // GROUP * Q4_GROUP_BYTES
    if kind == Q8:
        return num_k // GROUP * Q8_GROUP_BYTES
    return num_k * TILE_COLUMNS * _ITEM_BYTES[kind]


def allocate(num_bytes: int) -> Bytes:
    """Memory that begins at a cache line."""
    raw = np.empty(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes]


def matrix_of(kind: int, data: Bytes, num_columns: int, num_k: int) -> PackedMatrix:
    """A matrix whose tiles all have one kind and lie one after the other in `data`."""
    size = tile_bytes(kind, num_k)
    num_tiles = -(-num_columns // TILE_COLUMNS)
    tiles = np.empty((num_tiles, 2), np.int64)
    tiles[:, 0] = data.ctypes.data + np.arange(num_tiles) * size
    tiles[:, 1] = kind
    return PackedMatrix(tiles=tiles, num_columns=num_columns, num_k=num_k, owners=(data,))


def join(parts: list[PackedMatrix]) -> PackedMatrix:
    """Side by side; every part but the last must fill its tiles."""
    if any(part.num_columns % TILE_COLUMNS for part in parts[:-1]):
        raise ValueError(f"columns to be joined must be multiples of {TILE_COLUMNS}")
    return PackedMatrix(
        tiles=np.concatenate([part.tiles for part in parts]),
        num_columns=sum(part.num_columns for part in parts),
        num_k=parts[0].num_k,
        owners=tuple(owner for part in parts for owner in part.owners),
    )


def pack_plain(kind: int, rows: npt.NDArray[Any]) -> PackedMatrix:
    """rows: [out, in] of 4 or 2 bytes an item (bfloat16 as uint16)."""
    num_columns, num_k = rows.shape
    num_tiles = -(-num_columns // TILE_COLUMNS)
    data = allocate(num_tiles * tile_bytes(kind, num_k))
    view = data.view(rows.dtype).reshape(num_tiles, num_k, TILE_COLUMNS)
    whole = num_columns // TILE_COLUMNS
    view[:whole] = rows[: whole * TILE_COLUMNS].reshape(whole, TILE_COLUMNS, num_k).swapaxes(1, 2)
    if whole < num_tiles:
        view[whole] = 0
        view[whole, :, : num_columns - whole * TILE_COLUMNS] = rows[whole * TILE_COLUMNS :].T
    return matrix_of(kind, data, num_columns, num_k)


def pack_q4(
    quants: Bytes, scales: npt.NDArray[np.float16], minimums: npt.NDArray[np.float16]
) -> PackedMatrix:
    """quants: [out, in / 32, 16], k in the low and k + 16 in the high halves, as ggml has them.

    scales, minimums: [out, in / 32].
    """
    num_columns, num_groups = scales.shape
    num_k = num_groups * GROUP
    num_tiles = -(-num_columns // TILE_COLUMNS)
    data = allocate(num_tiles * tile_bytes(Q4, num_k))
    if num_columns % TILE_COLUMNS:
        data[-tile_bytes(Q4, num_k) :] = 0
    _pack_q4(
        np.ascontiguousarray(quants).reshape(-1),
        np.ascontiguousarray(scales).view(np.uint16).reshape(-1),
        np.ascontiguousarray(minimums).view(np.uint16).reshape(-1),
        num_columns,
        num_groups,
        data,
    )
    return matrix_of(Q4, data, num_columns, num_k)


def pack_q8(quants: Bytes, scales: npt.NDArray[np.float16]) -> PackedMatrix:
    """quants: int8 as uint8 [out, in / 32, 32]; scales: [out, in / 32]."""
    num_columns, num_groups = scales.shape
    num_k = num_groups * GROUP
    num_tiles = -(-num_columns // TILE_COLUMNS)
    data = allocate(num_tiles * tile_bytes(Q8, num_k))
    if num_columns % TILE_COLUMNS:
        data[-tile_bytes(Q8, num_k) :] = 0
    _pack_q8(
        np.ascontiguousarray(quants).reshape(-1),
        np.ascontiguousarray(scales).view(np.uint16).reshape(-1),
        num_columns,
        num_groups,
        data,
    )
    return matrix_of(Q8, data, num_columns, num_k)


@compiled("void(uint8[::1], uint16[::1], uint16[::1], int64, int64, uint8[::1])")
def _pack_q4(quants, scales, minimums, num_columns, num_groups, out):  # type: ignore[no-untyped-def]  # compiled by numba
    for column in range(num_columns):
        tile, lane = column // TILE_COLUMNS, column % TILE_COLUMNS
        for group in range(num_groups):
            source = column * num_groups + group
            start = (tile * num_groups + group) * Q4_GROUP_BYTES
            out[start + 2 * lane] = scales[source] & 0xFF
            out[start + 2 * lane + 1] = scales[source] >> 8
            out[start + 2 * (TILE_COLUMNS + lane)] = minimums[source] & 0xFF
            out[start + 2 * (TILE_COLUMNS + lane) + 1] = minimums[source] >> 8
            target = start + 4 * TILE_COLUMNS + lane
            for pair in range(8):
                low, high = quants[source * 16 + 2 * pair], quants[source * 16 + 2 * pair + 1]
                out[target + pair * TILE_COLUMNS] = (low & 15) | ((high & 15) << 4)
                out[target + (pair + 8) * TILE_COLUMNS] = (low >> 4) | (high & 0xF0)


@compiled("void(uint8[::1], uint16[::1], int64, int64, uint8[::1])")
def _pack_q8(quants, scales, num_columns, num_groups, out):  # type: ignore[no-untyped-def]  # compiled by numba
    for column in range(num_columns):
        tile, lane = column // TILE_COLUMNS, column % TILE_COLUMNS
        for group in range(num_groups):
            source = column * num_groups + group
            start = (tile * num_groups + group) * Q8_GROUP_BYTES
            out[start + 2 * lane] = scales[source] & 0xFF
            out[start + 2 * lane + 1] = scales[source] >> 8
            target = start + 2 * TILE_COLUMNS + lane
            for k in range(GROUP):
                out[target + k * TILE_COLUMNS] = quants[source * GROUP + k]
