"""Options that several `finback cache` commands have."""

from pathlib import Path
from typing import Annotated

import typer

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
