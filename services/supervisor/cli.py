"""The commands and their options. Each imports what it needs when it runs: `finback --help` is quick."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from finback.services.supervisor.cli_bench_app import bench
from finback.services.supervisor.cli_cache_app import cache
from finback.services.supervisor.cli_grammar_app import grammar
from finback.services.supervisor.cli_keys_app import keys
from finback.shared.errors import ConfigError, ServingError

app = typer.Typer(
    name="finback",
    help="LLM inference as a set of services over NATS.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(keys, name="keys")
app.add_typer(cache, name="cache")
app.add_typer(bench, name="bench")
app.add_typer(grammar, name="grammar")

# The base of all usage errors; typer does not name it, and may or may not bring its own click.
_CLICK_ERROR: Any = typer.BadParameter.__mro__[2]

RunDirOption = Annotated[
    Path | None,
    typer.Option("--run-dir", help="The stack's folder.", envvar="FINBACK_RUN_DIR"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="For scripts.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting.")
]


@app.command()
def up(
    run_dir: RunDirOption = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when ready.")] = False,
    separate: Annotated[bool, typer.Option(help="Prefill and decode as two processes.")] = False,
    cohost: Annotated[bool, typer.Option(help="Prefill and decode in one process.")] = False,
    model: Annotated[
        str | None, typer.Option(help="'embedded', a GGUF file or a Hugging Face folder.")
    ] = None,
    http_host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    http_port: Annotated[int | None, typer.Option(help="0: a free one.")] = None,
    nats_port: Annotated[int, typer.Option(help="0: a free one.")] = 0,
    drafting: Annotated[bool | None, typer.Option(help="Ask the drafter for tokens.")] = None,
    deterministic: Annotated[
        bool | None, typer.Option(help="One numeric path for every batch and chunking.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus answer.")] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Start the stack; it runs until Ctrl-C, or in the background with --detach."""
    from finback.services.supervisor import cli_up

    if separate and cohost:
        raise ConfigError("--separate and --cohost exclude each other; give one of them")
    options = {
        "run_dir": _text(run_dir),
        "model": model,
        "http_host": http_host,
        "http_port": http_port,
        "roles_layout": "separate" if separate else "cohost" if cohost else None,
        "drafting": drafting,
        "deterministic": deterministic,
        "max_model_len": max_model_len,
    }
    given = {name: value for name, value in options.items() if value is not None}
    overrides = _assignments(settings) | given
    raise typer.Exit(cli_up.up(config, overrides, nats_port=nats_port, detach=detach))


@app.command()
def down(
    run_dir: RunDirOption = None,
    force: Annotated[bool, typer.Option(help="Do not wait for open requests.")] = False,
) -> None:
    """Stop the stack: open requests are finished first."""
    from finback.services.supervisor import cli_down

    raise typer.Exit(cli_down.down(run_dir, force=force))


@app.command()
def status(run_dir: RunDirOption = None, as_json: JsonOption = False) -> None:
    """What runs, and where."""
    from finback.services.supervisor import cli_status

    raise typer.Exit(cli_status.status(run_dir, as_json=as_json))


@app.command()
def chat(
    text: Annotated[str | None, typer.Argument(help="One question; none: a conversation.")] = None,
    run_dir: RunDirOption = None,
    over_nats: Annotated[bool, typer.Option("--nats", help="Over NATS, not HTTP.")] = False,
    model: Annotated[str | None, typer.Option(help="The stack's model if not given.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="Small models babble at 1.")
    ] = 0.6,
    seed: Annotated[int | None, typer.Option()] = None,
    key: Annotated[str | None, typer.Option(help="API key.", envvar="FINBACK_API_KEY")] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask the model; the answer is shown as it comes."""
    from finback.services.supervisor import cli_chat

    sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "model": model}
    options = {name: value for name, value in sampling.items() if value is not None}
    raise typer.Exit(
        cli_chat.chat(
            run_dir,
            text,
            options,
            system=system,
            key=key,
            over_nats=over_nats,
            as_json=as_json,
        )
    )


@app.command()
def trace(
    wanted: Annotated[str, typer.Argument(metavar="REQUEST_ID|last")] = "last",
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """One request's way through the services, as a waterfall."""
    from finback.services.supervisor import cli_trace

    raise typer.Exit(cli_trace.trace(run_dir, wanted, as_json=as_json))


models_app = typer.Typer(
    help="The models that the running stack serves; with a command, those on disk.",
    invoke_without_command=True,
)
app.add_typer(models_app, name="models")


@models_app.callback()
def models(
    context: typer.Context,
    run_dir: RunDirOption = None,
    key: Annotated[str | None, typer.Option(help="API key.", envvar="FINBACK_API_KEY")] = None,
    as_json: JsonOption = False,
) -> None:
    """The models that the running stack serves; with a command, those on disk."""
    if context.invoked_subcommand is not None:
        return
    from finback.services.supervisor import cli_show

    raise typer.Exit(cli_show.models(run_dir, key=key, as_json=as_json))


@models_app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="'embedded', a GGUF file or a model folder.")],
    as_json: JsonOption = False,
) -> None:
    """What a model is and takes, what fits here, what is missing; exit code 1: cannot be served."""
    from finback.services.supervisor import cli_inspect

    raise typer.Exit(cli_inspect.inspect(model, as_json=as_json))


@models_app.command()
def convert(
    folder: Annotated[Path, typer.Argument(help="A DeepSeek V4 folder, of either layout.")],
    out: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    to: Annotated[str, typer.Option(help="transformers or published: whose names.")],
    dtype: Annotated[str, typer.Option(help="f32, bf16; auto: as stored, else bf16.")] = "auto",
    shard_bytes: Annotated[int, typer.Option(min=1, help="Most bytes a file.")] = 4 << 30,
) -> None:
    """A DeepSeek V4 under transformers' names or the published ones; fp8 and fp4 are dequantised."""
    from finback.services.supervisor import cli_convert

    raise typer.Exit(
        cli_convert.convert(folder, out, layout=to, dtype=dtype, max_shard_bytes=shard_bytes)
    )


@app.command()
def kernels(
    device: Annotated[str, typer.Option(help="cpu, cuda or npu; auto: this machine's.")] = "auto",
    deterministic: Annotated[bool, typer.Option(help="As with up --deterministic.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Which implementation serves each op here, and why."""
    from finback.services.supervisor import cli_kernels

    raise typer.Exit(cli_kernels.kernels(device, deterministic=deterministic, as_json=as_json))


@app.command("config")
def config_(
    config: ConfigOption = None, settings: SetOption = None, as_json: JsonOption = False
) -> None:
    """Every setting, its value and where that came from."""
    from finback.services.supervisor import cli_show

    raise typer.Exit(cli_show.config(config, _assignments(settings), as_json=as_json))


@app.command()
def doctor(run_dir: RunDirOption = None, as_json: JsonOption = False) -> None:
    """What this machine can run, and what is missing."""
    from finback.services.supervisor import cli_doctor

    raise typer.Exit(cli_doctor.doctor(run_dir, as_json=as_json))


@app.command()
def logs(
    service: Annotated[str, typer.Argument(help="A service, nats or supervisor.")],
    run_dir: RunDirOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0)] = 100,
) -> None:
    """What a service has written."""
    from finback.services.supervisor import cli_logs

    raise typer.Exit(cli_logs.logs(run_dir, service, follow=follow, lines=lines))


@app.command()
def usage(
    run_dir: RunDirOption = None,
    tenant: Annotated[str | None, typer.Option(help="Of this one only.")] = None,
    since: Annotated[str, typer.Option(metavar="24h", help="How far back.")] = "24h",
    as_csv: Annotated[bool, typer.Option("--csv", help="By the hour, for sheets.")] = False,
    as_json: JsonOption = False,
) -> None:
    """What each tenant has used: requests and tokens, by model and outcome."""
    from finback.services.supervisor import cli_usage

    raise typer.Exit(
        cli_usage.usage(run_dir, tenant=tenant, since=since, as_json=as_json, as_csv=as_csv)
    )


def run() -> int:
    """Run a command; what is wrong is one line on stderr and exit code 2."""
    try:
        result: Any = typer.main.get_command(app).main(prog_name="finback", standalone_mode=False)
    except _CLICK_ERROR as error:
        text = error.format_message()
        if not text.strip():  # no command was given: the help has been shown
            return 2
        return _complain(text)
    except (ConfigError, ServingError) as error:
        return _complain(str(error))
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        return 0
    return result if isinstance(result, int) else 0


def _complain(text: str) -> int:
    sys.stderr.write(f"finback: {' '.join(text.split())}\n")
    return 2


def _assignments(items: list[str] | None) -> dict[str, Any]:
    """`KEY=VALUE` options as overrides; the settings check the rest."""
    found: dict[str, Any] = {}
    for item in items or ():
        name, sign, value = item.partition("=")
        if not sign:
            raise ConfigError(f"--set needs KEY=VALUE, not {item!r}")
        found[name] = value
    return found


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
