"""What of a model fits beside its weights on this machine. Arithmetic is pure; torch-free."""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from finback.shared.models.inspection import Inspection, Kept

# What a step needs beside weights and KV is far below this for any model that fits at all.
_RUNTIME_SHARE: Final = 0.05
_QUERY: Final = ("nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader,nounits")
_QUERY_TIMEOUT_S: Final = 10.0
SEQUENCE_TOKENS: Final = 4096
# The ways to hold weights that are worth telling, of those that a model has; by kind of place.
_WAYS: Final = {"host": ("auto", "f32", "bf16", "stored"), "device": ("bf16",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a model could run: in the host's memory or on a device of its own."""

    name: str
    free_bytes: int
    is_device: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Beside weights held as `weights_dtype`, with KV as `kv_dtype`.

    `kv_tokens`: of one sequence; `num_sequences`: of `sequence_tokens` each. 0: the weights do not fit.
    """

    place: str
    free_bytes: int
    weights_dtype: str
    weights_bytes: int
    kv_dtype: str
    kv_tokens: int
    sequence_tokens: int
    num_sequences: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def fits(found: Inspection, places: list[Place], kv_dtype: str = "bf16") -> list[Fit]:
    """Every place with the ways to hold the weights there."""
    length = min(SEQUENCE_TOKENS, found.max_model_len)
    return [
        fit_one(place, dtype, found.held[dtype], kv_dtype, found.kept[kv_dtype], length)
        for place in places
        for dtype in ways(found.held, place)
    ]


def ways(held: Mapping[str, int], place: Place) -> list[str]:
    """Where `auto` keeps what the file holds, the host needs to be told nothing else. Pure."""
    wanted = _WAYS["device" if place.is_device else "host"]
    known = [dtype for dtype in wanted if dtype in held]
    return ["auto"] if "auto" in known else known


def fit_one(
    place: Place, dtype: str, weights_bytes: int, kv_dtype: str, kept: Kept, length: int
) -> Fit:
    """Pure."""
    left = int(place.free_bytes * (1 - _RUNTIME_SHARE)) - weights_bytes
    one = length * kept.kv_bytes_per_token + kept.slot_bytes
    return Fit(
        place=place.name,
        free_bytes=place.free_bytes,
        weights_dtype=dtype,
        weights_bytes=weights_bytes,
        kv_dtype=kv_dtype,
        kv_tokens=max(0, int((left - kept.slot_bytes) / kept.kv_bytes_per_token)),
        sequence_tokens=length,
        num_sequences=max(0, int(left / one)),
    )


def places() -> list[Place]:
    """The host's memory, and that of NVIDIA devices if their tool tells it."""
    from finback.shared.engine.memory import free_memory_bytes

    return [Place(name="host memory", free_bytes=free_memory_bytes()), *_nvidia()]


def _nvidia() -> list[Place]:
    if shutil.which(_QUERY[0]) is None:
        return []
    try:
        done = subprocess.run(
            _QUERY, capture_output=True, text=True, check=False, timeout=_QUERY_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_devices(done.stdout) if done.returncode == 0 else []


def parse_devices(text: str) -> list[Place]:
    """Lines of `name, free MiB`. Pure."""
    found = []
    for at, line in enumerate(text.strip().splitlines()):
        name, _, free = line.rpartition(",")
        if free.strip().isdigit():
            found.append(
                Place(name=f"{name.strip()} {at}", free_bytes=int(free) << 20, is_device=True)
            )
    return found
