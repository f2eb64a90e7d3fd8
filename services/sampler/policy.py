"""Pure: which engine compiles a grammar, and where its sequences' masks are computed.

A `shared` worker serves many grammars, so only those go there that are compiled again in a moment
and whose masks come at once. Any other grammar stays in the worker that compiled it, its `own`, where
it can hold up nobody else. One that was found to be slow later is moved there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Placement = Literal["shared", "own"]

MAX_SHARED_LOAD_MS: Final = 5.0
MAX_SHARED_MASK_MS: Final = 3.0
MAX_SHARED_BYTES: Final = 8 * 2**20
# New sequences of a grammar go to another worker from here on.
MAX_SEQUENCES_TOGETHER: Final = 16
ENGINE: Final = "llguidance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What compiling, loading and a short walk took (`compiler`). `was_slow`: a mask stalled once."""

    compile_ms: float
    load_ms: float
    max_mask_ms: float
    num_bytes: int
    was_slow: bool = False


def engine_of(kind: str) -> str:
    """The engine for a kind of grammar. There is one, which takes all kinds."""
    return ENGINE


def placement_of(measured: Measured) -> Placement:
    """Where a grammar's masks are computed."""
    is_quick = (
        measured.load_ms <= MAX_SHARED_LOAD_MS
        and measured.max_mask_ms <= MAX_SHARED_MASK_MS
        and measured.num_bytes <= MAX_SHARED_BYTES
        and not measured.was_slow
    )
    return "shared" if is_quick else "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A shared worker as a new sequence of some grammar sees it."""

    num_sequences: int
    num_of_grammar: int
    has_grammar: bool


def choose_worker(loads: Sequence[WorkerLoad]) -> int:
    """The index of the shared worker for a new sequence.

    One that has the grammar and few of its sequences, the fullest such, so that a grammar is loaded
    into as few workers as its sequences need; else the one with the fewest sequences.
    """
    together = [
        index
        for index, load in enumerate(loads)
        if load.has_grammar and load.num_of_grammar < MAX_SEQUENCES_TOGETHER
    ]
    if together:
        return max(together, key=lambda index: (loads[index].num_of_grammar, -index))
    return min(range(len(loads)), key=lambda index: (loads[index].num_sequences, index))


Verdict = Literal["fine", "slow", "stuck"]

SLOW_CPU_S: Final = 0.015
SLOW_WALL_S: Final = 0.5
STUCK_CPU_S: Final = 1.0
STUCK_WALL_S: Final = 10.0


def judge(cpu_s: float, wall_s: float, placement: Placement) -> Verdict:
    """A worker that has been at one row for so long.

    In a shared worker it holds up others, so it counts as slow early; in its own it may take its
    time up to the budget. Processor time decides, so that a busy machine convicts nobody.
    """
    if cpu_s >= STUCK_CPU_S or wall_s >= STUCK_WALL_S:
        return "stuck"
    if placement == "shared" and (cpu_s >= SLOW_CPU_S or wall_s >= SLOW_WALL_S):
        return "slow"
    return "fine"
