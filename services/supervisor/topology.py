"""Which services a stack has, in which order they start, and what each is given."""

from dataclasses import dataclass
from typing import Final, Literal

Layout = Literal["cohost", "separate"]

# Under this many cores two engine processes only take each other's time.
MIN_CORES_TO_SEPARATE: Final = 4

# As people read them: from where a request comes in to who is asked last.
ROLES: Final = ("gateway", "router", "prefill", "decode", "cache", "sampler", "drafter")
TORCH_FREE: Final = ("cache", "sampler", "drafter", "router", "gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process of the stack. `roles` are the service names it answers for on the bus."""

    name: str
    module: str
    roles: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    is_engine: bool = False
    num_threads: int = 1

    @property
    def user(self) -> str:
        """By whose credentials it is on the bus: its service's, whatever its own name."""
        return self.module.rpartition(".")[2]


def choose_layout(asked: str, num_cores: int) -> Layout:
    """`auto` co-hosts prefill and decode on a small machine and separates them elsewhere."""
    if asked == "cohost":
        return "cohost"
    if asked == "separate":
        return "separate"
    return "separate" if num_cores >= MIN_CORES_TO_SEPARATE else "cohost"


def plan(
    layout: Layout, num_cores: int, num_threads: int = 0, *, num_decodes: int = 1
) -> tuple[ProcessSpec, ...]:
    """The processes in starting order: engines first, since they take longest to load.

    `num_decodes`: processes with the decode role; streams of one that dies go on in another.

    `num_threads` 0 gives every engine all cores: prefill and decode of one request alternate,
    and idle threads wait passively, so that neither takes the other's core while it waits. Where both
    have work decode goes first: a prefill process lowers its own priority (`worker_host.run`).
    """
    threads = num_threads or num_cores
    engines: tuple[tuple[str, tuple[str, ...]], ...] = (("decode", ("prefill", "decode")),)
    if layout == "separate":
        engines = (("decode", ("decode",)), ("prefill", ("prefill",)))
    decode_roles = engines[0][1]
    engines += tuple((f"decode{at}", decode_roles) for at in range(2, num_decodes + 1))
    specs = [_engine(name, roles, threads) for name, roles in engines]
    specs += [
        ProcessSpec(name=name, module=f"finback.services.{name}", roles=(name,))
        for name in TORCH_FREE
    ]
    return tuple(specs)


def _engine(name: str, roles: tuple[str, ...], threads: int) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        module=f"finback.services.{name.rstrip('0123456789')}",
        roles=roles,
        arguments=("--roles", ",".join(roles)),
        is_engine=True,
        num_threads=threads,
    )


def thread_environment(spec: ProcessSpec) -> dict[str, str]:
    """Environment that keeps libraries' threads within budget and off the cores while idle."""
    threads = str(spec.num_threads)
    return {
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": threads,
        "NUMBA_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        # Small arenas: threads of torch-free services would else reserve 64 MB of heap each.
        "MALLOC_ARENA_MAX": "2" if not spec.is_engine else "4",
    }
