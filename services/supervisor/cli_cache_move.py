"""`finback cache verify`, `export` and `import`: what takes long, with a bar on a terminal."""

from pathlib import Path
from typing import Any, Final

import anyio

from finback.services.supervisor.cache_desk import LONG_S, CacheDesk
from finback.services.supervisor.cli_cache_told import Bar, Told
from finback.services.supervisor.cli_inspect import size
from finback.shared.errors import ConfigError
from finback.shared.kv.cache_salt import cache_salt_of
from finback.shared.wire.messages.cache_admin import (
    ExchangeReply,
    ExportRequest,
    ImportRequest,
    StatsReply,
    StatsRequest,
    VerifyReply,
    VerifyRequest,
)

TIERS: Final = ("host", "file")
_LOOK_S: Final = 0.2


async def verify(desk: CacheDesk, told: Told) -> None:
    """Check the checksums of every kept block; exit code 1 when one was bad."""
    answers = await desk.ask_caches("stats", StatsRequest(num_prefixes=0), StatsReply)
    told.failed(answers)
    for name, stats in answers.found.items():
        sums = {tier: await _verify_tier(desk, told, name, tier, stats) for tier in TIERS}
        told.put("caches", name, {tier: found for tier, found in sums.items() if found})
        for tier, found in sums.items():
            if found is None:
                continue
            text = f"{found['num_blocks']} blocks, {size(found['num_bytes'])}"
            told.line(f"{name}: {tier}: {text}, {found['num_bad']} bad")
            if found["num_bad"]:
                told.code = 1


async def _verify_tier(
    desk: CacheDesk, told: Told, name: str, tier: str, stats: StatsReply
) -> dict[str, int] | None:
    """None: it did not come to an end."""
    sums = {"num_blocks": 0, "num_bytes": 0, "num_bad": 0}
    total = sum(usage.num_bytes for usage in stats.usage if usage.tier == tier)
    cursor = ""
    with told.progress(f"{name} {tier}", total) as bar:
        while True:
            asked = VerifyRequest(tier=tier, cursor=cursor)
            answers = await desk.ask(
                [("cache", name)], "verify", asked, VerifyReply, timeout_s=LONG_S
            )
            told.failed(answers)
            if answers.failed:
                return None
            reply: VerifyReply = answers.found[name]
            sums["num_blocks"] += reply.num_checked
            sums["num_bytes"] += reply.num_bytes
            sums["num_bad"] += reply.num_bad
            bar.at(sums["num_bytes"])
            cursor = reply.next_cursor
            if not cursor:
                return sums


async def export(desk: CacheDesk, told: Told, path: str, chains: list[tuple[str, bytes]]) -> None:
    """Write a prefix to the exchange folder, from the first cache whose files have it."""
    if len(chains) != 1:
        raise ConfigError("workers of this stack fit different blocks; export from one of a kind")
    (spec,) = desk.specs()
    asked = ExportRequest(
        path=path, salt=spec.salt, hashes=chains[0][1], block_size=spec.block_size
    )
    await _move(desk, told, "export", asked, desk.exchange_folder / Path(path).name)


async def import_(desk: CacheDesk, told: Told, path: str, tenant: str, cache_salt: str) -> None:
    """Store an exported prefix of the exchange folder in the first cache that takes it."""
    salts = tuple(spec.salt for spec in desk.specs())
    salt = cache_salt_of(tenant, cache_salt)
    asked = ImportRequest(path=path, cache_salt=salt, tenant=tenant, salts=salts)
    await _move(desk, told, "import", asked, desk.exchange_folder / Path(path).name)


async def _move(desk: CacheDesk, told: Told, verb: str, asked: Any, file: Path) -> None:
    names = desk.caches()
    if not names:
        told.failed(await desk.ask_caches(verb, asked, ExchangeReply))
    for name in names:
        with told.progress(f"{name} {verb}", 0) as bar:
            async with anyio.create_task_group() as group:
                group.start_soon(_watch, file, bar)
                answers = await desk.ask(
                    [("cache", name)], verb, asked, ExchangeReply, timeout_s=LONG_S
                )
                group.cancel_scope.cancel()
        for reply in answers.found.values():
            told.put("caches", name, reply)
            told.line(f"{name}: {reply.num_blocks} blocks, {file}")
            return
        told.failed(answers)


async def _watch(file: Path, bar: Bar) -> None:
    """The size of a file that is written, if it can be seen from here."""
    while True:
        bar.at(_size_of(file))
        await anyio.sleep(_LOOK_S)


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
