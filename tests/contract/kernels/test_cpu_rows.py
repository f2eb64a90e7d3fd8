"""The compiled row kernels against their references."""

import numpy as np
import pytest
import torch

from finback.kernels.compiled import compiled
from finback.kernels.host import cpu_reason

if cpu_reason() is not None:
    pytest.skip(f"CPU kernels: {cpu_reason()}", allow_module_level=True)

from finback.kernels.paged_attention.cpu_rows import softmax_row
from finback.kernels.rms_norm import cpu_rows as norm_rows
from finback.kernels.rms_norm.reference import rms_norm
from finback.kernels.rotary import cpu_rows as rotary_rows
from finback.kernels.rotary.reference import rotary
from finback.kernels.silu_mul import cpu_rows as silu_rows
from finback.kernels.silu_mul.reference import silu_mul
from finback.kernels.store_kv.cpu_rows import (
    store_key_bf16,
    store_key_f16,
    store_value_bf16,
    store_value_f16,
)


@compiled("void(int64, int64, int64, int64, int64, int64)")
def _norm(x, delta, weight, out, count, eps):  # type: ignore[no-untyped-def]  # compiled by numba
    norm_rows.add_norm((x, delta, weight, out, count, eps))


@compiled("void(int64, int64, int64, int64)")
def _silu(gate, up, out, count):  # type: ignore[no-untyped-def]  # compiled by numba
    silu_rows.silu_mul((gate, up, out, count))


@compiled("void(int64, int64, int64, int64)")
def _rotary(x, cos, sin, half):  # type: ignore[no-untyped-def]  # compiled by numba
    rotary_rows.rotary((x, cos, sin, half))


@compiled("void(int64, int64, int64, int64)")
def _softmax(scores, length, padded, sum_at):  # type: ignore[no-untyped-def]  # compiled by numba
    softmax_row((scores, length, padded, sum_at))


@compiled("void(int64, int64, int64, int64)")
def _store(source, target, count, kind):  # type: ignore[no-untyped-def]  # compiled by numba
    if kind == 0:
        store_value_f16((source, target, count))
    elif kind == 1:
        store_value_bf16((source, target, count))
    elif kind == 2:
        store_key_f16((source, target, count, 6))
    else:
        store_key_bf16((source, target, count, 6))


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


@pytest.mark.parametrize("count", [32, 64, 576])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_norm(count: int, scale: float) -> None:
    x, delta, weight = (torch.randn(count) * scale for _ in range(3))
    out, residual = torch.empty(count), x.clone()
    _norm(
        residual.data_ptr(), delta.data_ptr(), weight.data_ptr(), out.data_ptr(), count, _bits(1e-5)
    )
    assert torch.equal(residual, x + delta)
    torch.testing.assert_close(out, rms_norm(x + delta, weight, 1e-5), rtol=2e-6, atol=1e-6 * scale)


def test_silu_over_the_whole_range() -> None:
    gate = torch.cat((torch.linspace(-120, 120, 4000), torch.tensor([0.0, -0.0, 1e30, -1e30] * 8)))
    up = torch.full_like(gate, 3.0)
    out = torch.empty_like(gate)
    _silu(gate.data_ptr(), up.data_ptr(), out.data_ptr(), len(gate))
    torch.testing.assert_close(out, silu_mul(torch.cat((gate, up))), rtol=1e-6, atol=1e-30)


def test_silu_keeps_nan() -> None:
    gate = torch.full((16,), float("nan"))
    out = torch.zeros(16)
    _silu(gate.data_ptr(), gate.data_ptr(), out.data_ptr(), 16)
    assert out.isnan().all()


def test_rotary() -> None:
    x = torch.randn(1, 1, 64)
    angles = torch.rand(1, 32) * 6
    wanted = rotary(x, angles.cos(), angles.sin())
    cos, sin = angles.cos(), angles.sin()
    _rotary(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), 32)
    torch.testing.assert_close(x, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [1, 7, 16, 31, 32])
def test_softmax_hides_what_lies_behind_the_length(length: int) -> None:
    scores = torch.randn(32) * 20
    scores[length:] = float("nan")  # old memory may hold anything
    wanted = scores[:length].softmax(0)
    total = torch.zeros(1)
    _softmax(scores.data_ptr(), length, 32, total.data_ptr())
    torch.testing.assert_close(scores[:length] / total, wanted, rtol=1e-5, atol=1e-12)
    assert not scores[length:].any()


@pytest.mark.parametrize(("kind", "dtype"), [(0, torch.float16), (1, torch.bfloat16)])
def test_stored_values_round_to_nearest_even(kind: int, dtype: torch.dtype) -> None:
    source = torch.cat((torch.randn(4096) * 100, torch.tensor([0.0, -0.0, float("nan"), 1.0] * 8)))
    target = torch.empty(len(source), dtype=dtype)
    _store(source.data_ptr(), target.data_ptr(), len(source), kind)
    wanted = source.to(dtype)
    assert torch.equal(target.isnan(), wanted.isnan())
    assert torch.equal(target.nan_to_num(), wanted.nan_to_num())
    strided = torch.zeros(len(source), 3, dtype=dtype)
    _store(source.data_ptr(), strided.data_ptr(), len(source), kind + 2)
    assert torch.equal(strided[:, 0].nan_to_num(), wanted.nan_to_num())
    assert not strided[:, 1:].any()


def test_float16_stays_finite() -> None:
    source = torch.tensor([1e9, -1e9, 65504.0, 7e4] * 4)
    target = torch.empty(16, dtype=torch.float16)
    _store(source.data_ptr(), target.data_ptr(), 16, 0)
    assert target.tolist() == [65504.0, -65504.0, 65504.0, 65504.0] * 4
