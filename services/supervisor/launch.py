"""Runs a supervisor in this process: checks first, then its logs, its event loop, its exit code."""

import asyncio
import contextlib
import dataclasses
import ipaddress
from collections.abc import Callable
from pathlib import Path

from finback.services.supervisor import key_file, ports
from finback.services.supervisor.run_dir import RunDir, StackState
from finback.shared.config import StackConfig
from finback.shared.errors import ConfigError
from finback.shared.telemetry import logging


def check(config: StackConfig, *, nats_port: int = 0) -> StackConfig:
    """What can be known to be wrong before anything is started.

    Returns the settings with the file of API keys filled in: no file, no key is asked for.
    Raises `ConfigError`: one line that says what and how to mend it.
    """
    from finback.shared.models.source import open_source

    RunDir(Path(config.run_dir)).check_free()
    if config.http_port:
        ports.choose(config.http_host, config.http_port, "HTTP", "--http-port")
    if nats_port and not config.nats_url:
        ports.choose("127.0.0.1", nats_port, "NATS", "--nats-port")
    source = open_source(config.model)
    if config.max_model_len > source.config.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is above the model's "
            f"{source.config.max_model_len} tokens"
        )
    keys_path = key_file.default_path(config)
    is_open = not _is_loopback(config.http_host) and not config.http_is_private
    if is_open and not any(not key.revoked for key in key_file.read(keys_path)):
        raise ConfigError(
            f"refusing to listen on {config.http_host} without API keys: make one "
            f"(finback keys create --run-dir {config.run_dir}), or listen on 127.0.0.1"
        )
    return dataclasses.replace(config, api_keys_file=str(keys_path))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(
    config: StackConfig,
    *,
    nats_port: int,
    report: Callable[[str], None],
    on_ready: Callable[[StackState], None],
) -> int:
    """Supervise until told to stop. Raises `ConfigError` if the stack cannot start."""
    from finback.services.supervisor.supervisor import Supervisor

    run_dir = RunDir(Path(config.run_dir))
    run_dir.create()
    with run_dir.log("supervisor").open("a", buffering=1, encoding="utf-8") as log:
        # The logger keeps the stream that is stderr now; people read `report` instead.
        with contextlib.redirect_stderr(log):
            logging.setup("supervisor", "supervisor", config.log_level)
        supervisor = Supervisor(config, nats_port=nats_port, report=report)
        return asyncio.run(supervisor.run(on_ready))
