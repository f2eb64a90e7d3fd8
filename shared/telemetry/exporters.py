"""The OpenTelemetry SDK: provider, sampling, and where spans go. Imported by `tracing.setup` only."""

import contextlib
import importlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from finback.shared.errors import ConfigError

_KEPT_FILES = 8  # of earlier starts of a service
_BATCH_DELAY_MS = 200  # `finback trace last` is asked right after an answer


def provider(
    service: str,
    instance: str,
    *,
    trace_dir: str,
    otlp_endpoint: str,
    sample: float,
    max_file_bytes: int,
) -> TracerProvider:
    """A provider whose spans go to OTLP if there is an endpoint, else to a file in `trace_dir`."""
    made = TracerProvider(
        # A caller's sampled flag decides; the ratio is for traces that begin here.
        sampler=ParentBased(TraceIdRatioBased(sample)),
        resource=Resource(
            {"service.name": service, "service.instance.id": instance, "service.version": "0.1.0"}
        ),
        shutdown_on_exit=False,
    )
    exporter: SpanExporter | None = None
    if otlp_endpoint:
        exporter = _otlp(otlp_endpoint)
    elif trace_dir:
        exporter = FileSpanExporter(
            Path(trace_dir) / f"{instance}.jsonl", service, instance, max_bytes=max_file_bytes
        )
    if exporter is not None:
        made.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=8192, schedule_delay_millis=_BATCH_DELAY_MS)
        )
    return made


def _otlp(endpoint: str) -> SpanExporter:
    try:
        # An optional package: looked up by name so that type checks do not depend on it.
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError:
        raise ConfigError(
            "otlp_endpoint is set but the exporter is missing: pip install 'finback[otlp]'"
        ) from None
    base = endpoint.rstrip("/")
    url = base if base.endswith("/v1/traces") else f"{base}/v1/traces"
    exporter: SpanExporter = otlp.OTLPSpanExporter(endpoint=url)
    return exporter


class FileSpanExporter(SpanExporter):
    """One JSON object a span in `<instance>.jsonl`; a full file becomes `<instance>.1.jsonl`.

    So at most twice `max_bytes` are kept a process. Write errors (a full disk) lose spans, never
    requests.
    """

    def __init__(self, path: Path, service: str, instance: str, *, max_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _prune(path.parent, service)
        self._path = path
        self._who = {"service": service, "instance": instance}
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(self._record(span), default=str) + "\n" for span in spans)
        try:
            with self._lock:
                self._append(lines.encode())
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def _append(self, data: bytes) -> None:
        # Spans tell of requests: for the owner's eyes only, as all of the run folder.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o600)
        try:
            if os.fstat(file).st_size + len(data) > self._max_bytes:
                os.replace(self._path, self._path.with_suffix(".1.jsonl"))
                os.close(file)
                file = os.open(self._path, flags, 0o600)
            os.write(file, data)
        finally:
            os.close(file)

    def _record(self, span: ReadableSpan) -> dict[str, Any]:
        context = span.get_span_context()
        return {
            "name": span.name,
            "trace_id": f"{context.trace_id:032x}" if context else "",
            "span_id": f"{context.span_id:016x}" if context else "",
            "parent_id": f"{span.parent.span_id:016x}" if span.parent else "",
            "start_ns": span.start_time or 0,
            "end_ns": span.end_time or 0,
            "kind": span.kind.name.lower(),
            "status": span.status.status_code.name.lower(),
            "attributes": dict(span.attributes or {}),
            "events": [
                {"name": e.name, "time_ns": e.timestamp, "attributes": dict(e.attributes or {})}
                for e in span.events
            ],
            **self._who,
        }

    def shutdown(self) -> None:
        return

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def _prune(folder: Path, service: str) -> None:
    """Drop the oldest files of a service: each start writes under a name of its own."""
    written: list[tuple[float, Path]] = []
    for path in folder.glob(f"{service}-*.jsonl"):
        with contextlib.suppress(OSError):  # another start prunes as well
            written.append((path.stat().st_mtime, path))
    for _, path in sorted(written)[:-_KEPT_FILES]:
        path.unlink(missing_ok=True)
