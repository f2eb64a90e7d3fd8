"""docs/cache.md tells each metric of the cache, of lanes and of workers' use of it, as it really is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prometheus_client import Metric

from finback.services.cache.tallies import _METRICS
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.messages.cache_admin import (
    EvictReply,
    EvictRequest,
    ForgetReply,
    ForgetRequest,
)
from support.cache_asker import open_asker
from support.cache_files import files, keep_in_files

ROOT: Final = Path(__file__).parents[3]
ROW: Final = re.compile(r"^\| `(finback\.[a-z_.]+)` \| (\w+) \|([^|]*)\|([^|]*)\|[^|]+\|$")
NAME: Final = re.compile(r"^finback\.(cache|lanes|worker|kv|gateway|prefill)\.[a-z_]+$")
# Others of these families are told elsewhere.
OURS: Final = {"finback.gateway.prompts_forgotten"} | {
    f"finback.prefill.arena_{what}" for what in ("full", "failures")
}
FOLDERS: Final = ("services/cache", "services/prefill", "services/gateway", "shared")


def documented() -> dict[str, tuple[str, set[str]]]:
    """Name -> (kind, labels)."""
    text = (ROOT / "docs/cache.md").read_text()
    rows = [match for line in text.splitlines() if (match := ROW.match(line))]
    found = {row[1]: (row[2], set(re.findall(r"`(\w+)`", row[4]))) for row in rows}
    assert len(found) == len(rows), "each once"
    return found


def used(tree: ast.AST, *, is_segments: bool) -> Iterator[tuple[str, str]]:
    """(name, how it is used) of every metric whose name stands in a call."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        how = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        first = node.args[0]
        if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
            continue
        if how in ("count", "gauge", "observe") and NAME.match(first.value):
            yield first.value, how
        elif how == "count" and is_segments and first.value.isidentifier():
            yield f"finback.cache.files_{first.value}", how


def in_source() -> dict[str, str]:
    """Name -> kind, of all that the source counts."""
    kinds = {"count": "counter", "gauge": "gauge", "observe": "histogram"}
    found = {name: "counter" for name, _ in _METRICS.values()}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            for name, how in used(tree, is_segments=path.parent.name == "segments"):
                is_ours = name.split(".")[1] not in ("gateway", "prefill") or name in OURS
                if is_ours:
                    found[name] = kinds[how]
    # Assigned before it is used.
    found["finback.cache.transferred_bytes"] = "counter"
    return found


def test_every_metric_of_the_source_is_in_the_docs_and_none_else() -> None:
    told = {name: kind for name, (kind, _) in documented().items()}
    assert told == in_source()


async def test_what_a_cache_registers_is_what_the_docs_say(tmp_path: Path) -> None:
    """After a bit of everything: kind and labels of each."""
    async with open_asker(tmp_path, **files(tmp_path), cache_tenant_bytes=2**20) as asker:
        await keep_in_files(asker, ["a", "b"])
        await asker.lookup(["a", "x"])
        await asker.read(["a", "b", "x"])
        await asker.keep(["s"], kind="state")
        await asker.store(["z"], payload_bytes=2**22)
        await asker.ask("evict", EvictRequest(), EvictReply)
        await asker.ask("forget", ForgetRequest(is_all=True), ForgetReply)
        asker.service._measure()
        registered = dict(families(asker.service.metrics))
    told = documented()
    ours = {n: found for n, found in registered.items() if n.startswith("finback.cache.")}
    assert len(ours) > 14
    for name, (kind, labels) in ours.items():
        assert told[name] == (kind, labels), name


def families(metrics: Metrics) -> Iterator[tuple[str, tuple[str, set[str]]]]:
    """(name, (kind, labels)) of what is registered; its help text is its name."""
    for family in metrics.registry.collect():
        yield family.documentation, (family.type, labels_of(family))


def labels_of(family: Metric) -> set[str]:
    return {label for sample in family.samples for label in sample.labels} - {"le"}
