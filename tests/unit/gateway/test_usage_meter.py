"""Sums on their way to the store: nothing is lost while it cannot be written, nothing comes twice."""

import asyncio
from pathlib import Path
from unittest.mock import Mock

import pytest

from finback.services.gateway import usage_meter
from finback.services.gateway.usage_meter import UsageMeter
from finback.shared.errors import Unavailable
from finback.shared.telemetry.metrics import Metrics
from finback.shared.usage_store import UsageCounts, UsageKey, UsageStore

ONE = UsageCounts(num_requests=1, num_prompt_tokens=3, num_completion_tokens=2)


def meter_of(path: Path) -> UsageMeter:
    return UsageMeter(UsageStore(path), retention_days=1, metrics=Metrics(), log=Mock())


async def test_counts_arrive_once(tmp_path: Path) -> None:
    meter = meter_of(tmp_path / "usage.sqlite")
    for _ in range(3):
        meter.count("t", "m", "completed", ONE)
    await asyncio.gather(meter.flush(), meter.flush())
    await meter.flush()
    ((key, counts),) = meter.store.read()
    assert (key.tenant, key.outcome) == ("t", "completed")
    assert (counts.num_requests, counts.num_prompt_tokens) == (3, 9)


async def test_a_store_that_cannot_be_written_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    path.mkdir()
    meter = meter_of(path)
    meter.count("t", "m", "completed", ONE)
    with pytest.raises(Unavailable, match="usage cannot be written"):
        await meter.flush()
    meter.count("t", "m", "completed", ONE)
    assert not await meter.try_flush()
    path.rmdir()
    assert await meter.try_flush()
    ((_, counts),) = meter.store.read()
    assert counts == ONE + ONE


async def test_kinds_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_meter, "MAX_KINDS", 2)
    meter = meter_of(tmp_path / "usage.sqlite")
    for tenant in ("a", "b", "c", "a"):
        meter.count(tenant, "m", "completed", ONE)
    await meter.flush()
    assert {key.tenant: counts.num_requests for key, counts in meter.store.read()} == {
        "a": 2,
        "b": 1,
    }


async def test_old_hours_are_forgotten(tmp_path: Path) -> None:
    meter = meter_of(tmp_path / "usage.sqlite")
    meter.count("t", "m", "completed", ONE)
    old = UsageKey(hour_s=3600, tenant="t", model="m", outcome="completed")
    meter.store.add({old: ONE})
    await meter.flush()
    ((kept, _),) = meter.store.read()
    assert kept.hour_s > old.hour_s
