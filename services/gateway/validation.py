"""A parsed body to a checked request; the first fault becomes a 400 that names its field."""

from typing import Any, Final, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from finback.services.gateway.schema import NEUTRAL_ONLY, NO_EFFECT, Model
from finback.shared.errors import InvalidRequest

R = TypeVar("R", bound=Model)

# What pydantic adds to the path for the branches of a union.
_BRANCHES: Final = frozenset({"str", "int", "float", "bool", "dict", "none", "constrained-str"})


def check(body: dict[str, Any], request_type: type[R]) -> R:
    """Validate `body`; fields without effect are dropped, null counts as absent."""
    fields = {
        name: value for name, value in body.items() if not _is_dropped(name, value, request_type)
    }
    try:
        return request_type.model_validate(fields)
    except ValidationError as error:
        raise _to_invalid(error) from None


def _is_dropped(name: str, value: Any, request_type: type[Model]) -> bool:
    if name in request_type.model_fields:
        return False
    if name in NO_EFFECT:
        return True
    if name not in NEUTRAL_ONLY:
        return value is None
    neutral, why = NEUTRAL_ONLY[name]
    if value is None or value in neutral:
        return True
    raise InvalidRequest(
        f"Unsupported parameter: '{name}' is not supported here with this value; {why}.",
        param=name,
        reason="unsupported_parameter",
    )


def _to_invalid(error: ValidationError) -> InvalidRequest:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    # Of the branches of a union, the one that went deepest is the one that was meant; one that
    # only found too many items fits best of all.
    found = max(details, key=lambda detail: (detail["type"] == "too_long", len(_path(detail))))
    path = _path(found)
    param = ".".join(map(str, path))
    if found["type"] == "extra_forbidden":
        message = f"Unrecognized request argument supplied: {param}"
        return InvalidRequest(message, param=param, reason="unknown_parameter")
    if found["type"] == "missing":
        message = f"Missing required parameter: '{param}'."
        return InvalidRequest(message, param=param, reason="missing_required_parameter")
    same = [_sentence(detail) for detail in details if _path(detail) == path]
    message = f"Invalid value for '{param}': {', or '.join(dict.fromkeys(same))}."
    return InvalidRequest(message, param=param, reason="invalid_value")


def _path(detail: ErrorDetails) -> tuple[str | int, ...]:
    return tuple(
        part
        for part in detail["loc"]
        if isinstance(part, int) or (part not in _BRANCHES and "[" not in part)
    )


def _sentence(detail: ErrorDetails) -> str:
    message = detail["msg"]
    return message[0].lower() + message[1:]
