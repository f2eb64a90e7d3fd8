"""A parsed body to a checked request; the first fault becomes a 400 that names its field."""

from typing import Any, Final, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from finback.services.gateway.schema import OPENAI_RULES, FieldRules, Model
from finback.shared.errors import InvalidRequest

R = TypeVar("R", bound=Model)

# What pydantic adds to the path for the branches of a union.
_BRANCHES: Final = frozenset({"str", "int", "float", "bool", "dict", "none", "constrained-str"})


def check(body: dict[str, Any], request_type: type[R], rules: FieldRules = OPENAI_RULES) -> R:
    """Validate `body`; fields without effect are dropped, null counts as absent."""
    known = request_type.model_fields
    fields = {
        name: value
        for name, value in body.items()
        if name in known or not _is_dropped(name, value, rules)
    }
    try:
        return request_type.model_validate(fields)
    except ValidationError as error:
        raise _to_invalid(error, rules) from None


def _is_dropped(name: str, value: Any, rules: FieldRules) -> bool:
    if name in rules.no_effect:
        return True
    if name not in rules.neutral_only:
        return value is None
    neutral, why = rules.neutral_only[name]
    if value is None or value in neutral:
        return True
    raise InvalidRequest(
        f"Unsupported parameter: '{name}' is not supported here with this value; {why}.",
        param=name,
        reason="unsupported_parameter",
    )


def _to_invalid(error: ValidationError, rules: FieldRules) -> InvalidRequest:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    # Of the branches of a union, the one that went deepest is the one that was meant; one that
    # only found too many items fits best of all.
    found = max(details, key=lambda detail: (detail["type"] == "too_long", len(_path(detail))))
    path = _path(found)
    param = ".".join(map(str, path))
    if found["type"] == "extra_forbidden":
        message = rules.unknown.format(param=param)
        return InvalidRequest(message, param=param, reason="unknown_parameter")
    if found["type"] == "missing":
        message = rules.missing.format(param=param)
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
