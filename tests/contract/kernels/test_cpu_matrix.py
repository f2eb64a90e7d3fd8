"""Packed matrices and their tiles against plain products, and bit-equality over row counts."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from finback.kernels.compiled import compiled
from finback.kernels.host import cpu_reason

if cpu_reason() is not None:
    pytest.skip(f"CPU kernels: {cpu_reason()}", allow_module_level=True)

from finback.kernels.linear import cpu_multiply, cpu_packing
from finback.kernels.linear.cpu_packing import PackedMatrix
from finback.kernels.linear.cpu_tiles import TILE_COLUMNS
from finback.kernels.native import peek_i64
from support.packed_cases import CASES

Floats = npt.NDArray[np.float32]


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def _multiply(tiles, num_tiles, num_rows, x, num_k, out, out_step, panel):  # type: ignore[no-untyped-def]  # compiled by numba
    for tile in range(num_tiles):
        w, kind = peek_i64(tiles + tile * 16), peek_i64(tiles + tile * 16 + 8)
        target = out + tile * TILE_COLUMNS * 4
        cpu_multiply.multiply_tile(kind, w, num_rows, x, num_k * 4, num_k, target, out_step, panel)


@compiled("void(int64, int64, int64, int64, int64)")
def _multiply_pairs(tiles, num_tiles, x, num_k, out):  # type: ignore[no-untyped-def]  # compiled by numba
    for tile in range(0, num_tiles - 1, 2):
        w, kind = peek_i64(tiles + tile * 16), peek_i64(tiles + tile * 16 + 8)
        w_step = peek_i64(tiles + tile * 16 + 16) - w
        cpu_multiply.multiply_pair(kind, w, w_step, x, num_k, out + tile * TILE_COLUMNS * 4)


def multiply(matrix: PackedMatrix, x: Floats) -> Floats:
    """x @ matrix: [rows, columns]."""
    num_tiles = len(matrix.tiles)
    out = np.full((len(x), num_tiles * TILE_COLUMNS), np.nan, np.float32)
    panel = cpu_packing.allocate(cpu_multiply.PANEL_BYTES)
    _multiply(
        matrix.tiles.ctypes.data,
        num_tiles,
        len(x),
        x.ctypes.data,
        matrix.num_k,
        out.ctypes.data,
        out.shape[1] * 4,
        panel.ctypes.data,
    )
    return out[:, : matrix.num_columns]


# Q4_K's scales are products that float16 rounds once more.
TOLERANCE = {"Q4_K": 1e-3}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("columns", [TILE_COLUMNS, 3 * TILE_COLUMNS, 2 * TILE_COLUMNS + 5])
@pytest.mark.parametrize("num_k", [256, 768])
def test_product(name: str, columns: int, num_k: int) -> None:
    case = CASES[name](columns, num_k)
    x = np.random.default_rng(7).normal(size=(13, num_k)).astype(np.float32)
    wanted = x.astype(np.float64) @ case.weights.T.astype(np.float64)
    found = multiply(case.matrix, x)
    scale = np.abs(wanted).max()
    assert np.abs(found - wanted).max() / scale < TOLERANCE.get(name, 3e-6)


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_the_number_of_rows(name: str) -> None:
    case = CASES[name](4 * TILE_COLUMNS, 768)
    x = np.random.default_rng(8).normal(size=(29, 768)).astype(np.float32)
    wanted = multiply(case.matrix, x)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 28):
        assert np.array_equal(multiply(case.matrix, x[:num_rows].copy()), wanted[:num_rows])


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_pairs_of_tiles_give_the_same_bits(name: str) -> None:
    case = CASES[name](4 * TILE_COLUMNS, 256)
    x = np.random.default_rng(9).normal(size=(1, 256)).astype(np.float32)
    out = np.zeros((1, 4 * TILE_COLUMNS), np.float32)
    _multiply_pairs(case.matrix.tiles.ctypes.data, 4, x.ctypes.data, 256, out.ctypes.data)
    assert np.array_equal(out, multiply(case.matrix, x))


def test_join_refuses_columns_that_do_not_fill_tiles() -> None:
    parts: list[Any] = [CASES["f32"](5, 64).matrix] * 2
    with pytest.raises(ValueError, match="must be multiples"):
        cpu_packing.join(parts)
