"""`finback keys`: the commands and their options."""

from pathlib import Path
from typing import Annotated

import typer

keys = typer.Typer(help="API keys of the gateway.", no_args_is_help=True)

RunDirOption = Annotated[
    Path | None,
    typer.Option("--run-dir", help="The stack's folder.", envvar="FINBACK_RUN_DIR"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="For scripts.")]
TenantOption = Annotated[
    str | None, typer.Option(help="Whose limits and usage; several keys may share one.")
]
RpmOption = Annotated[
    str | None, typer.Option("--rpm", metavar="N", help="Requests a minute; 0: no limit.")
]
TpmOption = Annotated[
    str | None, typer.Option("--tpm", metavar="N", help="Tokens a minute; 0: no limit.")
]
ConcurrencyOption = Annotated[
    str | None, typer.Option(metavar="N", help="Requests at once; 0: no limit.")
]
ExpiresOption = Annotated[
    str | None, typer.Option(metavar="30d", help="Good for so long; never: until revoked.")
]
ScopeOption = Annotated[
    list[str] | None, typer.Option("--scope", help="inference (if none is given), usage, admin.")
]
ModelOption = Annotated[
    list[str] | None, typer.Option("--model", help="For these models only; may be repeated.")
]
ClassOption = Annotated[
    str | None, typer.Option("--class", help="Class of its traffic: chat, agent or batch.")
]


@keys.command("create")
def keys_create(
    name: Annotated[str, typer.Argument(help="Whom it is for; shown by list.")] = "default",
    run_dir: RunDirOption = None,
    tenant: TenantOption = None,
    rpm: RpmOption = None,
    tpm: TpmOption = None,
    concurrency: ConcurrencyOption = None,
    expires: ExpiresOption = None,
    scopes: ScopeOption = None,
    models: ModelOption = None,
    traffic_class: ClassOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key and show it, this once. Limits are its tenant's, for all its keys."""
    from finback.services.supervisor import cli_keys

    values = cli_keys.values_of(
        tenant=tenant,
        rpm=rpm,
        tpm=tpm,
        concurrency=concurrency,
        expires=expires,
        scopes=scopes,
        models=models,
        traffic_class=traffic_class,
    )
    raise typer.Exit(cli_keys.create(run_dir, name, values, as_json=as_json))


@keys.command("set")
def keys_set(
    key_id: Annotated[str, typer.Argument(help="An id as shown by list.")],
    run_dir: RunDirOption = None,
    rpm: RpmOption = None,
    tpm: TpmOption = None,
    concurrency: ConcurrencyOption = None,
    expires: ExpiresOption = None,
    scopes: ScopeOption = None,
    models: ModelOption = None,
    traffic_class: ClassOption = None,
) -> None:
    """Change a key, or its tenant's limits (default: as the settings say); needs no restart."""
    from finback.services.supervisor import cli_keys

    values = cli_keys.values_of(
        tenant=None,
        rpm=rpm,
        tpm=tpm,
        concurrency=concurrency,
        expires=expires,
        scopes=scopes,
        models=models,
        traffic_class=traffic_class,
    )
    raise typer.Exit(cli_keys.set_(run_dir, key_id, values))


@keys.command("list")
def keys_list(run_dir: RunDirOption = None, as_json: JsonOption = False) -> None:
    """Names and ids; keys themselves are kept as hashes only."""
    from finback.services.supervisor import cli_keys

    raise typer.Exit(cli_keys.list_(run_dir, as_json=as_json))


@keys.command("revoke")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(help="An id as shown by list.")],
    run_dir: RunDirOption = None,
) -> None:
    """End a key; effective without a restart."""
    from finback.services.supervisor import cli_keys

    raise typer.Exit(cli_keys.revoke(run_dir, key_id))
