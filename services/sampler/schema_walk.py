"""Where schemas lie within a schema: the keywords that hold them."""

from collections.abc import Iterator
from typing import Any, Final

from finback.services.sampler.schema_fault import child

# keyword -> how it holds schemas
ONE: Final = frozenset(
    {
        "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items",
        "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
MANY: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
NAMED: Final = frozenset(
    {
        "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
    }
)  # fmt: skip


def children(schema: dict[str, Any], pointer: str) -> Iterator[tuple[str, Any]]:
    """(pointer, schema) of each schema directly below, keyword by keyword."""
    for keyword, value in schema.items():
        at = child(pointer, keyword)
        if keyword in MANY and isinstance(value, list):
            for index, item in enumerate(value):
                yield child(at, index), item
        elif keyword in NAMED and isinstance(value, dict):
            for name, item in value.items():
                if isinstance(item, dict | bool):  # a list of names in `dependencies`
                    yield child(at, name), item
        elif keyword in ONE and isinstance(value, dict | bool):
            yield at, value


def every_schema(schema: Any, pointer: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """(pointer, object) of each schema that is an object, outer ones first. No recursion."""
    todo = [(pointer, schema)]
    while todo:
        at, found = todo.pop()
        if isinstance(found, dict):
            yield at, found
            todo += reversed(list(children(found, at)))
