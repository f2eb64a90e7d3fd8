"""What a machine needs and has. Each check is a function that returns one finding."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import psutil

from finback.services.supervisor import topology
from finback.shared.config import StackConfig
from finback.shared.cores import num_cores
from finback.shared.errors import ConfigError

if TYPE_CHECKING:
    from finback.shared.models.config import ModelConfig
    from finback.shared.models.deepseek_v4.config import V4Config

Level = Literal["ok", "note", "missing"]

MIN_MEMORY_BYTES: Final = 2 * 10**9
MIN_DISK_BYTES: Final = 200 * 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report; `hint` says how to mend it."""

    what: str
    level: Level
    found: str
    hint: str = ""


def all_findings(config: StackConfig) -> list[Finding]:
    """Every check in the order in which a person would look."""
    checks: list[Callable[[StackConfig], Finding]] = [
        python,
        cores,
        memory,
        accelerator,
        torch,
        nats,
        model,
        shared_memory,
        run_dir,
        traces,
    ]
    return [check(config) for check in checks]


def python(config: StackConfig) -> Finding:
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding(what="python", level="ok", found=system)


def cores(config: StackConfig) -> Finding:
    count = num_cores()
    layout = topology.choose_layout(config.roles_layout, count)
    flags = ", ".join(_cpu_flags()) or "no vector extension known"
    words = "in one process" if layout == "cohost" else "separate"
    return Finding(what="cores", level="ok", found=f"{count} ({flags}); prefill and decode {words}")


def _cpu_flags() -> list[str]:
    """Those extensions that the CPU kernels look at."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    line = next((one for one in text.splitlines() if one.startswith(("flags", "Features"))), "")
    have = set(line.partition(":")[2].split())
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve")
    return [flag for flag in wanted if flag in have]


def memory(config: StackConfig) -> Finding:
    free = psutil.virtual_memory().available
    found = f"{free / 1e9:.1f} GB free"
    if free >= MIN_MEMORY_BYTES:
        return Finding(what="memory", level="ok", found=found)
    return Finding(
        what="memory", level="note", found=found, hint="the embedded model wants about 2 GB"
    )


def accelerator(config: StackConfig) -> Finding:
    for command, name in ((["nvidia-smi", "-L"], "NVIDIA"), (["npu-smi", "info"], "Ascend")):
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip():
            first = done.stdout.strip().splitlines()[0]
            return Finding(what="accelerator", level="ok", found=f"{name}: {first[:60]}")
    return Finding(what="accelerator", level="note", found="none; engines run on the CPU")


def torch(config: StackConfig) -> Finding:
    """Asks the installed package's metadata: importing it takes seconds."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding(what="torch", level="missing", found="not installed", hint="make setup")
    return Finding(what="torch", level="ok", found=version)


def nats(config: StackConfig) -> Finding:
    if config.nats_url:
        return Finding(what="nats", level="ok", found="an outside server (nats_url)")
    from finback.services.supervisor import nats_server

    try:
        binary = nats_server.binary()
    except ConfigError as error:
        return Finding(what="nats", level="missing", found="no nats-server", hint=str(error))
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    return Finding(what="nats", level="ok", found=done.stdout.strip() or binary)


def model(config: StackConfig) -> Finding:
    from finback.shared.models.source import open_source

    try:
        source = open_source(config.model)
    except ConfigError as error:
        return Finding(what="model", level="missing", found=config.model, hint=str(error))
    shape = source.config
    return Finding(
        what="model",
        level="ok",
        found=f"{config.model_name}: {shape.architecture}, {shape.num_layers} layers, "
        f"up to {shape.max_model_len} tokens; {_kept(config, shape)}",
    )


def _kept(config: StackConfig, shape: "ModelConfig | V4Config") -> str:
    """What a token takes in blocks, and a sequence beside them; `auto` is told as two bytes an item."""
    from finback.shared.models.kept_state import kept_state

    dtype = "bf16" if config.kv_dtype == "auto" else config.kv_dtype
    geometry = shape.kv_geometry(shape.block_tokens(config.block_size), dtype)
    found = f"KV {geometry.block_bytes / geometry.block_size / 1024:.1f} KiB a token"
    state = kept_state(shape, dtype)
    if state is not None:
        found += f", state {state.payload_bytes / 1024:.1f} KiB a sequence"
    return f"{found} as {dtype}"


def shared_memory(config: StackConfig) -> Finding:
    folder = Path(config.shm_dir)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = f"{config.shm_dir}, {free / 1e9:.1f} GB free"
    if not os.access(folder, os.W_OK):
        return Finding(
            what="shared memory", level="missing", found=found, hint="not writable: set shm_dir"
        )
    if free < config.arena_bytes:
        hint = f"less than arena_bytes ({config.arena_bytes / 1e9:.1f} GB): blocks go over NATS"
        return Finding(what="shared memory", level="note", found=found, hint=hint)
    return Finding(what="shared memory", level="ok", found=found)


def run_dir(config: StackConfig) -> Finding:
    folder = Path(config.run_dir)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = f"{config.run_dir}, {free / 1e9:.1f} GB free"
    if not os.access(folder, os.W_OK):
        return Finding(
            what="run directory", level="missing", found=found, hint="not writable: --run-dir"
        )
    if free < MIN_DISK_BYTES:
        return Finding(
            what="run directory", level="note", found=found, hint="the disk is nearly full"
        )
    return Finding(what="run directory", level="ok", found=found)


def traces(config: StackConfig) -> Finding:
    if not config.otlp_endpoint:
        return Finding(what="traces", level="ok", found=f"local files in {config.trace_dir}")
    if importlib.util.find_spec("opentelemetry.exporter") is None:
        return Finding(
            what="traces",
            level="missing",
            found=f"OTLP to {config.otlp_endpoint}, no exporter",
            hint="pip install 'finback[otlp]'",
        )
    return Finding(what="traces", level="ok", found=f"OTLP to {config.otlp_endpoint}")


def to_json(findings: list[Finding]) -> str:
    rows = [{"what": f.what, "level": f.level, "found": f.found, "hint": f.hint} for f in findings]
    return json.dumps(rows, indent=2)
