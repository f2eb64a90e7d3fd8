"""A line on stderr that says how far a call is."""

import sys
from typing import TextIO

from finback.shared.clock import monotonic_s
from finback.shared.offline.job import Job


class Progress:
    """Written again whenever `show` is called; `close` ends the line."""

    def __init__(self, job: Job, out: TextIO | None = None) -> None:
        self._job = job
        self._out = sys.stderr if out is None else out
        self._started_s = monotonic_s()

    def show(self) -> None:
        """Write the line anew."""
        took_s = max(monotonic_s() - self._started_s, 1e-6)
        job = self._job
        line = (
            f"{job.num_ended}/{job.num_prompts} prompts, {job.num_tokens} tokens, "
            f"{job.num_tokens / took_s:.0f} tokens/s"
        )
        self._out.write(f"\r{line:<60}")
        self._out.flush()

    def close(self) -> None:
        """The call is over."""
        self.show()
        self._out.write("\n")
