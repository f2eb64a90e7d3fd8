"""Every hit, miss and transfer of a traced request is in its trace, with cause and bytes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.inline import InlineLane
from finback.shared.lanes.select import LaneSet
from finback.shared.telemetry import tracing
from finback.shared.telemetry.metrics import Metrics
from support.cache_asker import open_asker
from support.cache_files import NAMES, files, keep_in_files
from support.kv_store import BLOCK, SLOT


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    tracing.setup("cache", "cache-1", trace_dir=str(tmp_path / "traces"))
    yield tmp_path / "traces"
    tracing.shutdown()


def spans(folder: Path) -> list[dict[str, Any]]:
    tracing.flush()
    return [json.loads(line) for p in folder.glob("*.jsonl") for line in p.read_text().splitlines()]


def one(found: list[dict[str, Any]], name: str, trace_id: str) -> dict[str, Any]:
    (span,) = [s for s in found if s["name"] == name and s["trace_id"] == trace_id]
    return span


async def test_a_request_s_trace_tells_where_its_blocks_went_and_came_from(
    tmp_path: Path, folder: Path
) -> None:
    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        with tracing.span("first request"):
            first = tracing.trace_id()
            await keep_in_files(asker, NAMES[:4])
        with tracing.span("second request"):
            second = tracing.trace_id()
            await asker.lookup([*NAMES[:4], "x"])
            await asker.bytes_of([*NAMES[:4], "x"])
        found = spans(folder)
    stored = one(found, "cache store", first)["attributes"]
    assert (stored["finback.cache.num_slots"], stored["finback.cache.num_given_up"]) == (4, 0)
    assert one(found, "cache grow arena", first)["attributes"]["finback.bytes"] > 4 * SLOT
    writes = [s for s in found if s["name"] == "cache file write" and s["trace_id"] == first]
    assert sum(span["attributes"]["finback.bytes"] for span in writes) == 4 * BLOCK
    looked = one(found, "cache lookup", second)["attributes"]
    assert looked["finback.cache.hits_file"] == 4
    assert looked["finback.cache.miss"] == "absent"
    read = one(found, "cache read", second)
    assert read["attributes"]["finback.cache.hits_file"] == 4
    promoted = one(found, "cache promote", second)
    assert promoted["parent_id"] == read["span_id"]
    assert promoted["attributes"]["finback.num_promoted"] == 4
    from_disk = one(found, "cache file read", second)
    assert from_disk["parent_id"] == promoted["span_id"]
    assert from_disk["attributes"]["finback.bytes"] == 4 * BLOCK
    metrics = asker.service.metrics
    for direction in ("file_to_host", "host_to_file"):
        name = "finback.cache.transferred_bytes"
        assert metrics.value(name, direction=direction) == 4 * BLOCK


async def test_what_is_given_up_for_room_is_told(tmp_path: Path, folder: Path) -> None:
    async with open_asker(tmp_path, cache_tenant_bytes=2 * SLOT) as asker:
        await asker.keep(["a", "b"])
        with tracing.span("request"):
            trace_id = tracing.trace_id()
            await asker.keep(["c"])
        stored = one(spans(folder), "cache store", trace_id)["attributes"]
        assert stored["finback.cache.num_given_up"] == 1


async def test_a_lane_s_reads_are_summed_up_and_its_failures_told(folder: Path) -> None:
    metrics = Metrics()
    lanes = LaneSet([InlineLane()], metrics)
    good = await InlineLane().put(b"x" * 1000)
    bad = replace(good, checksum=bytes(16))
    with tracing.span("request"):
        await lanes.get(good)
        await lanes.get(good)
        with pytest.raises(CorruptData):
            await lanes.get(bad)
    (span,) = spans(folder)
    assert span["attributes"]["finback.lane.inline.bytes"] == 2000
    assert span["attributes"]["finback.lane.inline.ms"] > 0
    (event,) = span["events"]
    assert event["name"] == "lane read failed"
    assert event["attributes"]["finback.reason"] == "checksum"
    assert metrics.value("finback.lanes.read_bytes", lane="inline") == 2000
    assert metrics.value("finback.lanes.read_failures", lane="inline", reason="checksum") == 1
