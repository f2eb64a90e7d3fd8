"""What is benched, and what its machine reaches at most."""

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from finback.shared.bench.limits import Ceilings, ModelCost, model_cost
from finback.shared.bench.record import Line
from finback.shared.kv.layout import ITEM_BYTES
from finback.shared.models.config import ModelConfig, RopeScaling

CEILINGS_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is benched and how it is reached. `opening`: the workers' first line. `pids`: processes of
    the service with their names (None: not on this machine; empty: the worker itself). `facts`: for the record,
    `model_config`, `weights_bytes` and `kv_dtype` for the limit, as far as known.
    """

    opening: Line
    device: str
    pids: Mapping[int, str] | None
    facts: Line = field(default_factory=dict)


async def measure_ceilings(device: str) -> Line | None:
    """In a process of its own: it needs torch, and memory that must be free again afterwards."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "finback.shared.engine.ceilings",
        device,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(CEILINGS_TIMEOUT_S):
            told, _ = await process.communicate()
        found: Line | None = json.loads(told) if process.returncode == 0 else None
    except TimeoutError:
        found = None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return found


def ceilings_of(measured: Line) -> Ceilings:
    """For the limit: the better of both ways to use memory."""
    bandwidth = max(measured["copy_bytes_per_s"], measured["read_bytes_per_s"])
    return Ceilings(bytes_per_s=bandwidth, flops_per_s=measured["flops_per_s"])


def cost_of(facts: Line) -> ModelCost | None:
    """For the limit; None where the facts do not say what it takes."""
    if not {"model_config", "weights_bytes", "kv_dtype"} <= facts.keys():
        return None
    return model_cost(
        config_from(facts["model_config"]),
        held_bytes=facts["weights_bytes"],
        kv_item_bytes=ITEM_BYTES[facts["kv_dtype"]],
    )


def config_from(raw: dict[str, Any]) -> ModelConfig:
    """A `ModelConfig` that came as JSON."""
    scaling = raw.get("rope_scaling")
    return ModelConfig(**{**raw, "rope_scaling": RopeScaling(**scaling) if scaling else None})
