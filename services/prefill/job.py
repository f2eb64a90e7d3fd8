"""One prompt on its way through prefill."""

from dataclasses import dataclass, field
from typing import Any

import anyio

from finback.services.prefill.split import Split
from finback.shared.clock import monotonic_s
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.wire.messages.generate import GenerationSpec
from finback.shared.wire.messages.prefill import PrefillRequest


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """`num_computed`: prompt tokens whose KV the engine has; `scope` cancels the work.

    `hashes`: of the full blocks of what is known, once they were needed. `sequence`: as
    the engine got it.
    `parent` is the trace context that the request came with. `blamed`: the instance that a failure
    is put down to, when it is not this one.
    """

    request: PrefillRequest
    deadline_s: float
    parent: Any = None
    prompt: bytes = b""
    hashes: tuple[bytes, ...] = ()
    sequence: SequenceSpec | None = None
    split: Split | None = None
    num_cached: int = 0
    num_computed: int = 0
    is_in_engine: bool = False
    blamed: str = ""
    progress: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    done: anyio.Event = field(default_factory=anyio.Event)

    @property
    def spec(self) -> GenerationSpec:
        """What is to be generated."""
        return self.request.spec

    @property
    def key(self) -> tuple[str, int]:
        """How the engine knows it: the choice that goes through the hand-over."""
        return (self.spec.request_id, self.spec.choices[0].index)

    def remaining_s(self) -> float:
        """Time left, never below 0."""
        return max(0.0, self.deadline_s - monotonic_s())

    def advance(self, num_computed: int) -> None:
        """The engine has come this far."""
        self.num_computed = max(self.num_computed, num_computed)
        progress, self.progress = self.progress, anyio.Event()
        progress.set()
