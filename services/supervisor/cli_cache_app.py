"""`finback cache`: the commands and their options."""

from typing import Annotated

import typer

from finback.services.supervisor.cli_cache_drop_app import evict, forget
from finback.services.supervisor.cli_cache_options import (
    FileArgument,
    JsonOption,
    KeyOption,
    RunDirOption,
    SaltOption,
    TenantOption,
)

cache = typer.Typer(help="The KV cache of a running stack.", no_args_is_help=True)
cache.command()(evict)
cache.command()(forget)


@cache.command()
def stats(
    run_dir: RunDirOption = None,
    top: Annotated[int, typer.Option(min=0, max=100, help="Prefixes to show.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """What lies in which tier, quotas, hit rates by class, tier and cause, prefixes, pins."""
    from finback.services.supervisor import cli_cache, cli_cache_show

    act = lambda desk, _, told: cli_cache_show.stats(  # one expression
        desk, told, num_prefixes=top, as_json=as_json
    )
    raise typer.Exit(cli_cache.run(run_dir, act, as_json=as_json))


@cache.command()
def top(
    run_dir: RunDirOption = None,
    number: Annotated[int, typer.Option("--number", "-n", min=1, max=100, help="How many.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """The most read prefixes."""
    from finback.services.supervisor import cli_cache, cli_cache_show

    act = lambda desk, _, told: cli_cache_show.top(  # one expression
        desk, told, num_prefixes=number
    )
    raise typer.Exit(cli_cache.run(run_dir, act, as_json=as_json))


@cache.command()
def pins(run_dir: RunDirOption = None, as_json: JsonOption = False) -> None:
    """The named prefixes that are kept for ever."""
    from finback.services.supervisor import cli_cache, cli_cache_show

    act = lambda desk, _, told: cli_cache_show.pins(desk, told)  # one expression
    raise typer.Exit(cli_cache.run(run_dir, act, as_json=as_json))


@cache.command()
def pin(
    name: Annotated[str, typer.Argument(help="What to call it; replaces a pin of that name.")],
    prompt: FileArgument,
    run_dir: RunDirOption = None,
    tenant: TenantOption = "",
    cache_salt: SaltOption = "",
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Never give a prefix up, now or when it is stored."""
    from finback.services.supervisor import cli_cache, locate
    from finback.services.supervisor.cache_desk import CacheDesk
    from finback.services.supervisor.cli_cache_names import chains_of, token_ids
    from finback.services.supervisor.cli_cache_told import Told

    async def act(desk: CacheDesk, found: locate.Running, told: Told) -> None:
        ids = token_ids(found, prompt, key)
        await cli_cache.pin(desk, told, name, chains_of(desk, ids, tenant, cache_salt))

    raise typer.Exit(cli_cache.run(run_dir, act, as_json=as_json))


@cache.command()
def unpin(
    name: Annotated[str, typer.Argument(help="As it was pinned.")],
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a pinned prefix go the way of others."""
    from finback.services.supervisor import cli_cache

    act = lambda desk, _, told: cli_cache.unpin(desk, told, name)  # one expression
    raise typer.Exit(cli_cache.run(run_dir, act, as_json=as_json))


@cache.command("export")
def export(
    prompt: FileArgument,
    name: Annotated[str, typer.Argument(help="A new file of the exchange folder.")],
    run_dir: RunDirOption = None,
    tenant: TenantOption = "",
    cache_salt: SaltOption = "",
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a prefix of the file tier to a file, for another cluster (see cache_exchange_dir)."""
    from finback.services.supervisor import cli_cache, cli_cache_move, locate
    from finback.services.supervisor.cache_desk import CacheDesk
    from finback.services.supervisor.cli_cache_names import chains_of, token_ids
    from finback.services.supervisor.cli_cache_told import Told

    async def act(desk: CacheDesk, found: locate.Running, told: Told) -> None:
        ids = token_ids(found, prompt, key)
        chains = chains_of(desk, ids, tenant, cache_salt)
        await cli_cache_move.export(desk, told, name, chains)

    raise typer.Exit(cli_cache.run(run_dir, act, as_json=as_json))


@cache.command("import")
def import_(
    name: Annotated[str, typer.Argument(help="A file of the exchange folder.")],
    run_dir: RunDirOption = None,
    tenant: TenantOption = "",
    cache_salt: SaltOption = "",
    as_json: JsonOption = False,
) -> None:
    """Store what another cluster exported under this cluster's key."""
    from finback.services.supervisor import cli_cache, cli_cache_move

    act = lambda desk, _, told: cli_cache_move.import_(  # one expression
        desk, told, name, tenant, cache_salt
    )
    raise typer.Exit(cli_cache.run(run_dir, act, as_json=as_json))


@cache.command()
def verify(run_dir: RunDirOption = None, as_json: JsonOption = False) -> None:
    """Check the checksums of all that is kept; exit code 1: something was bad, and is dropped."""
    from finback.services.supervisor import cli_cache, cli_cache_move

    act = lambda desk, _, told: cli_cache_move.verify(desk, told)  # one expression
    raise typer.Exit(cli_cache.run(run_dir, act, as_json=as_json))
