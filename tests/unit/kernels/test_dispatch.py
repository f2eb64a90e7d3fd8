"""Selection of kernels: what is asked for, what is passed over, and why."""

import pytest

from finback.kernels import dispatch
from finback.kernels.dispatch import Implementation
from finback.kernels.unavailable import KernelUnavailable


def test_table_names_every_op_with_reasons() -> None:
    rows = dispatch.table("cpu", "fast")
    assert [row["op"] for row in rows] == dispatch.ops()
    assert all(row["backend"] and row["why"] for row in rows)
    by_op = {row["op"]: row for row in rows}
    assert by_op["decoder_stack"]["backend"] == "cpu"
    assert "less preferred" in by_op["decoder_stack"]["skipped"]
    assert "runs on cuda only" in by_op["silu_mul"]["skipped"]


def test_reference_mode_uses_reference_kernels_only() -> None:
    assert {row["backend"] for row in dispatch.table("cpu", "reference")} == {"reference"}


def test_every_implementation_loads_here_or_says_why() -> None:
    for op in dispatch.ops():
        for item in dispatch.implementations(op):
            if item.obstacle("cpu", item.modes[0]) is None:
                assert callable(item.load())


def test_backend_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT, "reference,sample_tokens=cpu")
    assert dispatch.select("decoder_stack", "cpu", "fast").chosen.backend == "reference"
    assert dispatch.select("sample_tokens", "cpu", "fast").chosen.backend == "cpu"
    monkeypatch.setenv(dispatch.ENVIRONMENT, "fast")
    with pytest.raises(KernelUnavailable, match="'fast' is not known; use auto, reference"):
        dispatch.select("linear", "cpu", "fast")
    monkeypatch.setenv(dispatch.ENVIRONMENT, "nothing=cpu")
    with pytest.raises(KernelUnavailable, match="'nothing=cpu' is not known"):
        dispatch.select("linear", "cpu", "fast")


def test_what_is_asked_for_and_cannot_run_stops() -> None:
    with pytest.raises(KernelUnavailable, match="no cuda kernel for silu_mul on cpu"):
        dispatch.select("silu_mul", "cpu", "fast", "silu_mul=cuda")
    with pytest.raises(KernelUnavailable, match="mode deterministic"):
        dispatch.select("decoder_stack", "cpu", "deterministic", "reference")
    with pytest.raises(KernelUnavailable, match="'quick' is not known"):
        dispatch.select("linear", "cpu", "quick")


def test_second_registration_is_an_error() -> None:
    item = Implementation(
        op="linear", backend="reference", module="x", devices=("*",), modes=("fast",), why=""
    )
    with pytest.raises(ValueError, match="linear has a reference kernel already"):
        dispatch.register(item)
