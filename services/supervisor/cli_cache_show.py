"""`finback cache stats`, `top` and `pins`: what the caches hold, as tables or JSON."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from finback.services.supervisor.cache_desk import CacheDesk
from finback.services.supervisor.cli_cache_told import Told, plain
from finback.services.supervisor.cli_inspect import size
from finback.shared.wire.messages.cache_admin import StatsReply, StatsRequest, UseTally

_TIERS = ("host", "file")


async def stats(desk: CacheDesk, told: Told, *, num_prefixes: int, as_json: bool) -> None:
    """Tiers and quotas, hit rates by class, tier and cause, the most read prefixes, pins."""
    asked = StatsRequest(num_prefixes=num_prefixes)
    answers = await desk.ask_caches("stats", asked, StatsReply)
    for name, reply in answers.found.items():
        told.put("caches", name, {**plain(reply), "hit_rates": list(rates(reply.uses))})
        if not as_json:
            _show(name, reply)
    told.failed(answers)


async def top(desk: CacheDesk, told: Told, *, num_prefixes: int) -> None:
    """The most read prefixes."""
    asked = StatsRequest(num_prefixes=num_prefixes)
    answers = await desk.ask_caches("stats", asked, StatsReply)
    for name, reply in answers.found.items():
        told.put("caches", name, {"prefixes": reply.prefixes})
        for prefix in reply.prefixes:
            text = f"read {prefix.num_reads} times, {prefix.num_blocks} blocks"
            told.line(f"{name}: {prefix.hash.hex()[:16]} of {prefix.salt[:16]}: {text}")
    told.failed(answers)


async def pins(desk: CacheDesk, told: Told) -> None:
    """The named prefixes that are kept for ever."""
    answers = await desk.ask_caches("stats", StatsRequest(num_prefixes=0), StatsReply)
    for name, reply in answers.found.items():
        told.put("caches", name, {"pins": reply.pins})
        for pin in reply.pins:
            text = f"{pin.num_held} of {pin.num_blocks} blocks in memory"
            told.line(f"{name}: {pin.name}: {text}")
    told.failed(answers)


def rates(uses: tuple[UseTally, ...]) -> Iterator[dict[str, Any]]:
    """By question and class: blocks asked for, and the shares of each tier and of each cause."""
    grouped: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for use in uses:
        grouped[use.what, use.traffic_class][use.outcome] += use.num_blocks
    for (what, class_), outcomes in sorted(grouped.items()):
        total = outcomes.total()
        shares = {outcome: number / total for outcome, number in sorted(outcomes.items())}
        hit_rate = sum(shares.get(tier, 0.0) for tier in _TIERS)
        yield {
            "what": what,
            "traffic_class": class_,
            "num_blocks": total,
            "hit_rate": hit_rate,
            "shares": shares,
        }


def _show(name: str, reply: StatsReply) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    slots = ", ".join(f"{count} {state}" for state, count in reply.slots.items() if count)
    console.print(
        f"{name}: arena {_part(reply.arena_bytes, reply.max_bytes)}; {slots or 'empty'}; "
        f"{reply.num_leases} leases; files {_files(reply)}"
    )
    console.print(_usage(reply))
    if reply.uses:
        console.print(_rates(reply))
    for what, tallies in _grouped(reply).items():
        console.print(f"{what}: " + ", ".join(f"{n} {label}" for label, n in tallies.items()))
    for tenant in reply.tenants if reply.tenant_max_bytes else ():
        part = _part(tenant.num_bytes, reply.tenant_max_bytes)
        console.print(f"tenant {tenant.tenant[:16]}: {part} in memory")
    for prefix in reply.prefixes:
        console.print(
            f"prefix {prefix.hash.hex()[:16]}: read {prefix.num_reads} times, "
            f"{prefix.num_blocks} blocks"
        )
    for pinned in reply.pins:
        console.print(
            f"pin {pinned.name}: {pinned.num_held} of {pinned.num_blocks} blocks in memory"
        )


def _usage(reply: StatsReply) -> Any:
    table = _table("tier", "kind", "class", "blocks", "bytes")
    for usage in reply.usage:
        table.add_row(
            usage.tier,
            usage.kind,
            usage.traffic_class,
            str(usage.num_blocks),
            size(usage.num_bytes),
        )
    states = sum(usage.num_bytes for usage in reply.usage if usage.kind == "state")
    if states:
        table.add_row("host", "state", "all", "", _part(states, reply.state_max_bytes))
    return table


def _rates(reply: StatsReply) -> Any:
    table = _table("asked", "class", "blocks", "hit", "of these")
    for rate in rates(reply.uses):
        shares = ", ".join(f"{share:.1%} {outcome}" for outcome, share in rate["shares"].items())
        table.add_row(
            rate["what"],
            rate["traffic_class"] or "-",
            str(rate["num_blocks"]),
            f"{rate['hit_rate']:.1%}",
            shares,
        )
    return table


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column)
    return table


def _files(reply: StatsReply) -> str:
    if reply.file_state == "off":
        return "off"
    waiting = f", {reply.num_waiting_writes} waiting" if reply.num_waiting_writes else ""
    return f"{reply.file_state}, {_part(reply.file_bytes, reply.file_max_bytes)}{waiting}"


def _part(num_bytes: int, max_bytes: int) -> str:
    if not max_bytes:
        return size(num_bytes)
    return f"{size(num_bytes)} of {size(max_bytes)} ({num_bytes / max_bytes:.0%})"


def _grouped(reply: StatsReply) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for tally in reply.tallies:
        found.setdefault(tally.what, Counter())[tally.label] += tally.count
    return found
