"""Keywords about how the items of an array differ, as the arrays that they leave.

JSON Schema's own words cannot say that items differ, nor that some item somewhere is right. Where the
items have few values, or the array is short, all that is left can be listed.
"""

import itertools
import math
from typing import Any, Final

from finback.services.sampler.schema_ends import type_of, types_of

# Arrays of one schema; so many compile in about 0.1 s.
MAX_LISTED: Final = 130
_MAX_LENGTH: Final = 16


def values_of(items: Any) -> list[Any] | None:
    """All values that a schema may let be, each once; None: they are many."""
    if not isinstance(items, dict):
        return None
    listed = [items["const"]] if "const" in items else items.get("enum")
    if isinstance(listed, list):
        types = types_of(items)
        return _distinct([value for value in listed if type_of(value) in types])
    if "type" not in items or not types_of(items) <= {"boolean", "null"}:
        return None
    known: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
    return [value for name in sorted(types_of(items)) for value in known[name]]


def unique_arrays(schema: dict[str, Any], items: Any, dialect: int) -> list[Any] | None:
    """Arrays whose items differ, as schemas of which one must hold; None: too many to list.

    `items`: what all items are, references resolved. Those listed may be more than it lets be.
    """
    values = None if _has_tuple(schema) else values_of(items)
    if values is None:
        return None
    least, most = (
        int(schema.get("minItems", 0)),
        min(len(values), int(schema.get("maxItems", 2**31))),
    )
    if least > most:
        return []
    if math.perm(len(values), most) > MAX_LISTED:
        return None
    # An array stands for its beginnings too.
    return [
        _tuple([{"const": value} for value in chosen], dialect, {"items": False, "minItems": least})
        for chosen in itertools.permutations(values, most)
    ]


def containing_arrays(
    schema: dict[str, Any], wanted: Any, unwanted: Any, dialect: int
) -> list[Any] | None:
    """Arrays with the right number of items that are `wanted`; None: they cannot be listed.

    `unwanted`: the schema of all other values, if there is one.
    """
    least = int(schema.get("minContains", 1))
    bound = schema.get("maxContains")
    if bound == 0 and least == 0 and unwanted is not None:
        return [{"type": "array", "items": unwanted}]
    length = int(schema.get("maxItems", 2**31))
    if length > _MAX_LENGTH or (bound is not None and unwanted is None):
        return None
    most = least if bound is None else min(int(bound), length)
    if sum(math.comb(length, count) for count in range(least, most + 1)) > MAX_LISTED:
        return None
    made = []
    for count in range(least, most + 1):
        for places in itertools.combinations(range(length), count):
            end = places[-1] + 1 if places else 0
            other = True if bound is None else unwanted
            parts = [
                wanted if at in places else other for at in range(end if bound is None else length)
            ]
            made.append(_tuple(parts, dialect, {"minItems": end}))
    return made


def arrays_or_others(schema: dict[str, Any], arrays: list[Any]) -> list[Any]:
    """One of `arrays`, or a value that is no array as far as `schema` lets it be one."""
    others = types_of(schema) - {"array"}
    return [*([{"type": sorted(others)}] if others else []), *arrays]


def _has_tuple(schema: dict[str, Any]) -> bool:
    return "prefixItems" in schema or isinstance(schema.get("items"), list)


def _tuple(parts: list[Any], dialect: int, more: dict[str, Any]) -> dict[str, Any]:
    """Items by their places; `more` may say what those behind are (`items`)."""
    made: dict[str, Any] = {"type": "array"}
    rest = {name: value for name, value in more.items() if name != "items"}
    behind: dict[str, Any]
    if not parts:
        behind = {"maxItems": 0} if more.get("items") is False else {}
    elif dialect >= 2020:
        behind = {"prefixItems": parts, **({"items": more["items"]} if "items" in more else {})}
    else:
        behind = {"items": parts, **({"additionalItems": more["items"]} if "items" in more else {})}
    return made | behind | rest


def _distinct(values: list[Any]) -> list[Any]:
    """Each once, as JSON compares: 1 is 1.0 and is not true."""
    found: list[Any] = []
    for value in values:
        if not any(same(value, other) for other in found):
            found.append(value)
    return found


def same(one: Any, other: Any) -> bool:
    """Are two JSON values equal."""
    if type_of(one) != type_of(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)
