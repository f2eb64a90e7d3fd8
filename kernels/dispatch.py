"""Which implementation serves which op: registered once, selected once at start.

`FINBACK_KERNEL_BACKEND` (or the argument `backend`) is "auto", a backend's name for all ops, or a list
such as "reference,sample_tokens=cpu". What is asked for by name and cannot run stops the start; what
"auto" passes over is kept with its reason, for the log and `finback kernels`.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

from finback.kernels.host import cpu_reason
from finback.kernels.triton_launch import triton_reason
from finback.kernels.unavailable import KernelUnavailable

BACKENDS: Final = ("reference", "cpu", "cuda")
MODES: Final = ("fast", "deterministic", "reference")
ENVIRONMENT: Final = "FINBACK_KERNEL_BACKEND"


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One op on one backend. `module` is imported only when it is chosen.

    `devices`: where it runs ("*" is anywhere torch runs). `modes`: the numerics classes it serves.
    `why`: what speaks for it. Earlier registrations of an op are preferred by "auto".
    """

    op: str
    backend: str
    module: str
    devices: tuple[str, ...]
    modes: tuple[str, ...]
    why: str

    def obstacle(self, device: str, mode: str) -> str | None:
        """Why it cannot serve here, or None."""
        if "*" not in self.devices and device not in self.devices:
            return f"runs on {', '.join(self.devices)} only"
        if mode not in self.modes:
            return f"does not serve mode {mode}"
        if self.backend == "cuda":
            return triton_reason()
        return cpu_reason() if self.backend == "cpu" else None

    def load(self) -> Callable[..., Any]:
        """The function; it has the op's name."""
        function: Callable[..., Any] = getattr(importlib.import_module(self.module), self.op)
        return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The implementation chosen for an op, and those passed over with their reasons."""

    chosen: Implementation
    skipped: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSet:
    """The chosen function of every op that the layered network calls, by name."""

    embedding: Callable[..., Any]
    linear: Callable[..., Any]
    paged_attention: Callable[..., Any]
    rms_norm: Callable[..., Any]
    rotary: Callable[..., Any]
    silu_mul: Callable[..., Any]
    store_kv: Callable[..., Any]
    store_window: Callable[..., Any]
    window_attention: Callable[..., Any]


_REGISTRY: Final[dict[str, list[Implementation]]] = {}


def register(implementation: Implementation) -> None:
    """Add an implementation; a second one of the same op and backend is a mistake."""
    known = _REGISTRY.setdefault(implementation.op, [])
    if any(item.backend == implementation.backend for item in known):
        raise ValueError(f"{implementation.op} has a {implementation.backend} kernel already")
    known.append(implementation)


def ops() -> list[str]:
    """All registered ops."""
    return sorted(_REGISTRY)


def implementations(op: str) -> list[Implementation]:
    """All implementations of an op, preferred ones first."""
    return list(_REGISTRY[op])


def select(op: str, device: str, mode: str, backend: str | None = None) -> Selection:
    """Choose for one op. Raises `KernelUnavailable`, which says what to change."""
    if mode not in MODES:
        raise KernelUnavailable(
            f"numerics mode {mode!r} is not known; use one of {', '.join(MODES)}"
        )
    asked = _asked_for(op, backend)
    skipped = []
    for item in _REGISTRY[op]:
        if asked not in ("auto", item.backend):
            skipped.append((item.backend, f"{asked} was asked for"))
            continue
        reason = item.obstacle(device, mode)
        if reason is None:
            rest = _REGISTRY[op][_REGISTRY[op].index(item) + 1 :]
            passed = [(other.backend, "less preferred") for other in rest]
            return Selection(chosen=item, skipped=(*skipped, *passed))
        skipped.append((item.backend, reason))
    detail = "; ".join(f"{name}: {reason}" for name, reason in skipped)
    raise KernelUnavailable(
        f"no {asked} kernel for {op} on {device} in mode {mode} ({detail}); set {ENVIRONMENT}=auto"
    )


def select_all(device: str, mode: str, backend: str | None = None) -> KernelSet:
    """Choose for every op of the layered network."""
    names = [item.name for item in fields(KernelSet)]
    return KernelSet(**{op: select(op, device, mode, backend).chosen.load() for op in names})


def table(
    device: str = "auto", mode: str = "fast", backend: str | None = None
) -> list[dict[str, str]]:
    """Each op with its implementation, the reason, and what was passed over: for people."""
    device = "cpu" if device == "auto" else device
    rows = []
    for op in ops():
        selection = select(op, device, mode, backend)
        rows.append(
            {
                "op": op,
                "backend": selection.chosen.backend,
                "why": selection.chosen.why,
                "skipped": "; ".join(f"{name}: {reason}" for name, reason in selection.skipped),
            }
        )
    return rows


def _asked_for(op: str, backend: str | None) -> str:
    """The backend named for this op by the argument or the environment."""
    text = backend if backend not in (None, "auto") else os.environ.get(ENVIRONMENT, "auto")
    general = "auto"
    for part in (text or "auto").split(","):
        name, _, value = part.strip().rpartition("=")
        if value not in ("auto", *BACKENDS) or (name and name not in _REGISTRY):
            raise KernelUnavailable(
                f"{ENVIRONMENT}: {part.strip()!r} is not known; use auto, {', '.join(BACKENDS)}, "
                f"or OP=BACKEND with an op of {', '.join(ops())}"
            )
        if name == op:
            return value
        if not name:
            general = value
    return general


# The fused ops are those of the CUDA network; elsewhere the network is made of the separate ones.
_CUDA_OPS: Final = (
    "add_rms_norm",
    "advance_decode",
    "commit_step",
    "decode_attention",
    "embedding",
    "gather_step",
    "paged_attention",
    "rotary_store_kv",
    "sample_tokens",
    "scatter_words",
    "silu_mul",
    "skinny_linear",
    "token_bitmask",
)


# CPU kernels serve deterministic mode too: a row's bits never depend on the rows beside it.
_CPU_OPS: Final = {
    "decoder_stack": (
        "finback.kernels.decoder_stack.cpu_driver",
        "one compiled call a step; 4-bit weights stay 4-bit",
    ),
    "sample_tokens": (
        "finback.kernels.sample_tokens.cpu_sample",
        "one compiled call for all rows; no sort, noise only where it can win",
    ),
}


def _register_all() -> None:
    for op, (module, why) in _CPU_OPS.items():
        register(
            Implementation(
                op=op,
                backend="cpu",
                module=module,
                devices=("cpu",),
                modes=("fast", "deterministic"),
                why=why,
            )
        )
    register(
        Implementation(
            op="decoder_stack",
            backend="reference",
            module="finback.kernels.decoder_stack.reference",
            devices=("*",),
            modes=("fast", "reference"),  # float32 products of torch change with the row count
            why="one kernel an op, called by the layered network",
        )
    )
    for op in _CUDA_OPS:
        register(
            Implementation(
                op=op,
                backend="cuda",
                module=f"finback.kernels.{op}.cuda_triton",
                devices=("cuda",),
                modes=("fast",),
                why="Triton on an NVIDIA device",
            )
        )
    for op in (
        "add_rms_norm",
        "advance_decode",
        "commit_step",
        "decode_attention",
        "embedding",
        "gather_step",
        "linear",
        "paged_attention",
        "rms_norm",
        "rotary",
        "rotary_store_kv",
        "sample_tokens",
        "scatter_words",
        "silu_mul",
        "skinny_linear",
        "store_kv",
        "store_window",
        "token_bitmask",
        "window_attention",
    ):
        register(
            Implementation(
                op=op,
                backend="reference",
                module=f"finback.kernels.{op}.reference",
                devices=("*",),
                modes=MODES,
                why="plain torch, the truth",
            )
        )


_register_all()
