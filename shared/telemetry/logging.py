"""JSON log lines on stderr, with service, request and trace ids where there are any."""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog
from opentelemetry import trace

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def setup(service: str, instance: str, level: str = "info") -> None:
    """Log as JSON from here on, other libraries' warnings included."""
    _configure(level)
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(service=service, instance=instance)
    root = logging.getLogger()
    root.handlers = [_Forward()]
    root.setLevel(logging.WARNING)


def _configure(level: str) -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _add_trace,
            structlog.processors.format_exc_info,  # without locals: they hold prompts
            structlog.processors.JSONRenderer(default=repr),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        # Looked up at each line: tests and daemons exchange sys.stderr.
        logger_factory=lambda *args: structlog.WriteLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> Any:
    """A structured logger: `log.info("event", key=value)`."""
    return structlog.get_logger(module=name)


def bind(**values: Any) -> None:
    """Add values to every further line of this task and its children, e.g. `request_id`."""
    structlog.contextvars.bind_contextvars(**values)


def _add_trace(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = f"{context.trace_id:032x}"
    return event


class _Forward(logging.Handler):
    """Passes records of the standard library's loggers on."""

    def emit(self, record: logging.LogRecord) -> None:
        log = get_logger(record.name)
        values = {"exc_info": record.exc_info} if record.exc_info else {}
        log.log(record.levelno, record.getMessage(), **values)


def reset() -> None:
    """As outside a service: stderr, warnings and worse."""
    structlog.contextvars.clear_contextvars()
    _configure("warning")


reset()
