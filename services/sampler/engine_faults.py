"""What the engine says of a grammar that it cannot take, as its author can read it: where, and what.

The engine speaks of its own form of a grammar. Positions are counted here in what the client wrote,
from 0 in regular expressions and from 1 in lines and columns; a schema's place is a JSON pointer.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from finback.services.sampler.ecma_regex import for_engine
from finback.services.sampler.schema_fault import child
from finback.shared.wire.messages.generate import GrammarSpec

MAX_CHARS: Final = 1000
MAX_REASON_CHARS: Final = 200
# Ends of messages that speak of the engine's state.
_STATE: Final = re.compile(r"\s*<(?:state|non-verbose)[/>].*", re.DOTALL)
_BAD_REGEX: Final = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^.*\nerror: (.+)")
_PLACE: Final = re.compile(r"(?:at )?(\d+)\((\d+)\): ((?s:.+?))(?:\n +\d+ \| .*|\Z)")
# Keywords of a schema by what the engine's messages call them.
_KEYWORDS: Final = (
    ("multipleOf", ("multipleOf",)),
    ("patternProperty", ("patternProperties",)),
    ("float range", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    ("integer interval", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
)


def readable(spec: GrammarSpec, problem: str) -> tuple[str, str]:
    """(what is wrong and where, the construct in short)."""
    told = _STATE.sub("", problem).strip()
    regex, place = _BAD_REGEX.search(told), _PLACE.match(told)
    if regex is not None:
        spelled, blanks, what = regex.groups()
        source = _regex_of(spec, spelled)
        told = f"regular expression, position {_position(source, len(blanks))}: {what}"
        told += _at([p for p, pattern in _patterns(_schema_of(spec)) if pattern == source])
        if place is not None and spec.kind == "lark":
            told = f"line {place[1]}, column {place[2]}: {told}"
        return told[:MAX_CHARS], what[:MAX_REASON_CHARS]
    if place is not None:
        what = " ".join(place[3].split())
        return f"line {place[1]}, column {place[2]}: {what}"[:MAX_CHARS], what[:MAX_REASON_CHARS]
    return f"{told}{_at(_places(spec, told))}"[:MAX_CHARS], told.splitlines()[0][:MAX_REASON_CHARS]


def _regex_of(spec: GrammarSpec, spelled: str) -> str:
    """The expression as it was written, of that which the engine shows."""
    if spec.kind == "regex":
        return spec.text
    found = (pattern for _, pattern in _patterns(_schema_of(spec)))
    return next((p for p in found if for_engine(p) == spelled), spelled.replace("\\/", "/"))


def _position(source: str, column: int) -> int:
    """The index in `source` of a column of its spelling, in which a slash and a break are escaped."""
    at = 0
    for index, char in enumerate(source):
        if at >= column:
            return index
        is_escaped = char == "/" and source[index - 1 : index] == "\\"
        at += 2 if char in "/\n" and not is_escaped else 1
    return min(len(source), column)


def _places(spec: GrammarSpec, told: str) -> list[str]:
    """Pointers to the keywords that a message about a schema speaks of."""
    wanted = next((keywords for word, keywords in _KEYWORDS if word in told), ())
    return [
        child(at, keyword)
        for at, schema in _objects(_schema_of(spec))
        for keyword in wanted
        if keyword in schema
    ]


def _at(pointers: list[str]) -> str:
    """A place is told where there is no doubt about it."""
    return f" (at {pointers[0]})" if len(pointers) == 1 else ""


def _schema_of(spec: GrammarSpec) -> Any:
    if spec.kind not in ("json_schema", "structural_tag"):
        return None
    try:
        return json.loads(spec.text)
    except (ValueError, RecursionError):
        return None


def _patterns(schema: Any) -> Iterator[tuple[str, str]]:
    """(pointer, expression) of every pattern."""
    for at, found in _objects(schema):
        if isinstance(found.get("pattern"), str):
            yield child(at, "pattern"), found["pattern"]
        named = found.get("patternProperties")
        for name in named if isinstance(named, dict) else ():
            yield child(at, "patternProperties", name), name


def _objects(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(pointer, object) of everything that is an object in a document."""
    todo: list[tuple[str, Any]] = [("#", schema)]
    while todo:
        at, found = todo.pop()
        if isinstance(found, dict):
            yield at, found
            todo += [(child(at, name), item) for name, item in found.items()]
        elif isinstance(found, list):
            todo += [(child(at, index), item) for index, item in enumerate(found)]
