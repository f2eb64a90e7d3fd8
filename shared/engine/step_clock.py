"""Steps of an engine as spans: its times are monotonic, spans are on the wall clock."""

import time
from typing import Any

from finback.shared.clock import monotonic_s
from finback.shared.engine.output import PromptChunk, StepOutput
from finback.shared.telemetry import tracing


class StepClock:
    """Turns a step's times into wall-clock nanoseconds."""

    def __init__(self) -> None:
        self._offset_s = time.time() - monotonic_s()

    def times_ns(self, output: StepOutput) -> tuple[int, int]:
        """When the step began and ended."""
        start_ns = int((output.started_s + self._offset_s) * 1e9)
        return start_ns, start_ns + int(output.duration_ms * 1e6)

    def record_chunk(self, output: StepOutput, chunk: PromptChunk, parent: Any) -> None:
        """A `prefill chunk` span: the part of a step that computed tokens of one prompt."""
        attributes = {
            tracing.REQUEST_ID: chunk.key[0],
            "finback.choice": chunk.key[1],
            "finback.start": chunk.start,
            "finback.num_tokens": chunk.num_tokens,
            "finback.num_rows": output.num_rows,
        }
        tracing.record_span("prefill chunk", *self.times_ns(output), parent, attributes)
