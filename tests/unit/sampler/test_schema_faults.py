"""What is refused before the engine sees it: keyword, pointer, position."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.services.sampler.regex_form import check_regex
from finback.services.sampler.schema_fault import SchemaFault
from finback.services.sampler.schema_source import read_schema

SELF = {"$ref": "#"}


def fault_of(schema: Any) -> SchemaFault:
    with pytest.raises(SchemaFault) as caught:
        read_schema(json.dumps(schema), is_lenient=False)
    return caught.value


@pytest.mark.parametrize(
    ("schema", "reason", "pointer"),
    [
        ({"type": "object", "required": ["x"], "properties": {"x": SELF}}, "endless", "#/properties/x"),
        ({"type": "array", "minItems": 1, "items": SELF}, "endless", "#"),
        ({"allOf": [SELF]}, "endless", "#"),
        ({"anyOf": [SELF, {"allOf": [SELF]}]}, "endless", "#"),
        ({"type": "string", "const": 3}, "endless", "#"),
        ({"type": ["string", "null"], "enum": [1, 2]}, "endless", "#"),
        ({"enum": []}, "enum", "#/enum"),
        ({"properties": {"a": {"type": "text"}}}, "type", "#/properties/a/type"),
        ({"properties": {"a/b": {"minLength": -1}}}, "minLength", "#/properties/a~1b/minLength"),
        ({"properties": {"a": {"not": {"pattern": "x"}}}}, "not", "#/properties/a/not"),
        ({"items": {"uniqueItems": True}}, "uniqueItems", "#/items/uniqueItems"),
        ({"$ref": "http://other.host/x"}, "$ref", "#/$ref"),
        ({"$ref": "#/$defs/none"}, "$ref", "#/$ref"),
        ({"items": [{}]}, "items", "#/items"),
        ({"$schema": "http://example.com/mine"}, "$schema", "#/$schema"),
        ({"pattern": "a(?=b)"}, "look-around", "#/pattern"),
        ({"patternProperties": {"(a": {}}}, "unclosed group", "#/patternProperties/(a"),
        ({"minItems": 10**6}, "minItems", "#/minItems"),
        ({"minItems": 5000, "items": {"minItems": 5000}}, "bounds", "#/items"),
        ({"enum": list(range(20_001))}, "num_enum", "#/enum"),
        ({"contains": {"const": 1}}, "contains", "#/contains"),
    ],
)  # fmt: skip
def test_named(schema: Any, reason: str, pointer: str) -> None:
    fault = fault_of(schema)
    assert (fault.reason, fault.pointer) == (reason, pointer)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"x": SELF}},
        {"type": "array", "items": SELF},
        {"anyOf": [{"type": "null"}, {"type": "array", "minItems": 1, "items": SELF}]},
        {"required": ["x"], "properties": {"x": SELF}},  # a number is right, too
    ],
)
def test_recursion_with_a_way_out_is_served(schema: Any) -> None:
    assert read_schema(json.dumps(schema), is_lenient=False).widened == []


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("ab(c", 2, "unclosed group"),
        ("ab)", 2, "unopened group"),
        ("a[b", 1, "unclosed character class"),
        (r"(a)\1", 3, "back-reference"),
        (r"a\b", 1, "word boundary"),
        ("*a", 0, "repetition"),
        ("a{3,2}", 1, "repetition"),
        ("((a{900}){900})", 9, "regex_repetition"),
        ("x(?!y)", 1, "look-around"),
        ("a\\", 1, "escape"),
        ("(" * 80 + ")" * 80, 64, "regex_depth"),
    ],
)
def test_a_regex_fault_has_a_position(text: str, position: int, reason: str) -> None:
    with pytest.raises(SchemaFault, match=f"position {position}:") as caught:
        check_regex(text)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "text", [r"a{", r"[]a]", r"[^]]", r"(?i:a)(?P<n>b)", r"\d{2,}?", "a|b*", r"\(\["]
)
def test_expressions_that_are_fine(text: str) -> None:
    check_regex(text)


NODES = ("a", "b", "c")


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    """Three schemas that require, offer or choose among each other."""
    refs = st.sampled_from(NODES).map(lambda name: {"$ref": f"#/$defs/{name}"})
    leaf = st.just({"type": "null"})
    node = st.one_of(
        leaf,
        st.lists(refs, min_size=1, max_size=2).map(lambda some: {"anyOf": some}),
        st.lists(refs, min_size=1, max_size=2).map(lambda some: {"allOf": some}),
        refs.map(lambda ref: {"type": "object", "properties": {"x": ref}, "required": ["x"]}),
        refs.map(lambda ref: {"type": "object", "properties": {"x": ref}}),
        refs.map(lambda ref: {"type": "array", "items": ref, "minItems": 1}),
    )
    return {"$ref": "#/$defs/a", "$defs": {name: draw(node) for name in NODES}}


def ends_within(schema: Any, defs: dict[str, Any], depth: int) -> bool:
    """The slow twin: a value of so many levels of schemas."""
    if depth == 0:
        return False
    if "$ref" in schema:
        return ends_within(defs[schema["$ref"].rsplit("/", 1)[1]], defs, depth - 1)
    for keyword, every in (("anyOf", any), ("allOf", all)):
        if keyword in schema:
            return every(ends_within(part, defs, depth - 1) for part in schema[keyword])
    if schema["type"] == "object" and "required" in schema:
        return ends_within(schema["properties"]["x"], defs, depth - 1)
    if schema["type"] == "array":
        return ends_within(schema["items"], defs, depth - 1)
    return True


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_endless_as_by_brute_force(schema: dict[str, Any]) -> None:
    try:
        read_schema(json.dumps(schema), is_lenient=False)
        is_endless = False
    except SchemaFault as fault:
        is_endless = fault.reason == "endless"
    if not is_endless:  # types that contradict each other are seen as well
        assert ends_within(schema, schema["$defs"], 10) or _contradicts(schema)
    elif ends_within(schema, schema["$defs"], 10):
        assert _contradicts(schema)


def _contradicts(schema: dict[str, Any]) -> bool:
    types = {part.get("type") for part in schema["$defs"].values()} - {None}
    has_all_of = any("allOf" in part for part in schema["$defs"].values())
    return has_all_of and len(list(itertools.pairwise(types))) > 0
