"""`finback cache evict` and `forget`: the options of the commands that drop blocks."""

from pathlib import Path
from typing import Annotated

import typer

from finback.services.supervisor.cli_cache_options import (
    JsonOption,
    KeyOption,
    RunDirOption,
    SaltOption,
)


def evict(
    run_dir: RunDirOption = None,
    tenant: Annotated[
        str | None, typer.Option(help="Only of a tenant; '': of requests without a key.")
    ] = None,
    traffic_class: Annotated[
        str, typer.Option("--class", help="Only of this class and those below it.")
    ] = "",
    older_than: Annotated[
        str, typer.Option(help="Only what was not used for so long, as 90s, 30m, 12h or 3d.")
    ] = "",
    num_bytes: Annotated[int, typer.Option("--bytes", min=0, help="Enough; 0: all.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Give up blocks in memory, in the order in which they would go."""
    from finback.services.supervisor import cli_cache
    from finback.shared.wire.messages.cache_admin import EvictRequest

    asked = EvictRequest(
        num_bytes=num_bytes,
        traffic_class=traffic_class,
        tenant=tenant,
        older_than_s=_seconds(older_than) if older_than else 0.0,
    )
    act = lambda desk, _, told: cli_cache.evict(desk, told, asked)  # one expression
    raise typer.Exit(cli_cache.run(run_dir, act, as_json=as_json))


def _seconds(text: str) -> float:
    from finback.shared.errors import ConfigError

    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
    try:
        value = float(text[:-1]) * units[text[-1]]
    except (ValueError, KeyError, IndexError):
        value = -1.0
    if not 0 < value < 10**9:
        raise ConfigError(f"--older-than takes a time as 90s, 30m, 12h or 3d, not {text!r}")
    return value


def forget(
    run_dir: RunDirOption = None,
    tenant: Annotated[
        str | None, typer.Option(help="All of a tenant; '': of requests without a key.")
    ] = None,
    conversation: Annotated[
        Path | None, typer.Option(help="The blocks of a prompt (text) or of messages (JSON).")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All there is.")] = False,
    cache_salt: SaltOption = "",
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Drop blocks in all tiers, in workers' pools and in what gateways remember."""
    from finback.services.supervisor import cli_cache, locate
    from finback.services.supervisor.cache_desk import CacheDesk
    from finback.services.supervisor.cli_cache_names import chains_of, token_ids
    from finback.services.supervisor.cli_cache_told import Told
    from finback.shared.errors import ConfigError
    from finback.shared.wire.messages.cache_admin import ForgetRequest

    if (tenant is not None or conversation is not None) + everything != 1:
        raise ConfigError("give --tenant, --conversation (of a --tenant), or --all")

    async def act(desk: CacheDesk, found: locate.Running, told: Told) -> None:
        if conversation is None:
            await cli_cache.forget(desk, told, ForgetRequest(tenant=tenant, is_all=everything))
            return
        ids = token_ids(found, conversation, key)
        for salt, hashes in chains_of(desk, ids, tenant or "", cache_salt):
            await cli_cache.forget(desk, told, ForgetRequest(hashes=hashes, salt=salt))

    raise typer.Exit(cli_cache.run(run_dir, act, as_json=as_json))
