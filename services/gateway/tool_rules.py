"""What every API demands of the tools that it is given, with the field to blame."""

import re
from collections.abc import Iterable
from typing import Any, Final

from finback.services.gateway.tool_schema import schema_fault
from finback.shared.errors import InvalidRequest

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


def invalid_value(param: str, wanted: str) -> InvalidRequest:
    """The field `param` is not what it must be."""
    return InvalidRequest(
        f"Invalid value for '{param}': it must be {wanted}.", param=param, reason="invalid_value"
    )


def unsupported(param: str, text: str) -> InvalidRequest:
    """The field asks for what is not served here."""
    return InvalidRequest(
        f"Unsupported value for '{param}': {text}.", param=param, reason="unsupported_value"
    )


def missing(param: str) -> InvalidRequest:
    """A field that has to be there is not."""
    return InvalidRequest(
        f"Missing required parameter: '{param}'.", param=param, reason="missing_required_parameter"
    )


def check_name(name: str, param: str, max_chars: int) -> None:
    """Letters, digits, underscores and dashes, at most `max_chars`."""
    if not _NAME.fullmatch(name) or len(name) > max_chars:
        raise invalid_value(
            param, f"1 to {max_chars} letters, digits, underscores or dashes (a-z, A-Z, 0-9, _, -)"
        )


def check_unique(named: Iterable[tuple[str, str]]) -> None:
    """`named`: (name, where it stands); one that comes again is refused where it does."""
    first: dict[str, str] = {}
    for name, param in named:
        if name in first:
            raise invalid_value(param, f"another name: '{name}' is taken by '{first[name]}'")
        first[name] = param


def check_parameters(schema: Any, param: str) -> None:
    """A JSON Schema of an object."""
    if not isinstance(schema, dict):
        raise invalid_value(param, "a JSON Schema of type 'object'")
    kind = schema.get("type", "object")
    if kind != "object":
        raise invalid_value(param, f"a JSON Schema of type 'object', not {str(kind)[:40]!r}")
    fault = schema_fault(schema, param)
    if fault is not None:
        # The path to the tool's schema is the field; what is inside it is told beside it.
        raise InvalidRequest(
            f"Invalid schema for '{param}': '{fault[0]}' must be {fault[1]}.",
            param=param,
            reason="invalid_function_parameters",
        )
