"""Structural tags: answers as a tree of chunks, some free, some kept to something. Pure.

Two forms that xgrammar and the servers on it know. With `structures` and `triggers`: text is free up to a
trigger; then comes the rest of a `begin` that starts with it, a value of that structure's schema, its
`end`, and free text again. With `format`: the tree itself (`tag_formats`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from finback.shared.codec.tag_chunks import Chunk, Schema, Tag, TagFault, Triggered
from finback.shared.codec.tag_formats import chunk_of
from finback.shared.codec.tag_marks import check_end, check_fields, check_mark, tags_by_trigger

MAX_STRUCTURES: Final = 128


def structural_tag_of(value: Any) -> Chunk:
    """Check a structural tag; whether its schemas can be enforced is not looked at.

    Raises `TagFault`.
    """
    if not isinstance(value, Mapping):
        raise TagFault((), "an object with format, or with structures and triggers")
    if value.get("type", "structural_tag") != "structural_tag":
        raise TagFault(("type",), "'structural_tag'")
    if "format" in value:
        check_fields(value, ("type", "format"), ())
        return chunk_of(value["format"], ("format",))
    check_fields(value, ("type", "structures", "triggers"), ())
    found = value.get("structures")
    if not isinstance(found, list) or not 0 < len(found) <= MAX_STRUCTURES:
        raise TagFault(("structures",), f"a list of 1 to {MAX_STRUCTURES} structures")
    tags = [_structure(item, ("structures", index)) for index, item in enumerate(found)]
    triggers, grouped = tags_by_trigger(value.get("triggers"), tags, ())
    return Triggered(path=(), triggers=triggers, tags=grouped)


def _structure(found: Any, path: Sequence[str | int]) -> Tag:
    if not isinstance(found, Mapping):
        raise TagFault(path, "an object with begin, schema and end")
    check_fields(found, ("begin", "schema", "end"), path)
    begin, end, schema = found.get("begin"), found.get("end"), found.get("schema")
    check_mark(begin, (*path, "begin"))
    check_end(end, (*path, "end"))
    if not isinstance(schema, dict | bool):
        raise TagFault((*path, "schema"), "a JSON Schema")
    content = Schema(path=(*path, "schema"), schema=schema)
    return Tag(path=tuple(path), begin=str(begin), content=content, ends=(str(end),))
