"""Is a value a JSON Schema: a check of its form, to the path of the first fault.

Only what would be wrong in any dialect is refused; keywords that are unknown here mean nothing.
Whether a schema can be *enforced* is the sampler's verdict.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

_TYPES: Final = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_ONE: Final = frozenset(
    {"additionalProperties", "contains", "else", "if", "not", "propertyNames", "then"}
)
_MANY: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED: Final = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
_COUNTS: Final = frozenset(
    {"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"}
)
_TEXTS: Final = frozenset({"$id", "$ref", "description", "format", "pattern", "title"})
Fault = tuple[str, str]


def schema_fault(schema: Any, path: str) -> Fault | None:
    """(path, what it must be) of the first fault; None: it is a schema."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return path, "a JSON Schema: an object or a boolean"
    for keyword, value in schema.items():
        fault = _keyword_fault(keyword, value, f"{path}.{keyword}")
        if fault is not None:
            return fault
    return None


def _keyword_fault(keyword: str, value: Any, path: str) -> Fault | None:
    if keyword in _ONE:
        return schema_fault(value, path)
    if keyword == "items":
        return _list_fault(value, path) if isinstance(value, list) else schema_fault(value, path)
    if keyword in _MANY:
        return _list_fault(value, path) if value else (path, "a non-empty list of schemas")
    if keyword in _NAMED:
        return _named_fault(value, path)
    simple = _SIMPLE.get(keyword)
    if simple is not None and not simple[0](value):
        return path, simple[1]
    return None


def _list_fault(value: Any, path: str) -> Fault | None:
    if not isinstance(value, list):
        return path, "a list of schemas"
    for index, item in enumerate(value):
        fault = schema_fault(item, f"{path}.{index}")
        if fault is not None:
            return fault
    return None


def _named_fault(value: Any, path: str) -> Fault | None:
    if not isinstance(value, dict):
        return path, "an object of schemas"
    for name, item in value.items():
        fault = schema_fault(item, f"{path}.{name}")
        if fault is not None:
            return fault
    return None


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and (
        (isinstance(value, int) and value >= 0) or (isinstance(value, float) and value >= 0)
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_SIMPLE: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "type": (_is_type, f"one or several of {', '.join(sorted(_TYPES))}"),
    "required": (_is_names, "a list of names"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a non-empty list"),
    **dict.fromkeys(_COUNTS, (_is_count, "a number from 0")),
    **dict.fromkeys(_TEXTS, (_is_text, "a string")),
}
