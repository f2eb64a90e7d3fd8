"""What a worker process hosts: roles that share one engine."""

from typing import ClassVar, Protocol, runtime_checkable

from finback.shared.engine.output import StepOutput
from finback.shared.wire.messages.generate import GenerationSpec


class Role(Protocol):
    """One role of a worker: `prefill` or `decode`. All methods run on the event loop."""

    name: ClassVar[str]

    async def start(self) -> None:
        """The engine runs; add endpoints, spawn loops."""

    def on_step(self, output: StepOutput) -> None:
        """One engine step's results; must not block."""

    async def drain(self) -> None:
        """Take nothing new; return when what is open has ended."""

    async def stop(self) -> None:
        """Tell whoever still waits, and release everything."""

    @property
    def num_open(self) -> int:
        """Generations in hand."""

    @property
    def num_queued(self) -> int:
        """Of these, the ones that wait and that the engine does not count as waiting."""


@runtime_checkable
class FullSequences(Protocol):
    """What the prefill role asks of a decode role in the same process: no hand-over is needed."""

    async def add_full(self, spec: GenerationSpec, token_ids: bytes, timeout_s: float) -> None:
        """Generate from this prompt (int32 LE); raises the refusal."""

    async def cancel(self, request_id: str, attempt: int, choice: int | None) -> bool:
        """End it, free its blocks; True if it was here."""
