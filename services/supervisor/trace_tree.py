"""Spans from the local files, and one trace of them as an ordered tree. No drawing here."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

REQUEST_ID: Final = "finback.request_id"
# More equal siblings than this become one row.
MAX_EQUAL_SIBLINGS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span as the exporter wrote it; times in Unix nanoseconds."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    status: str = "unset"
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the waterfall: a span, or `count` equal siblings from first start to last end.

    `busy_ns` is the sum of their durations.
    """

    name: str
    service: str
    depth: int
    start_ns: int
    end_ns: int
    busy_ns: int
    count: int = 1
    status: str = "unset"
    attributes: Mapping[str, Any] = field(default_factory=dict)


def read(folder: Path) -> Iterator[Span]:
    """All spans of a trace folder, in no order; a line that is half written is skipped."""
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            for line in file:
                span = _parse(line)
                if span is not None:
                    yield span


def _parse(line: str) -> Span | None:
    try:
        raw = json.loads(line)
        return Span(**{name: raw[name] for name in Span.__slots__ if name in raw})
    except (ValueError, KeyError, TypeError):
        return None


def request_of(span: Span) -> str:
    """The request's id as its caller knows it: engines' ids have a mark of the gateway's behind it."""
    return str(span.attributes.get(REQUEST_ID) or "").partition("~")[0]


def find(spans: Iterable[Span], wanted: str) -> list[Span]:
    """The spans of the trace that `wanted` names: a request id, a trace id, or `last`.

    `last` is the trace of the request that ended last. Empty if there is none.
    """
    by_trace: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_trace[span.trace_id].append(span)
    if wanted != "last":
        for trace_id, members in by_trace.items():
            ids = {request_of(span) for span in members}
            # The API's ids are the request's own with a prefix: chatcmpl-req-...
            if wanted == trace_id or any(wanted in (i, f"chatcmpl-{i}", f"cmpl-{i}") for i in ids):
                return members
        return []
    generations = [members for members in by_trace.values() if _is_generation(members)]
    return max(generations, key=lambda members: max(s.end_ns for s in members), default=[])


def _is_generation(spans: list[Span]) -> bool:
    return any(span.service == "gateway" and span.attributes.get(REQUEST_ID) for span in spans)


def rows(spans: list[Span]) -> list[Row]:
    """Depth-first by start time; a span whose parent was not recorded here counts as a root."""
    known = {span.span_id for span in spans}
    children: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        children[span.parent_id if span.parent_id in known else ""].append(span)
    found: list[Row] = []
    _descend(children, "", 0, found)
    return found


def _descend(children: Mapping[str, list[Span]], parent: str, depth: int, found: list[Row]) -> None:
    groups: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in children.get(parent, ()):
        groups[span.service, span.name].append(span)
    merged = [g for g in groups.values() if len(g) > MAX_EQUAL_SIBLINGS]
    single = [[s] for g in groups.values() if len(g) <= MAX_EQUAL_SIBLINGS for s in g]
    for group in sorted([*merged, *single], key=lambda g: g[0].start_ns):
        found.append(_row(group, depth))
        if len(group) == 1:
            _descend(children, group[0].span_id, depth + 1, found)
        else:
            _descend_merged(children, group, depth + 1, found)


def _descend_merged(
    children: Mapping[str, list[Span]], group: list[Span], depth: int, found: list[Row]
) -> None:
    """The children of merged spans are merged as well."""
    below = [child for span in group for child in children.get(span.span_id, ())]
    by_kind: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in sorted(below, key=lambda s: s.start_ns):
        by_kind[span.service, span.name].append(span)
    for members in by_kind.values():
        found.append(_row(members, depth))
        _descend_merged(children, members, depth + 1, found)


def _row(group: list[Span], depth: int) -> Row:
    failed = next((s.status for s in group if s.status == "error"), group[0].status)
    return Row(
        name=group[0].name,
        service=group[0].service,
        depth=depth,
        start_ns=min(s.start_ns for s in group),
        end_ns=max(s.end_ns for s in group),
        busy_ns=sum(s.end_ns - s.start_ns for s in group),
        count=len(group),
        status=failed,
        attributes=group[0].attributes if len(group) == 1 else {},
    )
