"""How large a schema may be: depth, number, enums, bounds. Before anything walks it in earnest."""

from collections.abc import Mapping
from typing import Any, Final

from finback.services.sampler.schema_fault import SchemaFault, child

MAX_DEPTH: Final = 64
MAX_VALUES: Final = 50_000  # of all kinds, in the whole document
MAX_PROPERTIES: Final = 5_000
MAX_ENUM_ITEMS: Final = 20_000
MAX_LENGTH: Final = 100_000  # minLength, maxLength
MAX_ITEMS: Final = 10_000  # minItems, maxItems, minProperties, ...
MAX_PRODUCT: Final = 1_000_000  # of such bounds, one within the other

_BOUNDS: Final[Mapping[str, int]] = {
    "minLength": MAX_LENGTH,
    "maxLength": 2**31,  # a string may be let free; one that must be long is costly
    "minItems": MAX_ITEMS,
    "maxItems": 2**31,
    "minProperties": MAX_ITEMS,
    "maxProperties": 2**31,
}


def check_budget(schema: Any) -> None:
    """Raises `SchemaFault` with the budget as its reason. One pass, no recursion."""
    num_values = num_properties = num_enum_items = 0
    todo: list[tuple[str, Any, int, int]] = [("#", schema, 1, 1)]
    while todo:
        at, value, depth, product = todo.pop()
        num_values += 1
        if num_values > MAX_VALUES:
            raise SchemaFault(f"more than {MAX_VALUES} values", pointer=at, reason="num_values")
        if not isinstance(value, dict | list):
            continue
        if depth > MAX_DEPTH:
            raise SchemaFault(
                f"a schema nested deeper than {MAX_DEPTH} levels", pointer=at, reason="depth"
            )
        if isinstance(value, list):
            todo += [(child(at, i), item, depth + 1, product) for i, item in enumerate(value)]
            continue
        product = _check_bounds(at, value, product)
        num_properties += _size(value.get("properties"), dict)
        num_enum_items += _size(value.get("enum"), list)
        _check_count("properties", num_properties, MAX_PROPERTIES, at)
        _check_count("enum", num_enum_items, MAX_ENUM_ITEMS, at)
        todo += [
            (child(at, name), item, depth + 1, product)
            for name, item in value.items()
            if name not in ("enum", "const", "default", "examples") or depth < MAX_DEPTH
        ]


def _size(value: Any, kind: type[list[Any]] | type[dict[str, Any]]) -> int:
    return len(value) if isinstance(value, kind) else 0


def _check_count(keyword: str, count: int, limit: int, at: str) -> None:
    if count > limit:
        raise SchemaFault(
            f"{count} {keyword} entries so far; {limit} are the limit",
            pointer=child(at, keyword),
            reason=f"num_{keyword}",
        )


def _check_bounds(at: str, schema: dict[str, Any], product: int) -> int:
    """The product of the bounds around and here."""
    heaviest = 1
    for keyword, limit in _BOUNDS.items():
        bound = schema.get(keyword)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            continue
        if bound > limit:
            raise SchemaFault(
                f"{keyword} {bound:g} is above the limit of {limit}",
                pointer=child(at, keyword),
                reason=keyword,
            )
        if keyword.startswith("min"):
            heaviest = max(heaviest, int(bound))
    if product * heaviest > MAX_PRODUCT:
        raise SchemaFault(
            f"bounds within bounds come to {product * heaviest}; {MAX_PRODUCT} is the limit",
            pointer=at,
            reason="bounds",
        )
    return product * heaviest
