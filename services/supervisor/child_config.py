"""What a child process is told: one effective configuration file, and secrets by environment."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finback.services.supervisor.topology import ProcessSpec, thread_environment
from finback.shared.config import ENV_PREFIX, NOT_SETTINGS, StackConfig, settings


def to_toml(config: StackConfig) -> str:
    """The effective settings as TOML, without secrets. Basic strings of TOML are JSON's."""
    lines = ["# Written by the supervisor at every start; what its services read."]
    for name, (_, told) in settings().items():
        if not told.is_secret:
            lines.append(f"{name} = {_value(getattr(config, name))}")
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return json.dumps(list(value), ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def environment(
    spec: ProcessSpec,
    *,
    config_file: Path,
    instance: str,
    nats_url: str,
    user: str,
    password: str,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The child's environment: ours without our settings, which the file now holds."""
    base = os.environ if base is None else base
    kept = NOT_SETTINGS - {f"{ENV_PREFIX}CONFIG", f"{ENV_PREFIX}API_KEY"}
    env = {k: v for k, v in base.items() if k in kept or not k.startswith(ENV_PREFIX)}
    env.pop("OTEL_EXPORTER_OTLP_ENDPOINT", None)
    env |= {
        f"{ENV_PREFIX}CONFIG": str(config_file),
        f"{ENV_PREFIX}INSTANCE": instance,
        f"{ENV_PREFIX}SUPERVISOR_PID": str(os.getpid()),
        f"{ENV_PREFIX}NATS_URL": nats_url,
        "PYTHONUNBUFFERED": "1",
    }
    if user:
        env |= {f"{ENV_PREFIX}NATS_USER": user, f"{ENV_PREFIX}NATS_PASSWORD": password}
    threads = thread_environment(spec)
    return threads | env if spec.is_engine else env | threads


def effective(config: StackConfig, **values: Any) -> StackConfig:
    """The settings with what the supervisor has chosen (ports, layout, threads) filled in."""
    return dataclasses.replace(config, **values)
