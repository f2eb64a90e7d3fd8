"""Can a schema's values ever end: the least fixed point over references.

`ends(schema, types)`: is there a finite value of one of `types` that every keyword, looked at by
itself, lets be? Keywords are judged apart, so a schema that is called endless surely is. Starting
from "nothing ends", rounds add what ends by what was found before, until nothing is added.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from finback.services.sampler.schema_fault import SchemaFault, child
from finback.services.sampler.schema_refs import References

ALL_TYPES: Final = frozenset({"object", "array", "string", "number", "boolean", "null"})
Types = frozenset[str]
_Key = tuple[int, Types]


def types_of(schema: dict[str, Any]) -> Types:
    """The types that `type`, `const` and `enum` leave; an integer is a number."""
    types = ALL_TYPES
    named = schema.get("type")
    if named is not None:
        names = named if isinstance(named, list) else [named]
        types = frozenset("number" if name == "integer" else name for name in names)
    values = schema.get("enum")
    if "const" in schema:
        types &= {type_of(schema["const"])}
    if isinstance(values, list):
        types &= {type_of(value) for value in values}
    return types


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if value is None:
        return "null"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


class Endings:
    """Which schemas of a document have a value that ends."""

    def __init__(self, references: References, dialect: int) -> None:
        self._references = references
        self._dialect = dialect
        self._ending: set[_Key] = set()
        self._known: dict[_Key, tuple[str, dict[str, Any]]] = {}

    def ends(self, schema: Any, pointer: str = "#") -> bool:
        """Has it a finite value? Raises `SchemaFault` for a reference that leads nowhere."""
        if self._ends(schema, pointer, ALL_TYPES):
            return True
        num_before = -1
        while num_before != len(self._ending) + len(self._known):
            num_before = len(self._ending) + len(self._known)
            for (_, types), (at, found) in list(self._known.items()):
                self._ends(found, at, types, is_root=True)
        return self._ends(schema, pointer, ALL_TYPES)

    def _ends(self, schema: Any, pointer: str, types: Types, *, is_root: bool = False) -> bool:
        """By what is known; schemas met on the way are noted for the next round."""
        if isinstance(schema, bool):
            return schema
        key = (id(schema), types)
        if key in self._ending:
            return True
        if key in self._known and not is_root:
            return False
        self._known[key] = (pointer, schema)
        if self._has_value(schema, pointer, types):
            self._ending.add(key)
            return True
        return False

    def _has_value(self, schema: dict[str, Any], pointer: str, types: Types) -> bool:
        if "$ref" in schema:
            target = self._references.resolve(schema, pointer)
            if not self._ends(target, child(pointer, "$ref"), types):
                return False
            if self._dialect <= 7:
                return True
        types &= types_of(schema)
        parts = schema.get("allOf") or []
        if not all(self._ends(s, child(pointer, "allOf", i), types) for i, s in enumerate(parts)):
            return False
        for keyword in ("anyOf", "oneOf"):
            branches = schema.get(keyword)
            if branches and not any(
                self._ends(s, child(pointer, keyword, i), types) for i, s in enumerate(branches)
            ):
                return False
        return any(self._has_of_type(schema, pointer, name) for name in sorted(types))

    def _has_of_type(self, schema: dict[str, Any], pointer: str, name: str) -> bool:
        if name == "object":
            return all(
                self._ends(value, at, ALL_TYPES)
                for required in schema.get("required") or ()
                for at, value in _of_member(schema, pointer, required)
            )
        if name == "array":
            return all(self._ends(value, at, ALL_TYPES) for at, value in _of_items(schema, pointer))
        return True


def _of_member(schema: dict[str, Any], pointer: str, name: str) -> Iterator[tuple[str, Any]]:
    """The schemas of one member of an object."""
    is_named = False
    properties = schema.get("properties") or {}
    if name in properties:
        is_named = True
        yield child(pointer, "properties", name), properties[name]
    for pattern, value in (schema.get("patternProperties") or {}).items():
        if _matches(pattern, name):
            is_named = True
            yield child(pointer, "patternProperties", pattern), value
    if not is_named and "additionalProperties" in schema:
        yield child(pointer, "additionalProperties"), schema["additionalProperties"]


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _of_items(schema: dict[str, Any], pointer: str) -> Iterator[tuple[str, Any]]:
    """The schemas of the items that an array must have."""
    at_least = int(schema.get("minItems") or 0)
    items = schema.get("items")
    first = schema.get("prefixItems") or (items if isinstance(items, list) else [])
    yield from ((child(pointer, "items", i), s) for i, s in enumerate(first[:at_least]))
    if at_least > len(first):
        rest = schema.get("additionalItems") if isinstance(items, list) else items
        yield child(pointer, "items"), True if rest is None else rest


def check_ends(endings: Endings, schema: Any) -> None:
    """Raises `SchemaFault` for a schema no value of which ends."""
    if isinstance(schema, dict) and not endings.ends(schema):
        raise SchemaFault(
            "no value of this schema ever ends: it requires itself, or contradicts itself",
            pointer=_culprit(endings, schema),
            reason="endless",
        )


def _culprit(endings: Endings, schema: dict[str, Any]) -> str:
    """Down the required members and items that do not end, to where they come back."""
    at, found, seen = "#", schema, set[int]()
    while id(found) not in seen:
        seen.add(id(found))
        for name in found.get("required") or ():
            for below, value in _of_member(found, at, name):
                if isinstance(value, dict) and not endings.ends(value, below):
                    at, found = below, value
                    break
    return at
