"""Cores that may be used: the affinity, cut by the quotas of control groups."""

import os
from pathlib import Path

import pytest

from finback.shared.cores import num_cores


@pytest.fixture(autouse=True)
def _eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("250000 100000", 3),
        ("10000 100000", 1),
        ("1600000 100000", 8),
        ("", 8),
        ("x y", 8),
        ("100000 0", 8),
    ],
)
def test_quota_of_a_container(tmp_path: Path, quota: str, cores: int) -> None:
    write(tmp_path / "cpu.max", quota + "\n")
    assert num_cores(tmp_path, tmp_path / "none") == cores


def test_the_least_quota_of_all_groups_counts(tmp_path: Path) -> None:
    write(tmp_path / "own", "0::/outer/inner\n")
    assert num_cores(tmp_path, tmp_path / "own") == 8
    write(tmp_path / "outer" / "cpu.max", "300000 100000")
    assert num_cores(tmp_path, tmp_path / "own") == 3
    write(tmp_path / "outer" / "inner" / "cpu.max", "500000 100000")
    assert num_cores(tmp_path, tmp_path / "own") == 3


def test_first_generation_of_control_groups(tmp_path: Path) -> None:
    write(tmp_path / "own", "3:cpu,cpuacct:/box\n2:memory:/box\n")
    write(tmp_path / "cpu" / "box" / "cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "cpu" / "box" / "cpu.cfs_period_us", "100000\n")
    assert num_cores(tmp_path, tmp_path / "own") == 8
    write(tmp_path / "cpu" / "box" / "cpu.cfs_quota_us", "400000\n")
    assert num_cores(tmp_path, tmp_path / "own") == 4
