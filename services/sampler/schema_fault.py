"""What is wrong with a schema, or cannot be enforced, and where. Also the dialects of JSON Schema."""

from collections.abc import Mapping
from typing import Any, Final

Schema = bool | dict[str, Any]

# By `$schema`; a schema that names none is read as the newest.
NEWEST: Final = 2020
_DIALECTS: Final[Mapping[str, int]] = {
    "json-schema.org/draft-03/schema": 3,
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft/2020-12/schema": 2020,
    "json-schema.org/schema": 2020,
}


class SchemaFault(Exception):
    """`pointer`: a JSON pointer as a URI fragment; `reason`: the keyword or the budget."""

    def __init__(self, text: str, *, pointer: str, reason: str) -> None:
        super().__init__(f"{text} (at {pointer})")
        self.text = text
        self.pointer = pointer
        self.reason = reason


def dialect_of(schema: Schema, outer: int = NEWEST) -> int:
    """The draft of a schema: 4, 6, 7, 2019 or 2020; `outer` if it does not say. Raises `SchemaFault`."""
    named = schema.get("$schema") if isinstance(schema, dict) else None
    if named is None:
        return outer
    if not isinstance(named, str):
        raise SchemaFault("$schema must be a string", pointer="#/$schema", reason="$schema")
    found = _DIALECTS.get(named.split("://")[-1].rstrip("#").rstrip("/"))
    if found is None or found < 4:
        raise SchemaFault(
            f"unknown dialect {named[:100]!r}; known are drafts 4, 6, 7, 2019-09 and 2020-12",
            pointer="#/$schema",
            reason="$schema",
        )
    return found


def child(pointer: str, *steps: str | int) -> str:
    """The pointer of something below."""
    for step in steps:
        spelled = str(step).replace("~", "~0").replace("/", "~1")
        pointer = f"{pointer}/{spelled}"
    return pointer
