"""Is a value a JSON Schema: every keyword has a value of its kind. The first fault is named."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from finback.services.sampler.regex_form import check_regex
from finback.services.sampler.schema_fault import SchemaFault, child
from finback.services.sampler.schema_walk import MANY, NAMED, ONE

TYPES: Final = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})


def check_form(schema: Any, dialect: int) -> None:
    """Raises `SchemaFault`. Depth must have been bounded before."""
    todo: list[tuple[str, Any]] = [("#", schema)]
    while todo:
        at, found = todo.pop()
        if isinstance(found, bool):
            continue
        if not isinstance(found, dict):
            raise SchemaFault(
                "a schema must be an object or a boolean", pointer=at, reason=_last(at)
            )
        for keyword, value in found.items():
            _check(keyword, value, child(at, keyword), dialect)
            todo += _schemas(keyword, value, child(at, keyword))


def _last(pointer: str) -> str:
    return pointer.rsplit("/", 1)[-1] if "/" in pointer else "schema"


def _check(keyword: str, value: Any, at: str, dialect: int) -> None:
    if keyword == "pattern" and isinstance(value, str):
        check_regex(value, pointer=at)
    if keyword == "patternProperties" and isinstance(value, dict):
        for name in value:
            check_regex(name, pointer=child(at, name))
    if keyword in ("exclusiveMinimum", "exclusiveMaximum") and dialect == 4:
        ok, wanted = isinstance(value, bool), "a boolean (draft 4)"
    elif keyword in _RULES:
        is_right, wanted = _RULES[keyword]
        ok = is_right(value)
    elif keyword == "items" and isinstance(value, list):
        ok, wanted = dialect < 2020, "a schema; for a list of them there is prefixItems"
    elif keyword in ONE or keyword in MANY or keyword in NAMED:
        ok, wanted = _holds_schemas(keyword, value)
    else:
        return
    if not ok:
        shown = json.dumps(value)[:60]
        raise SchemaFault(f"{keyword} must be {wanted}, not {shown}", pointer=at, reason=keyword)


def _holds_schemas(keyword: str, value: Any) -> tuple[bool, str]:
    if keyword in ONE:
        return isinstance(value, dict | bool), "a schema"
    if keyword in MANY:
        return isinstance(value, list) and bool(value), "a non-empty list of schemas"
    return isinstance(value, dict), "an object of schemas"


def _schemas(keyword: str, value: Any, at: str) -> list[tuple[str, Any]]:
    if keyword in NAMED:
        skips_lists = keyword == "dependencies"
        return [
            (child(at, name), item)
            for name, item in value.items()
            if not (skips_lists and isinstance(item, list))
        ]
    if keyword in MANY and isinstance(value, list):
        return [(child(at, index), item) for index, item in enumerate(value)]
    return [(at, value)] if keyword in ONE else []


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_enum(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_dependent(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_names(names) for names in value.values())


_Rule = tuple[Callable[[Any], bool], str]
_RULES: Final[Mapping[str, _Rule]] = {
    "type": (_is_type, f"one or several of {', '.join(sorted(TYPES))}"),
    "required": (_is_names, "a list of names"),
    "enum": (_is_enum, "a non-empty list"),
    "dependentRequired": (_is_dependent, "an object of lists of names"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "uniqueItems": (lambda value: isinstance(value, bool), "a boolean"),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (_is_number, "a number")
    ),
    **dict.fromkeys(
        (
            "maxItems", "minItems", "maxLength", "minLength", "maxProperties", "minProperties",
            "maxContains", "minContains",
        ),
        (_is_count, "an integer from 0"),
    ),
    **dict.fromkeys(
        ("$id", "$ref", "$anchor", "$dynamicRef", "$dynamicAnchor", "format", "pattern"),
        (lambda value: isinstance(value, str), "a string"),
    ),
}  # fmt: skip
