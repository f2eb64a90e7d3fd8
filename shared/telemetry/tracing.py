"""Spans: made here, carried in W3C headers, written to a local file or sent by OTLP.

Nothing is recorded before `setup`, and every helper then costs next to nothing. Span names hold a
verb and a subject pattern, never a request id: ids are attributes (`finback.request_id`).
"""

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from finback.shared.errors import ServingError
from finback.shared.wire import headers as h

REQUEST_ID: Final = "finback.request_id"
# The W3C recommendation asks to carry at least 512; more than this is dropped, not passed on.
_MAX_TRACESTATE: Final = 512

_propagator = TraceContextTextMapPropagator()
_tracer: trace.Tracer = trace.NoOpTracer()
_provider: Any = None


def setup(
    service: str,
    instance: str,
    *,
    trace_dir: str = "",
    otlp_endpoint: str = "",
    sample: float = 1.0,
    max_file_bytes: int = 16 * 2**20,
) -> None:
    """Record spans from here on. Raises `ConfigError` if OTLP is asked for and not installed."""
    from finback.shared.telemetry import exporters  # the SDK: only where spans are recorded

    global _tracer, _provider
    shutdown()
    _provider = exporters.provider(
        service,
        instance,
        trace_dir=trace_dir,
        otlp_endpoint=otlp_endpoint,
        sample=sample,
        max_file_bytes=max_file_bytes,
    )
    _tracer = _provider.get_tracer("finback")


def shutdown() -> None:
    """Write out what is pending and stop recording."""
    global _tracer, _provider
    provider, _provider, _tracer = _provider, None, trace.NoOpTracer()
    if provider is not None:
        provider.shutdown()


def flush(timeout_s: float = 5.0) -> None:
    """Write out what is pending."""
    if _provider is not None:
        _provider.force_flush(int(timeout_s * 1000))


def is_recording() -> bool:
    """Whether `setup` was called."""
    return _provider is not None


@contextlib.contextmanager
def span(
    name: str,
    attrs: Mapping[str, Any] | None = None,
    *,
    parent: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    **more: Any,
) -> Iterator[Span]:
    """Time a block of code as a child of `parent`, or of the current span.

    A `ServingError` marks the span with its code, another exception with its type's name.
    """
    attributes = {**(attrs or {}), **more}
    started = _tracer.start_span(name, context=parent, kind=kind, attributes=attributes)
    base = parent if parent is not None else otel_context.get_current()
    token = otel_context.attach(trace.set_span_in_context(started, base))
    try:
        yield started
    except BaseException as error:
        code = error.code if isinstance(error, ServingError) else type(error).__name__
        started.set_attribute("error.type", code)
        started.set_status(Status(StatusCode.ERROR, code))
        raise
    finally:
        otel_context.detach(token)
        started.end()


def start_span(
    name: str,
    attrs: Mapping[str, Any] | None = None,
    *,
    parent: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    start_ns: int | None = None,
) -> Span:
    """A span that the caller ends with `.end()`; it does not become the current one."""
    return _tracer.start_span(
        name, context=parent, kind=kind, attributes=dict(attrs or {}), start_time=start_ns
    )


def record_span(
    name: str,
    start_ns: int,
    end_ns: int,
    parent: Context | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> None:
    """Record a range measured elsewhere (`time.time_ns()`), e.g. a run of decode steps."""
    if _provider is None:
        return
    start_span(name, attrs, parent=parent, start_ns=start_ns).end(end_ns)


def annotate(**attrs: Any) -> None:
    """Set attributes of the current span; double underscores in names stand for dots."""
    span_now = trace.get_current_span()
    for key, value in attrs.items():
        span_now.set_attribute(key.replace("__", "."), value)


def current() -> Context:
    """The context of the running code, to be kept with work that is done later elsewhere."""
    return otel_context.get_current()


def span_id(context: Context) -> int:
    """The span in a context that was kept; 0: none."""
    return trace.get_current_span(context).get_span_context().span_id


def add_event(name: str, attrs: Mapping[str, Any]) -> None:
    """A point in the current span: for what happens too often for a span of its own."""
    span_now = trace.get_current_span()
    if span_now.is_recording():
        span_now.add_event(name, attrs)


def add_up(numbers: Mapping[str, float]) -> None:
    """Add to attributes of the current span: sums of what happens too often even for events."""
    span_now = trace.get_current_span()
    if span_now.is_recording():
        before: Mapping[str, Any] = getattr(span_now, "attributes", None) or {}
        span_now.set_attributes({name: before.get(name, 0) + n for name, n in numbers.items()})


def context_of(span: Span) -> Context:
    """A context in which `span` is the parent."""
    return trace.set_span_in_context(span, Context())


def trace_id() -> str:
    """The current trace's id in hex, or empty."""
    found = trace.get_current_span().get_span_context()
    return f"{found.trace_id:032x}" if found.is_valid else ""


def inject(headers: MutableMapping[str, str], context: Context | None = None) -> None:
    """Write `traceparent` (and a `tracestate` of sane size) of the current span, if there is one."""
    _propagator.inject(headers, context=context)
    if len(headers.get(h.TRACESTATE, "")) > _MAX_TRACESTATE:
        del headers[h.TRACESTATE]


def extract(headers: Mapping[str, str]) -> Context | None:
    """The caller's context; None if there is none or it is malformed (then a new trace begins)."""
    found = _get(headers, h.TRACEPARENT)
    if found is None:
        return None
    carrier = {h.TRACEPARENT: found}
    state = _get(headers, h.TRACESTATE)
    if state is not None and len(state) <= _MAX_TRACESTATE:
        carrier[h.TRACESTATE] = state
    context = _propagator.extract(carrier, context=Context())
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def _get(headers: Mapping[str, str], name: str) -> str | None:
    if name in headers:
        return headers[name]
    return headers.get(name.title())
