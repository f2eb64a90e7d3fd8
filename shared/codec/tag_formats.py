"""The `format` of a structural tag: a JSON tree of chunks, as xgrammar documents it, to chunks.

What is not here (other styles of JSON, EBNF, dispatch, formats of tokens, limits of free text) is refused
by its path, as is free text that nothing ends.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from finback.shared.codec.tag_chunks import (
    AnyText,
    Chunk,
    Const,
    Either,
    Path,
    Regex,
    Repeat,
    Row,
    Schema,
    Separated,
    Tag,
    TagFault,
    Triggered,
)
from finback.shared.codec.tag_marks import check_end, check_fields, check_mark, tags_by_trigger

MAX_DEPTH: Final = 16
MAX_ITEMS: Final = 128
MAX_REPEAT: Final = 1000
_MAX_ENDS: Final = 8


def chunk_of(found: Any, path: Path) -> Chunk:
    """The chunk at `path`. Raises `TagFault`."""
    if not isinstance(found, Mapping):
        raise TagFault(path, "an object with a type")
    if len(path) > 3 * MAX_DEPTH:
        raise TagFault(path, f"nested {MAX_DEPTH} levels deep at most")
    read = _READERS.get(str(found.get("type")))
    if read is None:
        raise TagFault((*path, "type"), f"one of {', '.join(_READERS)}")
    return read(found, path)


def _const(found: Mapping[str, Any], path: Path) -> Chunk:
    check_fields(found, ("type", "value"), path)
    check_mark(found.get("value"), (*path, "value"))
    return Const(path=path, text=found["value"])


def _schema(found: Mapping[str, Any], path: Path) -> Chunk:
    check_fields(found, ("type", "json_schema", "style", "any_order"), path)
    if found.get("style", "json") != "json":
        raise TagFault((*path, "style"), "'json'")
    if found.get("any_order", False) is not False:
        raise TagFault((*path, "any_order"), "false: members come in the schema's order")
    schema = found.get("json_schema")
    if not isinstance(schema, dict | bool):
        raise TagFault((*path, "json_schema"), "a JSON Schema")
    return Schema(path=(*path, "json_schema"), schema=schema)


def _regex(found: Mapping[str, Any], path: Path) -> Chunk:
    check_fields(found, ("type", "pattern"), path)
    pattern = found.get("pattern")
    if not isinstance(pattern, str) or not pattern:
        raise TagFault((*path, "pattern"), "a regular expression")
    return Regex(path=(*path, "pattern"), pattern=pattern)


def _any_text(found: Mapping[str, Any], path: Path) -> Chunk:
    check_fields({key: value for key, value in found.items() if value}, ("type",), path)
    return AnyText(path=path)


def _row(found: Mapping[str, Any], path: Path) -> Chunk:
    return Row(path=path, items=_elements(found, path))


def _either(found: Mapping[str, Any], path: Path) -> Chunk:
    return Either(path=path, items=_elements(found, path))


def _elements(found: Mapping[str, Any], path: Path) -> tuple[Chunk, ...]:
    check_fields(found, ("type", "elements"), path)
    return tuple(_list(found.get("elements"), (*path, "elements"), chunk_of))


def _times(low: int, high: int | None) -> Callable[[Mapping[str, Any], Path], Chunk]:
    def read(found: Mapping[str, Any], path: Path) -> Chunk:
        check_fields(found, ("type", "content"), path)
        item = chunk_of(found.get("content"), (*path, "content"))
        return Repeat(path=path, item=item, low=low, high=high)

    return read


def _repeat(found: Mapping[str, Any], path: Path) -> Chunk:
    check_fields(found, ("type", "content", "min", "max"), path)
    low, high = found.get("min"), found.get("max")
    if not isinstance(low, int) or isinstance(low, bool) or not 0 <= low <= MAX_REPEAT:
        raise TagFault((*path, "min"), f"a number from 0 to {MAX_REPEAT}")
    if not isinstance(high, int) or isinstance(high, bool) or not -1 <= high <= MAX_REPEAT:
        raise TagFault((*path, "max"), f"a number from 0 to {MAX_REPEAT}, or -1 for any")
    if 0 <= high < max(low, 1):
        raise TagFault((*path, "max"), "at least 1, and not below min")
    item = chunk_of(found.get("content"), (*path, "content"))
    return Repeat(path=path, item=item, low=low, high=None if high < 0 else high)


def _tag(found: Any, path: Path) -> Tag:
    if not isinstance(found, Mapping) or found.get("type", "tag") != "tag":
        raise TagFault(path, "a tag: an object with begin, content and end")
    check_fields(found, ("type", "begin", "content", "end"), path)
    check_mark(found.get("begin"), (*path, "begin"))
    ends = found.get("end")
    if isinstance(ends, list):
        ends = _list(ends, (*path, "end"), _end, most=_MAX_ENDS)
    else:
        ends = [_end(ends, (*path, "end"))]
    content = chunk_of(found.get("content"), (*path, "content"))
    return Tag(path=path, begin=found["begin"], content=content, ends=tuple(ends))


def _end(found: Any, path: Path) -> str:
    check_end(found, path)
    return str(found)


def _triggered(found: Mapping[str, Any], path: Path) -> Chunk:
    fields = ("type", "triggers", "tags", "at_least_one", "stop_after_first", "excludes")
    check_fields(found, fields, path)
    if found.get("excludes"):
        raise TagFault((*path, "excludes"), "empty")
    tags = _list(found.get("tags"), (*path, "tags"), _tag)
    triggers, grouped = tags_by_trigger(found.get("triggers"), tags, path)
    return Triggered(
        path=path,
        triggers=triggers,
        tags=grouped,
        needs_one=_flag(found, "at_least_one", path),
        stops_after_one=_flag(found, "stop_after_first", path),
    )


def _separated(found: Mapping[str, Any], path: Path) -> Chunk:
    check_fields(found, ("type", "tags", "separator", "at_least_one", "stop_after_first"), path)
    check_end(found.get("separator"), (*path, "separator"))
    return Separated(
        path=path,
        tags=tuple(_list(found.get("tags"), (*path, "tags"), _tag)),
        separator=found["separator"],
        needs_one=_flag(found, "at_least_one", path),
        stops_after_one=_flag(found, "stop_after_first", path),
    )


def _flag(found: Mapping[str, Any], name: str, path: Path) -> bool:
    given = found.get(name, False)
    if not isinstance(given, bool):
        raise TagFault((*path, name), "true or false")
    return given


def _list(
    found: Any, path: Path, read: Callable[[Any, Path], Any], most: int = MAX_ITEMS
) -> list[Any]:
    if not isinstance(found, list) or not 0 < len(found) <= most:
        raise TagFault(path, f"a list of 1 to {most}")
    return [read(item, (*path, index)) for index, item in enumerate(found)]


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any], Path], Chunk]]] = {
    "const_string": _const,
    "json_schema": _schema,
    "regex": _regex,
    "any_text": _any_text,
    "sequence": _row,
    "or": _either,
    "optional": _times(0, 1),
    "star": _times(0, None),
    "plus": _times(1, None),
    "repeat": _repeat,
    "tag": _tag,
    "triggered_tags": _triggered,
    "tags_with_separator": _separated,
}
