"""`finback cache`: what the caches hold, and what to keep, drop or check."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import anyio
import httpx

from finback.services.supervisor import locate
from finback.services.supervisor.ask import message_of
from finback.services.supervisor.cache_desk import LONG_S, Answers, CacheDesk, open_desk
from finback.services.supervisor.cli_inspect import size
from finback.shared.errors import ConfigError, Unavailable
from finback.shared.kv.cache_salt import cache_salt_of
from finback.shared.wire.messages.cache_admin import (
    EvictReply,
    EvictRequest,
    ExchangeReply,
    ExportRequest,
    ForgetPoolRequest,
    ForgetReply,
    ForgetRequest,
    ImportRequest,
    PinReply,
    PinRequest,
    StatsReply,
    StatsRequest,
    UnpinRequest,
    VerifyReply,
    VerifyRequest,
)
from finback.shared.wire.messages.prefill import Ack

TIERS: Final = ("host", "file")
Act = Callable[[CacheDesk, locate.Running], Coroutine[Any, Any, int]]


def run(given: Path | None, act: Act) -> int:
    """Do something with the caches of the stack in that folder."""
    found = locate.running(given)

    async def main() -> int:
        async with open_desk(found) as desk:
            return await act(desk, found)

    return anyio.run(main)


async def stats(desk: CacheDesk, *, num_prefixes: int, as_json: bool) -> int:
    """Tiers, classes, hits and misses by cause, the most read prefixes, pins."""
    answers = await desk.ask_caches("stats", StatsRequest(num_prefixes=num_prefixes), StatsReply)
    if as_json:
        told = {name: _plain(reply) for name, reply in answers.found.items()}
        _write({"caches": told, "failed": answers.failed})
    else:
        for name, reply in answers.found.items():
            _show_stats(name, reply)
        _show_failed(answers)
    return 1 if answers.failed else 0


async def evict(desk: CacheDesk, *, traffic_class: str, num_bytes: int) -> int:
    """Give blocks in memory up, in the order in which they would go."""
    asked = EvictRequest(num_bytes=num_bytes, traffic_class=traffic_class)
    answers = await desk.ask_caches("evict", asked, EvictReply)
    for name, reply in answers.found.items():
        sys.stdout.write(f"{name}: {reply.num_blocks} blocks, {size(reply.num_bytes)}\n")
    return _code(answers)


async def forget(
    desk: CacheDesk, *, tenant: str | None, is_all: bool, hashes: bytes = b"", salt: str = ""
) -> int:
    """Drop blocks in all tiers; the pools of all workers forget their prefixes altogether."""
    asked = ForgetRequest(tenant=tenant, is_all=is_all, hashes=hashes, salt=salt)
    workers = desk.workers()
    # Pools first, or they write anew what a cache has dropped; and again, for what was just fetched.
    pools = await desk.ask(workers, "forget-pool", ForgetPoolRequest(), Ack)
    answers = await desk.ask_caches("forget", asked, ForgetReply, timeout_s=LONG_S)
    again = await desk.ask(workers, "forget-pool", ForgetPoolRequest(), Ack)
    for name, reply in answers.found.items():
        sys.stdout.write(f"{name}: {reply.num_host} blocks in memory, {reply.num_files} in files\n")
    for name in pools.found:
        sys.stdout.write(f"{name}: all prefixes of its pool\n")
    code = max(_code(answers), _code(pools), _code(again))
    if hashes and not any(r.num_host + r.num_files for r in answers.found.values()):
        sys.stderr.write("no cache held a block of it; are --tenant and --cache-salt right?\n")
        return 1
    return code


async def verify(desk: CacheDesk) -> int:
    """Check the checksums of every kept block; code 1 when one was bad."""
    code = 0
    for name in desk.caches():
        for tier in TIERS:
            checked = await _verify_tier(desk, name, tier)
            if checked is None:
                code = 1
                continue
            num_blocks, num_bytes, num_bad = checked
            sys.stdout.write(
                f"{name}: {tier}: {num_blocks} blocks, {size(num_bytes)}, {num_bad} bad\n"
            )
            code = max(code, int(num_bad > 0))
    return code


async def _verify_tier(desk: CacheDesk, name: str, tier: str) -> tuple[int, int, int] | None:
    cursor, sums = "", [0, 0, 0]
    while True:
        asked = VerifyRequest(tier=tier, cursor=cursor)
        answers = await desk.ask([("cache", name)], "verify", asked, VerifyReply, timeout_s=LONG_S)
        if answers.failed:
            _show_failed(answers)
            return None
        reply: VerifyReply = answers.found[name]
        sums = [
            sums[0] + reply.num_checked,
            sums[1] + reply.num_bytes,
            sums[2] + reply.num_bad,
        ]
        cursor = reply.next_cursor
        if not cursor:
            return sums[0], sums[1], sums[2]


async def pin(desk: CacheDesk, name: str, chains: list[tuple[str, bytes]]) -> int:
    """Keep a prefix for ever, under a name."""
    code = 0
    for number, (salt, hashes) in enumerate(chains):
        # One name, one chain: where pools are of several kinds, the others get a name beside it.
        own = name if number == 0 else f"{name} ({number + 1})"
        asked = PinRequest(name=own, salt=salt, hashes=hashes)
        answers = await desk.ask_caches("pin", asked, PinReply)
        for cache, reply in answers.found.items():
            sys.stdout.write(
                f"{cache}: {reply.num_blocks} blocks, {reply.num_held} in memory, "
                f"{reply.num_files} in files\n"
            )
        code = max(code, _code(answers))
    return code


async def unpin(desk: CacheDesk, name: str) -> int:
    """Let a pinned prefix go the way of others."""
    return _code(await desk.ask_caches("unpin", UnpinRequest(name=name), PinReply))


async def export(desk: CacheDesk, path: Path, chains: list[tuple[str, bytes]]) -> int:
    """Write a prefix to a file (an absolute path), from the first cache whose files have it."""
    if len(chains) != 1:
        raise ConfigError("workers of this stack fit different blocks; export from one of a kind")
    (spec,) = desk.specs()
    asked = ExportRequest(
        path=str(path),
        salt=spec.salt,
        hashes=chains[0][1],
        block_size=spec.block_size,
    )
    failed = Answers(found={}, failed={})
    for name in desk.caches():
        answers = await desk.ask(
            [("cache", name)], "export", asked, ExchangeReply, timeout_s=LONG_S
        )
        for reply in answers.found.values():
            sys.stdout.write(f"{name}: {reply.num_blocks} blocks\n")
            return 0
        failed.failed.update(answers.failed)
    return _code(failed)


async def import_(desk: CacheDesk, path: Path, tenant: str, cache_salt: str) -> int:
    """Store an exported prefix in the first cache that takes it."""
    salt = cache_salt_of(tenant, cache_salt)
    asked = ImportRequest(path=str(path), cache_salt=salt, tenant=tenant)
    failed = Answers(found={}, failed={})
    for name in desk.caches():
        answers = await desk.ask(
            [("cache", name)], "import", asked, ExchangeReply, timeout_s=LONG_S
        )
        for reply in answers.found.values():
            sys.stdout.write(f"{name}: {reply.num_blocks} blocks\n")
            return 0
        failed.failed.update(answers.failed)
    return _code(failed)


def token_ids(found: locate.Running, path: Path, key: str | None) -> list[int]:
    """The ids of a prompt (text), or of chat messages (a JSON list), as the gateway makes them."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    body: dict[str, Any] = {"prompt": text}
    if text.lstrip().startswith("["):
        try:
            body = {"messages": json.loads(text)}
        except ValueError as error:
            raise ConfigError(f"{path} is neither a text nor a JSON list: {error}") from None
    sent = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx.post(f"{found.state.http}/tokenize", json=body, headers=sent, timeout=60.0)
    except httpx.HTTPError as error:
        raise Unavailable(f"{found.state.http}: {error or type(error).__name__}") from error
    if reply.status_code != 200:
        raise Unavailable(message_of(reply.content, f"HTTP {reply.status_code}"))
    ids: list[int] = reply.json()["tokens"]
    return ids


def chains_of(
    desk: CacheDesk, ids: list[int], tenant: str, cache_salt: str
) -> list[tuple[str, bytes]]:
    """(salt, hashes) of a tenant's prompt for every kind of pool in the stack."""
    cache_salt = cache_salt_of(tenant, cache_salt)
    found = [(spec.salt, desk.chain(ids, spec, cache_salt)) for spec in desk.specs()]
    if not found:
        raise ConfigError("no worker of this stack tells what its blocks fit")
    if not any(hashes for _, hashes in found):
        raise ConfigError(f"{len(ids)} tokens are less than a block; there is nothing to name")
    return found


def _code(answers: Answers) -> int:
    _show_failed(answers)
    return 1 if answers.failed else 0


def _show_failed(answers: Answers) -> None:
    for name, why in answers.failed.items():
        sys.stderr.write(f"{name}: {why}\n")


def _plain(reply: StatsReply) -> dict[str, Any]:
    from dataclasses import asdict

    told = asdict(reply)
    for prefix in told["prefixes"]:
        prefix["hash"] = prefix["hash"].hex()
    return told


def _show_stats(name: str, reply: StatsReply) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    arena = f"{size(reply.arena_bytes)} of {size(reply.max_bytes)}"
    files = reply.file_state
    if reply.file_state != "off":
        files += f", {size(reply.file_bytes)} of {size(reply.file_max_bytes)}"
    slots = ", ".join(f"{count} {state}" for state, count in reply.slots.items() if count)
    console.print(
        f"{name}: arena {arena}; {slots or 'empty'}; {reply.num_leases} leases; files {files}"
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("tier", "kind", "class", "blocks", "bytes"):
        table.add_column(column)
    for usage in reply.usage:
        table.add_row(
            usage.tier,
            usage.kind,
            usage.traffic_class,
            str(usage.num_blocks),
            size(usage.num_bytes),
        )
    console.print(table)
    for what, tallies in _grouped(reply).items():
        console.print(f"{what}: " + ", ".join(f"{n} {label}" for label, n in tallies.items()))
    for prefix in reply.prefixes:
        console.print(
            f"prefix {prefix.hash.hex()[:16]}: read {prefix.num_reads} times, "
            f"{prefix.num_blocks} blocks"
        )
    for pinned in reply.pins:
        console.print(
            f"pin {pinned.name}: {pinned.num_held} of {pinned.num_blocks} blocks in memory"
        )


def _grouped(reply: StatsReply) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for tally in reply.tallies:
        found.setdefault(tally.what, Counter())[tally.label] += tally.count
    return found


def _write(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
