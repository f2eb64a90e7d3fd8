"""`finback bench`: finds what is to be benched, runs it, shows and keeps the figures."""

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from finback.services.supervisor import ask, locate
from finback.services.supervisor.locate import Running
from finback.services.supervisor.run_dir import remains
from finback.shared import config as settings
from finback.shared.bench import compare, plot, progress, report
from finback.shared.bench.crew import BenchFailed
from finback.shared.bench.http_client import check_url
from finback.shared.bench.options import BenchOptions
from finback.shared.bench.record import Line, Recorder, read_summaries
from finback.shared.bench.session import Session
from finback.shared.bench.target import Target
from finback.shared.errors import ConfigError
from finback.shared.models.source import ModelSource, open_source

INTERRUPTED: Final = 130
FAILED: Final = 1
# What `--set` may give to the offline engine; their types and limits are those of the settings.
ENGINE_SETTINGS: Final = (
    "deterministic",
    "weights_dtype",
    "kv_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_pool_bytes",
    "block_size",
    "num_threads",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What the command line says of the thing to bench."""

    run_dir: Path | None
    url: str | None
    model: str | None
    key: str | None
    device: str
    drafting: bool
    has_ids: bool


def bench(options: BenchOptions, where: Where, output: Path | None, *, as_json: bool) -> int:
    """Run it; 130 if it was interrupted, 1 if it failed: what was measured is kept either way."""
    console = Console(highlight=False, stderr=as_json)
    target = target_of(options, where)
    with Recorder(output) as recorder:
        session = Session(options, target, recorder, progress.observer(console))
        code = asyncio.run(_run(session))
        _show(console, recorder.lines, output, as_json=as_json)
    return code


async def _run(session: Session) -> int:
    """With Ctrl-C: the first ends what runs and keeps it, the second ends at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def interrupt() -> None:
        if (session.is_interrupted or not session.is_measuring) and task is not None:
            task.cancel()
        session.interrupt()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGTERM, interrupt)
    try:
        await session.run()
    except asyncio.CancelledError:
        return INTERRUPTED
    except BenchFailed as error:
        sys.stderr.write(f"finback: {error}\n")
        return FAILED
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)
    return INTERRUPTED if session.is_interrupted else 0


def _show(console: Console, lines: Sequence[Line], output: Path | None, *, as_json: bool) -> None:
    summaries = [line for line in lines if line["kind"] == "summary"]
    if as_json:
        for line in lines:
            sys.stdout.write(json.dumps(line) + "\n")
        return
    for summary in summaries:
        report.show(console, summary)
    if len(summaries) > 1:
        report.show_curve(console, summaries)
    if output is not None and lines:
        console.print(f"{len(lines)} lines kept in {output}")


def compare_(first: Path, second: Path, *, as_json: bool) -> int:
    """`finback bench compare A B`."""
    both, lonely = compare.pairs(read_summaries(first), read_summaries(second))
    if as_json:
        found = {"pairs": [compare.as_json(pair) for pair in both], "only_in_one": lonely}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return 0
    console = Console(highlight=False)
    for pair in both:
        compare.show(console, pair)
    for text in lonely:
        console.print(text)
    if not both:
        raise ConfigError(f"{first} and {second} have no workload in common")
    return 0


def plot_(files: Sequence[Path], output: Path, *, latency: str, percentile: str) -> int:
    """`finback bench plot FILE...`."""
    curves = [plot.curve(path.stem, read_summaries(path), latency, percentile) for path in files]
    plot.draw(curves, latency, percentile, output)
    Console(highlight=False).print(f"drawn: {output}")
    return 0


# -- what is benched


def target_of(options: BenchOptions, where: Where) -> Target:
    """The thing to bench. Raises `ConfigError` where there is none, or not as it was asked for."""
    if options.mode == "offline":
        if where.url is not None:
            raise ConfigError("url and offline exclude each other; give one of them")
        return _offline(options, where)
    if where.url is not None:
        return _outside(options, where, where.url)
    return _stack(options, where, locate.running(where.run_dir))


def _offline(options: BenchOptions, where: Where) -> Target:
    model = where.model or "embedded"
    source = open_source(model)  # a wrong path is told before anything is measured
    engine = engine_settings(options.engine)
    if where.drafting:
        engine["max_draft_tokens"] = settings.load(env={})[0].draft_tokens
    opening = {
        "kind": "open",
        "mode": "offline",
        "model": model,
        "is_whole": options.is_whole,
        "options": {"device": where.device, **engine},
    }
    facts = {
        "mode": "offline",
        "model": source.name,
        "model_digest": source.digest,
        "device": where.device,
        "drafting": where.drafting,
        "deterministic": bool(engine.get("deterministic", False)),
        "engine": engine,
    }
    return Target(opening=opening, device=where.device, pids={}, facts=facts)


def engine_settings(given: dict[str, Any]) -> dict[str, Any]:
    """`--set` for the offline engine, with the types and limits that the settings have."""
    for name in given:
        if name not in ENGINE_SETTINGS:
            raise ConfigError(f"set: {name} is none of {', '.join(ENGINE_SETTINGS)}")
    loaded, _ = settings.load(env={}, overrides=given)
    return {name: getattr(loaded, name) for name in given}


def _outside(options: BenchOptions, where: Where, url: str) -> Target:
    """A service that we know nothing of but its address."""
    if options.mode == "nats":
        raise ConfigError("url and nats exclude each other: NATS is of a stack found by --run-dir")
    if where.model is None:
        raise ConfigError("model must be given with --url: the name that the service serves")
    url = url.rstrip("/").removesuffix("/v1")
    check_url(url)
    opening = {
        "kind": "open",
        "mode": "http",
        "url": url,
        "model": where.model,
        "key": where.key or "",
        "has_ids": where.has_ids,
    }
    facts = {"mode": "http", "model": where.model, "device": None, "drafting": None}
    return Target(opening=opening, device="auto", pids=None, facts=facts)


def _stack(options: BenchOptions, where: Where, found: Running) -> Target:
    """The stack of a run directory; its own file of settings says what it computes with."""
    state = found.state
    if not state.ready:
        raise ConfigError(f"the stack in {found.run_dir.root} is not ready yet; see finback status")
    config, _ = settings.load(found.run_dir.root / "config.toml", env={})
    if config.drafting != where.drafting:
        raise ConfigError(
            f"the stack runs with drafting {'on' if config.drafting else 'off'}: "
            + ("give --drafting to bench it so" if config.drafting else "leave --drafting off")
        )
    facts: Line = {
        "mode": options.mode,
        "model": state.model,
        "device": config.device,
        "drafting": config.drafting,
        "deterministic": config.deterministic,
        "engine": {"roles_layout": config.roles_layout, "max_num_seqs": config.max_num_seqs},
    }
    with suppress(ConfigError):  # a model that lies elsewhere: there is no share of the limit then
        facts |= _model_facts(open_source(config.model), config)
    opening = _opening(options, where, found, config.subject_prefix)
    pids = {pid: name for name, pid in remains(state)} | {state.supervisor_pid: "supervisor"}
    return Target(opening=opening, device=config.device, pids=pids, facts=facts)


def _opening(options: BenchOptions, where: Where, found: Running, prefix: str) -> Line:
    opening: Line = {
        "kind": "open",
        "mode": options.mode,
        "model": where.model or found.state.model,
        "key": where.key or "",
    }
    if options.mode == "http":
        return opening | {"url": found.state.http, "has_ids": True}
    return opening | {"bus": asdict(ask.client_settings(found.state.nats)), "prefix": prefix}


def _model_facts(source: ModelSource, config: settings.StackConfig) -> Line:
    """For the limit. What weights take in memory is not told by a running stack: its files' size."""
    pattern = [source.path] if source.path.is_file() else list(source.path.glob("*.safetensors"))
    kv_dtype = config.kv_dtype
    if kv_dtype == "auto":
        kv_dtype = "bf16" if config.device == "cuda" else "f16"
    return {
        "model_digest": source.digest,
        "model_config": asdict(source.config),
        "weights_bytes": sum(path.stat().st_size for path in pattern),
        "weights_bytes_are_of_files": True,
        "kv_dtype": kv_dtype,
    }
