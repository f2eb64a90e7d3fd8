"""`finback up`: in the foreground, or in the background with the progress shown until ready."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from finback.services.supervisor import daemon, launch, log_files
from finback.services.supervisor.run_dir import RunDir, StackState
from finback.shared import config as settings
from finback.shared.config import StackConfig
from finback.shared.errors import ConfigError


def up(
    config_file: Path | None, overrides: Mapping[str, Any], *, nats_port: int, detach: bool
) -> int:
    """Check, start, say where it listens. Returns the exit code."""
    if config_file is not None:
        config_file = config_file.absolute()
    config = launch.check(settings.load(config_file, None, overrides)[0], nats_port=nats_port)
    console = Console(stderr=True, highlight=False)
    if detach:
        start_detached(config, config_file, overrides, nats_port=nats_port, console=console)
        return 0
    began_s = time.monotonic()

    def report(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began_s:5.1f} s[/dim]  {text}")

    def ready(state: StackState) -> None:
        report("ready")
        tell(state, config)

    return launch.serve(config, nats_port=nats_port, report=report, on_ready=ready)


def start_detached(
    config: StackConfig,
    config_file: Path | None,
    overrides: Mapping[str, Any],
    *,
    nats_port: int,
    console: Console,
) -> StackState:
    """Start a supervisor in a session of its own; return when the stack is ready.

    Raises `ConfigError` with the reason if it does not get there; then nothing is left running.
    """
    run_dir = RunDir(Path(config.run_dir))
    run_dir.create()
    began_s = time.monotonic()
    order = daemon.Order(
        config_file=str(config_file) if config_file else None,
        overrides=dict(overrides) | {"run_dir": config.run_dir},
        nats_port=nats_port,
    )
    read_fd, write_fd = os.pipe()
    log = log_files.open_for_append(run_dir.log("supervisor"))
    child = subprocess.Popen(
        daemon.command(order, write_fd),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(write_fd,),
        start_new_session=True,
    )
    os.close(write_fd)
    os.close(log)
    try:
        with os.fdopen(read_fd) as lines:
            for line in lines:
                word = json.loads(line)
                if "progress" in word:
                    took = f"[dim]{time.monotonic() - began_s:5.1f} s[/dim]"
                    console.print(f"{took}  {word['progress']}")
                elif "error" in word:
                    child.wait()
                    raise ConfigError(word["error"])
                elif "ready" in word:
                    state = StackState.from_json(json.dumps(word["ready"]))
                    console.print(f"[dim]{time.monotonic() - began_s:5.1f} s[/dim]  ready")
                    tell(state, config)
                    return state
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise
    child.wait()
    reason = log_files.last_line(run_dir.log("supervisor"))
    raise ConfigError(f"the supervisor ended with code {child.returncode}: {reason}")


def tell(state: StackState, config: StackConfig) -> None:
    """Where the stack listens, on stdout, and what to do next."""
    nats = state.nats.rpartition("@")[2].removeprefix("nats://")
    out = sys.stdout
    out.write(f"model   {state.model}\n")
    out.write(f"http    {state.http}/v1\n")
    out.write(f"nats    nats://{nats} (with credentials: finback status --json)\n")
    out.write("try     finback chat 'Why is the sky blue?'\n")
    out.flush()
