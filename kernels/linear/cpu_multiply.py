"""Loops around the matrix tiles, for other compiled code."""

from typing import Final

from finback.kernels.compiled import device_function, inlined
from finback.kernels.linear.cpu_packing import BF16, F16, F32, Q4, Q8
from finback.kernels.linear.cpu_tiles import (
    GROUP,
    Q4_GROUP_BYTES,
    Q8_GROUP_BYTES,
    TILE_COLUMNS,
    bf16_tile,
    bf16_wide,
    f16_tile,
    f16_wide,
    f32_tile,
    f32_wide,
    q4_panel,
    q4_rows,
    q8_panel,
    q8_rows,
)
from finback.kernels.simd import MAX_TILE_ROWS

PANEL_K: Final = 256
"""k of an unpacked panel: 16 or 32 KB, to stay in the first-level cache."""

PANEL_BYTES: Final = PANEL_K * TILE_COLUMNS * 4
FEW_ROWS: Final = 4
"""Up to this many rows weights are unpacked in registers, above into a panel."""

WIDE_ROWS: Final = MAX_TILE_ROWS // 2

_q4_one: Final = q4_rows(1, 2)
_q4_two: Final = q4_rows(2, 1)
_q4_three: Final = q4_rows(3, 1)
_q4_four: Final = q4_rows(4, 1)
_q4_one_narrow: Final = q4_rows(1, 1)
_q8_one: Final = q8_rows(1, 2)
_q8_two: Final = q8_rows(2, 1)
_q8_three: Final = q8_rows(3, 1)
_q8_four: Final = q8_rows(4, 1)
_q8_one_narrow: Final = q8_rows(1, 1)


@device_function
def plain_rows(kind, num_rows, x, x_step, w, w_step, count, out, out_step, adds):  # type: ignore[no-untyped-def]  # compiled by numba
    """Any number of rows times one tile of plain weights."""
    done = 0
    while done < num_rows:
        rows = min(num_rows - done, MAX_TILE_ROWS)
        args = (
            rows,
            x + done * x_step,
            x_step,
            w,
            w_step,
            count,
            out + done * out_step,
            out_step,
            adds,
        )
        if kind == F32:
            f32_tile(args)
        elif kind == F16:
            f16_tile(args)
        else:
            bf16_tile(args)
        done += rows


@device_function
def wide_rows(kind, args):  # type: ignore[no-untyped-def]  # compiled by numba
    """Up to WIDE_ROWS rows times two neighbouring tiles; arguments as of `f32_wide`."""
    if kind == F32:
        f32_wide(args)
    elif kind == F16:
        f16_wide(args)
    else:
        bf16_wide(args)


@inlined
def multiply_tile(kind, w, num_rows, x, x_step, num_k, out, out_step, panel):  # type: ignore[no-untyped-def]  # compiled by numba
    """One column tile for all rows. `panel`: PANEL_BYTES of this thread."""
    if kind == F32:
        plain_rows(F32, num_rows, x, x_step, w, TILE_COLUMNS * 4, num_k, out, out_step, 0)
    elif kind == F16 or kind == BF16:
        plain_rows(kind, num_rows, x, x_step, w, TILE_COLUMNS * 2, num_k, out, out_step, 0)
    elif num_rows <= FEW_ROWS:
        _multiply_few(kind, w, num_rows, x, x_step, num_k, out, out_step)
    else:
        done = 0
        while done < num_k:
            count = min(PANEL_K, num_k - done)
            if kind == Q4:
                q4_panel((w + done // GROUP * Q4_GROUP_BYTES, count // GROUP, panel))
            else:
                q8_panel((w + done // GROUP * Q8_GROUP_BYTES, count // GROUP, panel))
            adds = 1 if done else 0
            plain_rows(
                F32,
                num_rows,
                x + done * 4,
                x_step,
                panel,
                TILE_COLUMNS * 4,
                count,
                out,
                out_step,
                adds,
            )
            done += count


@inlined
def _multiply_few(kind, w, num_rows, x, x_step, num_k, out, out_step):  # type: ignore[no-untyped-def]  # compiled by numba
    args = (x, x_step, w, 0, num_k // GROUP, out, out_step)
    if kind == Q4:
        if num_rows == 1:
            _q4_one_narrow(args)
        elif num_rows == 2:
            _q4_two(args)
        elif num_rows == 3:
            _q4_three(args)
        else:
            _q4_four(args)
    elif kind == Q8:
        if num_rows == 1:
            _q8_one_narrow(args)
        elif num_rows == 2:
            _q8_two(args)
        elif num_rows == 3:
            _q8_three(args)
        else:
            _q8_four(args)


@inlined
def multiply_pair(kind, w, w_step, x, num_k, out):  # type: ignore[no-untyped-def]  # compiled by numba
    """Two neighbouring tiles of one quantised kind for a single row: twice the chains in flight."""
    args = (x, 0, w, w_step, num_k // GROUP, out, 0)
    if kind == Q4:
        _q4_one(args)
    else:
        _q8_one(args)
