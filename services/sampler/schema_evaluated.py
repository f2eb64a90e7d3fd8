"""Which members of an object other keywords have looked at already, for `unevaluatedProperties`.

Only what always applies can be told beforehand: `properties` and the like, `allOf`, references. Under
a condition (`anyOf`, `if`, ...) it depends on the value, and there is no answer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

_MAX_DEPTH: Final = 12
_CONDITIONAL: Final = frozenset(
    {"anyOf", "oneOf", "if", "dependentSchemas", "$dynamicRef", "$recursiveRef", "dependencies"}
)


@dataclass(slots=True)
class Evaluated:
    """Names and patterns of names; `is_all`: every member is looked at."""

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    is_all: bool = False


def evaluated_members(
    schema: Any, resolve: Callable[[dict[str, Any]], Any], own: str = ""
) -> Evaluated | None:
    """By everything in `schema` but its keyword `own`; None if it depends on the value."""
    found = Evaluated()
    return found if _add(schema, resolve, own, found, 0) else None


def _add(
    schema: Any,
    resolve: Callable[[dict[str, Any]], Any],
    own: str,
    found: Evaluated,
    depth: int,
) -> bool:
    if not isinstance(schema, dict):
        return True
    if depth > _MAX_DEPTH or _CONDITIONAL & set(schema):
        return False
    found.names.update(dict.fromkeys(schema.get("properties") or {}))
    found.patterns.update(dict.fromkeys(schema.get("patternProperties") or {}))
    for keyword in {"additionalProperties", "unevaluatedProperties"} - {own}:
        # False looks at nothing that is right.
        found.is_all = found.is_all or schema.get(keyword, False) is not False
    parts = list(schema.get("allOf") or ())
    if "$ref" in schema:
        parts.append(resolve(schema))
    return all(_add(part, resolve, "", found, depth + 1) for part in parts)
