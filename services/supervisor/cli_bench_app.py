"""The options of `finback bench`. It imports what it needs when it runs, as all commands do."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from finback.shared.errors import ConfigError

bench = typer.Typer(
    help="Measure speed by named workloads, offline or against a running stack; docs/benchmarks.md.",
    no_args_is_help=True,
)

WORKLOADS = {
    "latency": "One stream: 128 tokens in, 256 out.",
    "nano": "256 requests of 100 to 1,024 tokens in and out, all at once.",
    "decode": "512 requests of 128 tokens in and 256 out, all at once.",
    "prefill": "16 prompts of 8,192 tokens, one token out.",
    "agent": "32 requests over 4 shared prefixes of 6,144 tokens, 64 tokens out.",
    "chat": "Poisson arrivals at --rate, lengths as in ShareGPT.",
}


def _command(workload: str) -> Callable[..., None]:
    def run(
        offline: Annotated[
            bool, typer.Option("--offline", help="In a process of its own.")
        ] = False,
        run_dir: Annotated[
            Path | None,
            typer.Option("--run-dir", help="The stack's folder.", envvar="FINBACK_RUN_DIR"),
        ] = None,
        over_nats: Annotated[bool, typer.Option("--nats", help="Over NATS, not HTTP.")] = False,
        url: Annotated[
            str | None, typer.Option(help="Another OpenAI-compatible service, http://host:port.")
        ] = None,
        token_ids: Annotated[
            bool, typer.Option("--token-ids", help="It knows return_token_ids: count by them.")
        ] = False,
        key: Annotated[str | None, typer.Option(help="API key.", envvar="FINBACK_API_KEY")] = None,
        model: Annotated[
            str | None,
            typer.Option(help="Offline: embedded, a GGUF file or a folder; else a served name."),
        ] = None,
        device: Annotated[str, typer.Option(help="Offline: auto, cpu or cuda.")] = "auto",
        settings: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="Offline: a setting of the engine."),
        ] = None,
        drafting: Annotated[bool, typer.Option("--drafting", help="Off unless asked.")] = False,
        whole: Annotated[
            bool, typer.Option("--whole", help="Offline: no text and no times of single tokens.")
        ] = False,
        limit: Annotated[
            bool, typer.Option(help="Measure the machine first, for the share of its limit.")
        ] = True,
        repeat: Annotated[int, typer.Option(help="0: 5 offline, 3 else.", min=0)] = 0,
        warm_up: Annotated[int, typer.Option(help="Repetitions before, not counted.")] = 0,
        num_requests: Annotated[int, typer.Option(help="The first so many; 0: all.")] = 0,
        scale: Annotated[float, typer.Option(help="Every length times this.")] = 1.0,
        concurrency: Annotated[int, typer.Option(help="Requests at once; 0: all.")] = 0,
        clients: Annotated[int, typer.Option(help="Processes that make the load.")] = 1,
        rate: Annotated[
            str | None, typer.Option(help="chat: requests a second; several (1,2,4): a curve.")
        ] = None,
        duration: Annotated[float, typer.Option(help="chat: seconds of arrivals.")] = 0.0,
        targets: Annotated[
            str | None, typer.Option(help="For goodput: ttft=200ms,tpot=50ms,itl=..,e2e=..")
        ] = None,
        seed: Annotated[int, typer.Option(help="Of sampling, and of chat's requests.")] = 0,
        temperature: Annotated[float, typer.Option(help="Over the full vocabulary.")] = 0.6,
        timeout: Annotated[float, typer.Option(help="Longest life of a request, s.")] = 600.0,
        output: Annotated[
            Path | None, typer.Option("--output", "-o", help="JSON lines are added to this file.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    ) -> None:
        from finback.services.supervisor import cli_bench
        from finback.shared.bench.options import BenchOptions, parse_rates
        from finback.shared.bench.targets import parse

        if offline and over_nats:
            raise ConfigError("offline and nats exclude each other; give one of them")
        options = BenchOptions(
            workload=workload,
            mode="offline" if offline else "nats" if over_nats else "http",
            repeat=repeat,
            warm_up=warm_up,
            num_requests=num_requests,
            duration_s=duration,
            rates_per_s=() if rate is None else parse_rates(rate),
            scale=scale,
            concurrency=concurrency,
            clients=clients,
            seed=seed,
            temperature=temperature,
            timeout_s=timeout,
            targets=None if targets is None else parse(targets),
            is_whole=whole,
            has_limit=limit,
            engine=_assignments(settings),
        )
        where = cli_bench.Where(
            run_dir=run_dir,
            url=url,
            model=model,
            key=key,
            device=device,
            drafting=drafting,
            has_ids=token_ids,
        )
        raise typer.Exit(cli_bench.bench(options, where, output, as_json=as_json))

    return run


for _name, _help in WORKLOADS.items():
    bench.command(_name, help=_help)(_command(_name))


@bench.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A record of bench.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Two records: medians, their ratio, and whether the spreads overlap."""
    from finback.services.supervisor import cli_bench

    raise typer.Exit(cli_bench.compare_(first, second, as_json=as_json))


@bench.command()
def plot(
    files: Annotated[list[Path], typer.Argument(help="Records of chat at several rates.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A .svg, .png or .pdf file.")],
    latency: Annotated[str, typer.Option(help="ttft, tpot, itl or e2e.")] = "ttft",
    percentile: Annotated[str, typer.Option(help="p50, p90, p95 or p99.")] = "p99",
) -> None:
    """Draw throughput against latency, one line a file."""
    from finback.services.supervisor import cli_bench

    raise typer.Exit(cli_bench.plot_(files, output, latency=latency, percentile=percentile))


def _assignments(items: list[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items or ():
        name, sign, value = item.partition("=")
        if not sign:
            raise ConfigError(f"--set needs KEY=VALUE, not {item!r}")
        found[name] = value
    return found
