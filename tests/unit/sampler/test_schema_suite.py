"""The official suite: no schema is accepted and wrong. docs/structured-output.md has the table."""

import collections
import json
import re

import jsonschema
import pytest

from finback.services.sampler.grammar_source import read_source
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec
from support.grammar_walk import Walk, vocabulary
from support.schema_suite import SUITE, matcher_of, suite_files, verdicts

pytestmark = pytest.mark.skipif(not SUITE.is_dir(), reason="no ../shared/data beside the clone")

# Documented: narrower formats, and annotations of draft 7 that a validator may check.
MAY_BE_NARROW = re.compile(r"format|float-overflow|hostname|time|email")
ANNOTATIONS = "draft7/optional/content.json"
# (exact, refused) over all files; more exact is welcome, then raise these and write the page anew.
AT_LEAST_EXACT, AT_MOST_REFUSED = 866, 338


def test_no_schema_is_accepted_and_wrong() -> None:
    outcomes: collections.Counter[str] = collections.Counter()
    for path in suite_files():
        name = str(path.relative_to(SUITE))
        for description, verdict in verdicts(path):
            outcomes[verdict.outcome] += 1
            if verdict.outcome == "wide":
                assert name == ANNOTATIONS, (name, description, verdict.detail)
            if verdict.outcome == "narrow":
                assert MAY_BE_NARROW.search(name), (name, description, verdict.detail)
            if verdict.outcome == "refused":
                assert verdict.detail, (name, description)
    assert outcomes["exact"] >= AT_LEAST_EXACT
    assert outcomes["refused"] <= AT_MOST_REFUSED


# What the rewriting makes of several keywords at once, drawn from and checked by a validator.
MIXED = {
    "requires": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
                 "additionalProperties": False, "dependentRequired": {"a": ["b"]}},
    "depends": {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "string", "maxLength": 3}},
                "additionalProperties": False, "dependentSchemas": {"a": {"required": ["b"]}}},
    "one of two members": {"type": "object", "additionalProperties": False,
                           "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
                           "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "conditional": {"type": "object", "additionalProperties": False, "required": ["kind"],
                    "properties": {"kind": {"enum": ["x", "y"]}, "size": {"type": "integer", "minimum": 3, "maximum": 9}},
                    "if": {"properties": {"kind": {"const": "x"}}}, "then": {"required": ["size"]},
                    "else": {"properties": {"size": False}}},
    "not a word": {"type": "string", "maxLength": 4, "not": {"enum": ["ab", "", "a"]}},
    "not a range": {"type": "number", "minimum": 0, "maximum": 20, "not": {"minimum": 5}},
    "unevaluated": {"type": "object", "allOf": [{"properties": {"a": {"type": "null"}}}],
                    "properties": {"b": {"type": "null"}}, "unevaluatedProperties": False},
    "names": {"type": "object", "propertyNames": {"pattern": "^[ab]{1,2}$"},
              "additionalProperties": {"type": "null"}, "maxProperties": 3},
    "dates": {"type": "string", "format": "date"},
    "endless branch": {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "additionalProperties": False,
                       "properties": {"never": {"$ref": "#/$defs/loop"}, "next": {"type": "null"}}},
                       "loop": {"type": "object", "required": ["x"], "properties": {"x": {"$ref": "#/$defs/loop"}}}}},
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_whatever_is_drawn_is_right(name: str) -> None:
    schema = MIXED[name]
    walk = Walk(vocabulary(), GrammarSpec(kind="json_schema", text=json.dumps(schema)))
    checker = jsonschema.FormatChecker(["date"])
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    drawn = [walk.draw(seed) for seed in range(25)]
    whole = [json.loads(text) for text in drawn if text is not None]
    assert whole
    for value in whole:
        assert not list(validator.iter_errors(value)), value


def test_names_cannot_be_smuggled_in_by_an_escape() -> None:
    for schema in (
        {"properties": {"a": {"type": "integer"}}},
        {"patternProperties": {"^a+$": {"type": "integer"}}},
    ):
        start = matcher_of({"type": "object", **schema})
        for text, is_right in (('{"\\u0061":"x"}', False), ('{"a":1}', True), ('{"b":"x"}', True)):
            matcher = start.deep_copy()
            taken = all(matcher.consume_token(value) for value in text.encode())
            assert (taken and matcher.is_accepting()) == is_right, text


def test_strings_may_be_escaped_where_that_is_safe() -> None:
    start = matcher_of({"type": "string", "maxLength": 2})
    for text, is_right in (
        ('"\\u00e9\\u0001"', True),
        ('"\\ud83d\\ude00a"', True),
        ('"\\ud83d"', False),
        ('"\\u00e9\\u00e9\\u00e9"', False),
    ):
        matcher = start.deep_copy()
        taken = all(matcher.consume_token(value) for value in text.encode())
        assert (taken and matcher.is_accepting()) == is_right, text


def test_lenient_lets_go_and_tells() -> None:
    text = '{"type": "array", "items": {"type": "array", "uniqueItems": true}, "uniqueItems": true}'
    with pytest.raises(InvalidRequest):
        read_source(GrammarSpec(kind="json_schema", text=text))
    source = read_source(GrammarSpec(kind="json_schema", text=text, strictness="lenient"))
    assert sorted(source.widened) == ["#/items/uniqueItems", "#/uniqueItems"]
