"""`finback cache`: the commands and their options."""

from pathlib import Path
from typing import Annotated

import typer

cache = typer.Typer(help="The KV cache of a running stack.", no_args_is_help=True)

RunDirOption = Annotated[
    Path | None,
    typer.Option("--run-dir", help="The stack's folder.", envvar="FINBACK_RUN_DIR"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="For scripts.")]
KeyOption = Annotated[str | None, typer.Option(help="API key.", envvar="FINBACK_API_KEY")]
FileArgument = Annotated[
    Path, typer.Argument(help="A prompt as text, or chat messages as a JSON list.")
]
SaltOption = Annotated[str, typer.Option("--cache-salt", help="The salt of its requests, if any.")]
TenantOption = Annotated[
    str, typer.Option("--tenant", help="Whose prefix it is; '': of requests without a key.")
]


@cache.command()
def stats(
    run_dir: RunDirOption = None,
    top: Annotated[int, typer.Option(min=0, max=1000, help="Prefixes to show.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """What lies in which tier, hits, misses by cause, the most read prefixes, pins."""
    from finback.services.supervisor import cli_cache

    act = lambda desk, _: cli_cache.stats(desk, num_prefixes=top, as_json=as_json)  # one expression
    raise typer.Exit(cli_cache.run(run_dir, act))


@cache.command()
def evict(
    run_dir: RunDirOption = None,
    traffic_class: Annotated[
        str, typer.Option("--class", help="Only of this class and those below it.")
    ] = "",
    num_bytes: Annotated[int, typer.Option("--bytes", min=0, help="Enough; 0: all.")] = 0,
) -> None:
    """Give up blocks in memory, in the order in which they would go."""
    from finback.services.supervisor import cli_cache

    act = lambda desk, _: cli_cache.evict(  # one expression
        desk, traffic_class=traffic_class, num_bytes=num_bytes
    )
    raise typer.Exit(cli_cache.run(run_dir, act))


@cache.command()
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
) -> None:
    """Drop blocks in all tiers; workers forget all prefixes of their pools."""
    from finback.services.supervisor import cli_cache, locate
    from finback.services.supervisor.cache_desk import CacheDesk
    from finback.shared.errors import ConfigError

    if (tenant is not None or conversation is not None) + everything != 1:
        raise ConfigError("give --tenant, --conversation (of a --tenant), or --all")

    async def act(desk: CacheDesk, found: locate.Running) -> int:
        if conversation is None:
            return await cli_cache.forget(desk, tenant=tenant, is_all=everything)
        ids = cli_cache.token_ids(found, conversation, key)
        codes = [
            await cli_cache.forget(desk, tenant=None, is_all=False, hashes=hashes, salt=salt)
            for salt, hashes in cli_cache.chains_of(desk, ids, tenant or "", cache_salt)
        ]
        return max(codes)

    raise typer.Exit(cli_cache.run(run_dir, act))


@cache.command()
def pin(
    name: Annotated[str, typer.Argument(help="What to call it; replaces a pin of that name.")],
    prompt: FileArgument,
    run_dir: RunDirOption = None,
    tenant: TenantOption = "",
    cache_salt: SaltOption = "",
    key: KeyOption = None,
) -> None:
    """Never give a prefix up, now or when it is stored."""
    from finback.services.supervisor import cli_cache, locate
    from finback.services.supervisor.cache_desk import CacheDesk

    async def act(desk: CacheDesk, found: locate.Running) -> int:
        ids = cli_cache.token_ids(found, prompt, key)
        return await cli_cache.pin(desk, name, cli_cache.chains_of(desk, ids, tenant, cache_salt))

    raise typer.Exit(cli_cache.run(run_dir, act))


@cache.command()
def unpin(
    name: Annotated[str, typer.Argument(help="As it was pinned.")], run_dir: RunDirOption = None
) -> None:
    """Let a pinned prefix go the way of others."""
    from finback.services.supervisor import cli_cache

    act = lambda desk, _: cli_cache.unpin(desk, name)  # one expression
    raise typer.Exit(cli_cache.run(run_dir, act))


@cache.command("export")
def export(
    prompt: FileArgument,
    file: Annotated[Path, typer.Argument(help="A new file on the cache's host.")],
    run_dir: RunDirOption = None,
    tenant: TenantOption = "",
    cache_salt: SaltOption = "",
    key: KeyOption = None,
) -> None:
    """Write a prefix of the file tier to a file, for another cluster."""
    from finback.services.supervisor import cli_cache, locate
    from finback.services.supervisor.cache_desk import CacheDesk

    target = file.absolute()

    async def act(desk: CacheDesk, found: locate.Running) -> int:
        ids = cli_cache.token_ids(found, prompt, key)
        return await cli_cache.export(
            desk, target, cli_cache.chains_of(desk, ids, tenant, cache_salt)
        )

    raise typer.Exit(cli_cache.run(run_dir, act))


@cache.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="What another cluster exported.")],
    run_dir: RunDirOption = None,
    tenant: TenantOption = "",
    cache_salt: SaltOption = "",
) -> None:
    """Store an exported prefix under this cluster's key."""
    from finback.services.supervisor import cli_cache

    act = lambda desk, _: cli_cache.import_(
        desk, file.absolute(), tenant, cache_salt
    )  # one expression
    raise typer.Exit(cli_cache.run(run_dir, act))


@cache.command()
def verify(run_dir: RunDirOption = None) -> None:
    """Check the checksums of all that is kept; exit code 1: something was bad, and is dropped."""
    from finback.services.supervisor import cli_cache

    raise typer.Exit(cli_cache.run(run_dir, lambda desk, _: cli_cache.verify(desk)))
