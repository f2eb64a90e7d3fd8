"""The schema of everything that a schema does not let be, and: have two schemas a value in common.

Both are partial: None, or True, where the answer cannot be told or expressed.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final

from finback.services.sampler.schema_ends import ALL_TYPES, type_of, types_of

Resolve = Callable[[dict[str, Any]], Any]  # what a schema's `$ref` means

_MAX_DEPTH: Final = 6
_MAX_SPELLED: Final = 64  # characters and words of a complement of strings
# Keywords that say nothing about which values are right.
ANNOTATIONS: Final = frozenset(
    {
        "$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated",
        "description", "examples", "readOnly", "title", "writeOnly", "id",
    }
)  # fmt: skip
# keyword -> (type it speaks of, the keyword that says the opposite, what is added to its value)
_OPPOSITES: Final[Mapping[str, tuple[str, str, int]]] = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}

# keyword -> the only type that it says something of
_SPEAKS_OF: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("properties", "required", "additionalProperties", "patternProperties", "minProperties",
         "maxProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        "object",
    ),
    **dict.fromkeys(
        ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains",
         "minContains", "maxContains"),
        "array",
    ),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"
    ),
}  # fmt: skip


def negate(schema: Any, resolve: Resolve, depth: int = 0) -> Any:
    """The complement as a schema, or None."""
    if isinstance(schema, bool):
        return not schema
    if depth > _MAX_DEPTH:
        return None
    if "$ref" in schema:
        if set(schema) - {"$ref"} - ANNOTATIONS:
            return None
        return negate(resolve(schema), resolve, depth + 1)
    parts = []
    for keyword, value in schema.items():
        if keyword in ANNOTATIONS:
            continue
        part = _negated(keyword, value, schema, resolve, depth + 1)
        if part is None:
            return None
        parts.append(part)
    return any_of(parts)


def any_of(parts: list[Any]) -> Any:
    """A schema of what one of `parts` lets be."""
    parts = [part for part in parts if part is not False]
    if any(part is True or part == {} for part in parts):
        return True
    if len(parts) < 2:
        return parts[0] if parts else False
    return {"anyOf": parts}


def all_of(parts: list[Any]) -> Any:
    """A schema of what all of `parts` let be."""
    parts = [part for part in parts if part is not True and part != {}]
    if any(part is False for part in parts):
        return False
    if len(parts) < 2:
        return parts[0] if parts else True
    return {"allOf": parts}


def _negated(keyword: str, value: Any, schema: dict[str, Any], resolve: Resolve, depth: int) -> Any:
    """What breaks one keyword."""
    if keyword == "not":
        return value
    if keyword in ("anyOf", "allOf"):
        negated = [negate(part, resolve, depth) for part in value]
        if any(part is None for part in negated):
            return None
        return all_of(negated) if keyword == "anyOf" else any_of(negated)
    if keyword == "type":
        return _other_types(value)
    if keyword in ("const", "enum"):
        return _other_values([value] if keyword == "const" else value)
    if keyword == "required":
        return any_of([{"type": "object", "properties": {name: False}} for name in value])
    if keyword == "properties":
        return _broken_member(value, resolve, depth)
    if keyword in _OPPOSITES and not isinstance(value, bool):
        kind, opposite, added = _OPPOSITES[keyword]
        bound = value + added
        return False if added and bound < 0 else {"type": kind, opposite: bound}
    return None


def _other_types(value: Any) -> Any:
    names = value if isinstance(value, list) else [value]
    if "integer" in names and "number" not in names:
        return None  # numbers that are no integers cannot be said
    left = ALL_TYPES - set(names)
    return {"type": sorted(left)} if left else False


def _other_values(values: list[Any]) -> Any:
    """Everything but some scalars."""
    kinds = {type_of(value) for value in values}
    if kinds & {"object", "array"}:
        return None
    parts: list[Any] = []
    if ALL_TYPES - kinds:
        parts.append({"type": sorted(ALL_TYPES - kinds)})
    if "boolean" in kinds:
        left = [value for value in (True, False) if value not in _booleans(values)]
        parts += [{"enum": left}] if left else []
    if "number" in kinds:
        parts += _other_numbers([v for v in values if type_of(v) == "number"])
    if "string" in kinds:
        pattern = _other_strings([v for v in values if isinstance(v, str)])
        if pattern is None:
            return None
        parts.append({"type": "string", "pattern": pattern})
    return any_of(parts)


def _booleans(values: list[Any]) -> list[bool]:
    return [value for value in values if isinstance(value, bool)]


def _other_numbers(values: list[float]) -> list[Any]:
    """The ranges between them."""
    ordered = sorted(set(values))
    below = [{"type": "number", "exclusiveMaximum": ordered[0]}]
    between = [
        {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
        for low, high in itertools.pairwise(ordered)
    ]
    return [*below, *between, {"type": "number", "exclusiveMinimum": ordered[-1]}]


def _other_strings(values: list[str]) -> str | None:
    """An expression for all strings but some: they leave a word's path somewhere, or stop on it."""
    if sum(map(len, values)) > _MAX_SPELLED or any(ord(c) > 0xFFFF for v in values for c in v):
        return None
    prefixes = {value[:end] for value in values for end in range(len(value) + 1)} | {""}
    parts = []
    for prefix in sorted(prefixes):
        spelled = "".join(_spelled(char) for char in prefix)
        if prefix not in values:
            parts.append(f"{spelled}$")
        following = sorted({p[-1] for p in prefixes if p and p[:-1] == prefix})
        others = "".join(_spelled(char) for char in following)
        parts.append(f"{spelled}[^{others}]" if others else f"{spelled}[\\s\\S]")
    return f"^(?:{'|'.join(parts)})"


def _spelled(char: str) -> str:
    return char if char.isalnum() and char.isascii() else f"\\u{ord(char):04x}"


def _broken_member(properties: dict[str, Any], resolve: Resolve, depth: int) -> Any:
    parts = []
    for name, schema in properties.items():
        broken = negate(schema, resolve, depth)
        if broken is None:
            return None
        if broken is not False:
            parts.append({"type": "object", "properties": {name: broken}, "required": [name]})
    return any_of(parts)


def may_meet(
    one: Any, other: Any, resolve: Resolve, depth: int = 0, types: frozenset[str] = ALL_TYPES
) -> bool:
    """False only if no value of one of `types` is right by both."""
    if one is False or other is False:
        return False
    if one is True or other is True or depth > _MAX_DEPTH:
        return True

    def meet(ours: Any, theirs: Any) -> bool:
        return may_meet(ours, theirs, resolve, depth + 1, types)

    for first, second in ((one, other), (other, one)):
        if "$ref" in first and not meet(resolve(first), second):
            return False
        if not all(meet(part, second) for part in first.get("allOf") or ()):
            return False
        for keyword in ("anyOf", "oneOf"):
            branches = first.get(keyword)
            if branches and not any(meet(branch, second) for branch in branches):
                return False
    if "$ref" in one or "$ref" in other:
        return True
    left = types_of(one) & types_of(other) & types
    return any(_may_meet_in(name, one, other, resolve, depth) for name in left)


def is_all_of_type(schema: Any, name: str, resolve: Resolve, depth: int = 0) -> bool:
    """True only if every value of a type is right."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        alone = not set(schema) - {"$ref"} - ANNOTATIONS and depth < _MAX_DEPTH
        return alone and is_all_of_type(resolve(schema), name, resolve, depth + 1)
    for keyword, value in schema.items():
        if keyword == "type":
            if name not in (value if isinstance(value, list) else [value]):
                return False
        elif keyword not in ANNOTATIONS and _SPEAKS_OF.get(keyword, name) == name:
            return False
    return True


def _may_meet_in(
    kind: str, one: dict[str, Any], other: dict[str, Any], resolve: Resolve, depth: int
) -> bool:
    ours, theirs = _values(one), _values(other)
    if ours is not None and theirs is not None:
        return any(_is_same(a, b) for a in ours for b in theirs if type_of(a) == kind)
    if kind == "object":
        return not _objects_differ(one, other, resolve, depth)
    if kind == "number":
        return _low(one) <= _high(other) and _low(other) <= _high(one)
    return True


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def _is_same(one: Any, other: Any) -> bool:
    return type_of(one) == type_of(other) and bool(one == other)


def _low(schema: dict[str, Any]) -> float:
    return float(schema.get("minimum", float("-inf")))


def _high(schema: dict[str, Any]) -> float:
    return float(schema.get("maximum", float("inf")))


def _objects_differ(
    one: dict[str, Any], other: dict[str, Any], resolve: Resolve, depth: int
) -> bool:
    """Does some member that one of them needs break the other."""
    needed = {*(one.get("required") or ()), *(other.get("required") or ())}
    for name in needed:
        ours, theirs = _member(one, name), _member(other, name)
        if not may_meet(ours, theirs, resolve, depth + 1):
            return True
    return False


def _member(schema: dict[str, Any], name: str) -> Any:
    properties = schema.get("properties") or {}
    if name in properties:
        return properties[name]
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return not is_closed
