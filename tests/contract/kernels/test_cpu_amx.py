"""Tile products and their row kernels against numpy in float32 over operands rounded to bfloat16."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from finback.kernels.compiled import compiled
from finback.kernels.host import cpu_reason

if cpu_reason() is not None:
    pytest.skip(f"CPU kernels: {cpu_reason()}", allow_module_level=True)

from finback.kernels.cpu_features import chosen

if chosen().wide != "amx":
    pytest.skip(f"kernel set {chosen().name}: no AMX tiles", allow_module_level=True)

from finback.kernels.decoder_stack.cpu_wide import _weight_panel
from finback.kernels.linear.cpu_amx import (
    BLOCK_ROWS,
    STEP_BYTES,
    STEP_K,
    amx_product,
    amx_start,
    amx_stop,
    f16_panel_bf16,
)
from finback.kernels.linear.cpu_amx_rows import (
    divided_bf16,
    norm_bf16,
    scaled_bf16,
    silu_mul_bf16,
    softmax_bf16,
)
from finback.kernels.linear.cpu_packing import allocate
from support.packed_cases import CASES

Floats = npt.NDArray[np.float32]
BF16_EPS = 2.0**-8


@compiled("void(int64, int64, int64, int64, int64, int64)")
def _panel(tiles, tile, start, steps, panel, _):  # type: ignore[no-untyped-def]  # compiled by numba
    _weight_panel(tiles, tile, start, steps, panel)


@compiled("void(int64, int64, int64, int64, int64, int64, int64)")
def _product(x, panel, steps, out, out_step, adds, scratch):  # type: ignore[no-untyped-def]  # compiled by numba
    amx_start((scratch,))
    amx_product((x, panel, steps, out, out_step, adds))
    amx_stop((scratch,))


@compiled("void(int64, int64, int64, int64, int64)")
def _values_panel(w, w_step, steps, valid, panel):  # type: ignore[no-untyped-def]  # compiled by numba
    f16_panel_bf16((w, w_step, steps, valid, panel))


@compiled("void(int64, int64, int64, int64, int64, int64)")
def _row(kind, x, weight, out, count, number):  # type: ignore[no-untyped-def]  # compiled by numba
    if kind == 0:
        norm_bf16((x, weight, out, count, number))
    elif kind == 1:
        scaled_bf16((x, out, count, number))
    elif kind == 2:
        divided_bf16((x, out, count, number))
    else:
        silu_mul_bf16((x, out, count))


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _softmax(scores, step, weights, rows, seen, columns, state, mix, dim):  # type: ignore[no-untyped-def]  # compiled by numba
    softmax_bf16((scores, step, weights, rows, seen, columns, state, mix, dim))


def rounded(values: Floats) -> Floats:
    """To bfloat16, ties away from zero."""
    bits = values.view(np.uint32) + np.uint32(0x8000) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def block_of(rows: Floats) -> npt.NDArray[np.uint8]:
    """[32, k] as a block of rows."""
    bits = (rounded(np.ascontiguousarray(rows)).view(np.uint32) >> 16).astype(np.uint16)
    steps = bits.reshape(BLOCK_ROWS, -1, STEP_K).swapaxes(0, 1)
    data = allocate(steps.size * 2)
    data[:] = np.ascontiguousarray(steps).view(np.uint8).reshape(-1)
    return data


def rows_of(block: npt.NDArray[np.uint8]) -> Floats:
    """The opposite."""
    steps = block.view(np.uint16).reshape(-1, BLOCK_ROWS, STEP_K).swapaxes(0, 1)
    return (steps.reshape(BLOCK_ROWS, -1).astype(np.uint32) << 16).view(np.float32)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("adds", [False, True])
def test_product(name: str, adds: bool) -> None:
    num_k, start = 768, 256
    case = CASES[name](64, num_k)
    x = np.random.default_rng(3).normal(size=(BLOCK_ROWS, num_k - start)).astype(np.float32)
    steps = (num_k - start) // STEP_K
    panel = allocate(steps * STEP_BYTES)
    _panel(case.matrix.tiles.ctypes.data, 1, start // STEP_K, steps, panel.ctypes.data, 0)
    out = np.full((BLOCK_ROWS, 40), 2.0, np.float32)
    block = block_of(x)
    scratch = allocate(128)
    _product(block.ctypes.data, panel.ctypes.data, steps, out.ctypes.data, out.strides[0],
             int(adds), scratch.ctypes.data)  # fmt: skip
    weights = np.ascontiguousarray(case.weights[32:64, start:])
    wanted = rounded(x) @ rounded(weights).T + (2.0 if adds else 0.0)
    found = out[:, :32]
    limit = 1e-3 if name == "Q4_K" else 1e-5
    # Q4_K's scales are rounded once more when packed; what is left is the order of sums.
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < limit + (name == "Q4_K") * BF16_EPS
    assert (out[:, 32:] == 2.0).all()


def test_values_past_the_context_count_as_zero() -> None:
    values = np.random.default_rng(4).normal(size=(STEP_K, 64)).astype(np.float16)
    values[19:] = np.nan  # old memory may hold anything
    panel = allocate(STEP_BYTES)
    _values_panel(values.ctypes.data, 128, 1, 19, panel.ctypes.data)
    found = panel.view(np.uint16).reshape(2, 16, 16, 2).transpose(1, 3, 0, 2).reshape(32, 32)
    floats = (found.astype(np.uint32) << 16).view(np.float32)
    wanted = rounded(values[:, :32].astype(np.float32))
    wanted[19:] = 0
    assert np.array_equal(floats, wanted)


def test_row_kernels() -> None:
    rng = np.random.default_rng(5)
    x = (rng.normal(size=(1, 64)) * 3).astype(np.float32)
    weight = rng.normal(size=64).astype(np.float32)
    block = allocate(2 * STEP_BYTES)
    block[:] = 0

    def run(kind: int, number: int) -> Floats:
        _row(kind, x.ctypes.data, weight.ctypes.data, block.ctypes.data, 64, number)
        found: Floats = rows_of(block)[0]
        return found

    norm = x[0] / np.sqrt((x[0] ** 2).mean() + 1e-5) * weight
    np.testing.assert_allclose(run(0, _bits(1e-5)), norm, rtol=BF16_EPS)
    np.testing.assert_allclose(run(1, _bits(0.125)), rounded(x * np.float32(0.125))[0])
    divisor = np.array([3.0], np.float32)
    np.testing.assert_allclose(run(2, divisor.ctypes.data), x[0] / 3, rtol=BF16_EPS)


def test_silu_over_the_whole_range() -> None:
    gate = np.linspace(-120, 80, BLOCK_ROWS * 16, dtype=np.float32).reshape(BLOCK_ROWS, 16)
    source = np.ascontiguousarray(np.concatenate((gate, np.full_like(gate, 3.0)), axis=1))
    block = allocate(STEP_BYTES)
    block[:] = 0
    _row(3, source.ctypes.data, 0, block.ctypes.data, BLOCK_ROWS, 0)
    with np.errstate(over="ignore"):
        wanted = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * 3
    np.testing.assert_allclose(rows_of(block)[:, :16], wanted, rtol=BF16_EPS, atol=1e-30)


@pytest.mark.parametrize("seen", [1, 5, 40, 64, 90])
def test_online_softmax(seen: int) -> None:
    """Two steps of 64 columns: row r sees seen + r of them; what is hidden may be anything."""
    rng = np.random.default_rng(seen)
    scores = (rng.normal(size=(BLOCK_ROWS, 128)) * 8).astype(np.float32)
    values = rng.normal(size=(128, 32)).astype(np.float32)
    state = np.tile(np.array([-np.inf, 0.0], np.float32), (BLOCK_ROWS, 1))
    mix = np.zeros((BLOCK_ROWS, 32), np.float32)
    hidden = np.arange(128)[None] >= seen + np.arange(BLOCK_ROWS)[:, None]
    given = np.where(hidden, np.float32(np.nan), scores)
    for start in (0, 64):
        part = np.ascontiguousarray(given[:, start : start + 64])
        block = allocate(2 * STEP_BYTES)
        _softmax(part.ctypes.data, part.strides[0], block.ctypes.data, BLOCK_ROWS, seen - start, 64,
                 state.ctypes.data, mix.ctypes.data, 32)  # fmt: skip
        mix += rows_of(block) @ values[start : start + 64]
    wanted = torch.from_numpy(np.where(hidden, -np.inf, scores) * np.log(2)).softmax(-1).numpy()
    np.testing.assert_allclose(mix / state[:, 1:], wanted @ values, atol=0.02)
