"""Bytes that go between memory and files: counted and timed alike in both directions."""

from typing import Final

from finback.shared.telemetry.metrics import Metrics

FROM_FILES: Final = "file_to_host"
TO_FILES: Final = "host_to_file"


def note_transfer(
    metrics: Metrics, direction: str, num_bytes: int, span_ns: tuple[int, int]
) -> None:
    """One batch: payload bytes, and when its thread began and ended (ns); (0, 0): it never ran."""
    started, ended = span_ns
    if ended:
        metrics.count("finback.cache.transferred_bytes", num_bytes, direction=direction)
        seconds = max(0, ended - started) / 1e9
        metrics.observe("finback.cache.transfer_duration", seconds, direction=direction)
