"""`uniqueItems`, `contains` and `oneOf` as what they leave: every small value, against a validator."""

import itertools
import json
from typing import Any, Final

import jsonschema
import pytest

from finback.services.sampler.grammar_source import read_source
from finback.services.sampler.schema_arrays import unique_arrays, values_of
from finback.services.sampler.schema_dynamic import with_static_references
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec
from support.schema_suite import is_generable, matcher_of

_LEAVES: Final[list[Any]] = [None, True, 1, 2, "a", {}]
ARRAYS: Final = [
    *(list(items) for size in range(3) for items in itertools.product(_LEAVES, repeat=size)),
    *(list(items) for items in itertools.product([1, "a", None], repeat=3)),
]
OBJECTS: Final = [
    dict(zip(names, values, strict=True))
    for size in range(3)
    for names in itertools.combinations("abk", size)
    for values in itertools.product([1, "a", None], repeat=size)
]
VALUES: Final = [*_LEAVES, -3, 2.5, "", "abcd", *OBJECTS, *ARRAYS[:80]]
OLD: Final = {"$schema": "http://json-schema.org/draft-07/schema#"}

LISTS: Final[dict[str, dict[str, Any]]] = {
    "few": {"type": "array", "items": {"enum": ["a", 1, None]}, "uniqueItems": True},
    "few, at least": {"type": "array", "items": {"enum": ["a", 1, None, 1.0]}, "uniqueItems": True, "minItems": 2},
    "or no array": {"items": {"enum": ["a", 1]}, "uniqueItems": True},
    "typed enum": {"type": ["array", "null"], "items": {"type": "string", "enum": ["a", 1, "bb"]}, "uniqueItems": True},
    "booleans": {"type": "array", "items": {"type": ["boolean", "null"]}, "uniqueItems": True, **OLD},
    "reference": {"type": "array", "items": {"$ref": "#/$defs/e"}, "uniqueItems": True, "$defs": {"e": {"enum": [1, 2]}}},
    "many, two of them": {"type": "array", "items": {"enum": [*range(10), "a"]}, "maxItems": 2, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "string"}, "maxItems": 3},
    "contains two": {"type": "array", "contains": {"type": "string"}, "minContains": 2, "maxItems": 3},
    "contains or no array": {"contains": {"const": 1}, "maxItems": 2, **OLD},
    "exactly one": {"type": "array", "contains": {"type": "string"}, "maxContains": 1, "maxItems": 3},
    "none": {"type": "array", "contains": {"type": "string"}, "minContains": 0, "maxContains": 0},
    "at most one": {"type": "array", "contains": {"enum": [1, "a"]}, "minContains": 0, "maxContains": 1, "maxItems": 3},
    "contains among": {"type": "array", "items": {"type": ["string", "integer"]}, "contains": {"minimum": 2}, "maxItems": 3},
    "too short": {"type": ["array", "null"], "contains": {"const": 1}, "minContains": 3, "maxItems": 2},
}  # fmt: skip
CHOICES: Final[dict[str, dict[str, Any]]] = {
    "closed objects without a type": {"oneOf": [
        {"properties": {"a": {"type": "integer"}, "b": True}, "required": ["a", "b"], "additionalProperties": False},
        {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}]},
    "kinds": {"oneOf": [
        {"properties": {"a": {"const": 1}, "b": {"type": "string"}}, "required": ["a"]},
        {"properties": {"a": {"const": "a"}}, "required": ["a"]}]},
    "types beside": {"type": ["object", "string"], "oneOf": [{"required": ["a"]}, {"maxLength": 2, "properties": {"a": False}}]},
    "a bound and an object": {"oneOf": [{"minimum": 2}, {"required": ["k"]}, {"type": "null"}]},
    "ranges": {"oneOf": [{"minimum": 2}, {"maximum": 1}]},
    "overlap": {"oneOf": [{"type": "number", "minimum": 0}, {"type": "number", "maximum": 2}, {"type": "array", "maxItems": 1}]},
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_arrays_are_exact(name: str) -> None:
    _check(LISTS[name], [*ARRAYS, *_LEAVES])


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_exact(name: str) -> None:
    _check(CHOICES[name], VALUES)


def _check(schema: dict[str, Any], values: list[Any]) -> None:
    matcher = matcher_of(schema)
    validator = jsonschema.validators.validator_for(
        schema, default=jsonschema.Draft202012Validator
    )(schema)
    judged = [(value, validator.is_valid(value)) for value in values]
    assert any(is_right for _, is_right in judged)
    for value, is_right in judged:
        assert is_generable(matcher, value) == is_right, json.dumps(value)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems at #/uniqueItems"),
        ({"items": {"type": "string"}, "uniqueItems": True}, "uniqueItems at #/uniqueItems"),
        ({"items": {"enum": list("abcdefgh")}, "uniqueItems": True}, "uniqueItems at #/uniqueItems"),
        ({"prefixItems": [{"enum": [1]}], "items": {"enum": [1, 2]}, "uniqueItems": True},
         "uniqueItems at #/uniqueItems"),
        ({"contains": {"type": "string"}}, "contains at #/contains"),
        ({"contains": {"pattern": "a+b"}, "maxContains": 1, "maxItems": 3}, "contains at #/contains"),
        ({"contains": {"const": 1}, "minContains": 7, "maxItems": 16}, "contains at #/contains"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "oneOf at #/oneOf"),
    ],
)  # fmt: skip
def test_what_cannot_be_listed_is_refused(schema: dict[str, Any], pointer: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_source(GrammarSpec(kind="json_schema", text=json.dumps(schema)))
    assert caught.value.reason == pointer


def test_few_values() -> None:
    assert values_of({"enum": [1, 1.0, True, [1], [1.0], {"a": 1}, {"a": 1.0}]}) == [
        1, True, [1], {"a": 1},
    ]  # fmt: skip
    assert values_of({"type": "string", "enum": [1, "a"]}) == ["a"]
    assert values_of({"type": "integer"}) is None and values_of(True) is None
    assert unique_arrays({"minItems": 3}, {"enum": [1, 2]}, 2020) == []


TREE: Final = {
    "$id": "http://h/tree",
    "$dynamicAnchor": "node",
    "type": "object",
    "properties": {"a": {"enum": [1, "a"]}, "b": {"$dynamicRef": "#node"}},
    "additionalProperties": False,
}


def test_dynamic_references_that_have_one_target() -> None:
    _check(TREE, [{}, {"a": 1}, {"b": {}}, {"b": {"a": 2}}, {"b": {"b": {"a": "a"}}}, {"b": 1}])
    # The root's own anchor comes first on any way, so what it extends is strict too.
    extended = {
        "$id": "http://h/strict",
        "$dynamicAnchor": "node",
        "$ref": "tree",
        "required": ["a"],
        "$defs": {"tree": TREE},
    }
    found = with_static_references(extended, 2020)
    assert found["$defs"]["tree"]["properties"]["b"] == {"$ref": "http://h/strict#node"}
    assert extended["$defs"]["tree"] is TREE and "$dynamicRef" in TREE["properties"]["b"]  # type: ignore[index]  # a dict of the test
    validator = jsonschema.Draft202012Validator(extended)
    assert validator.is_valid({"a": 1, "b": {"a": 1}}) and not validator.is_valid({"a": 1, "b": {}})


def test_dynamic_references_that_have_several_are_refused() -> None:
    anchored = {"$dynamicAnchor": "item", "type": "integer"}
    schema = {
        "$id": "http://h/root",
        "$ref": "list",
        "$defs": {
            "list": {"$id": "list", "items": {"$dynamicRef": "#item"}, "$defs": {"i": anchored}},
            "other": {"$id": "other", "$ref": "list", "$defs": {"i": {**anchored, "minimum": 3}}},
        },
    }
    with pytest.raises(InvalidRequest) as caught:
        read_source(GrammarSpec(kind="json_schema", text=json.dumps(schema)))
    assert caught.value.reason == "$dynamicRef at #/$defs/list/items/$dynamicRef"


def test_recursive_references() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2019-09/schema",
        "$recursiveAnchor": True,
        "type": ["object", "integer"],
        "additionalProperties": {"$recursiveRef": "#", "$ref": "#/$defs/any"},
        "$defs": {"any": {}},
    }
    _check(schema, [{}, 1, {"a": 1}, {"a": {"b": {}}}, {"a": "x"}, "x"])
