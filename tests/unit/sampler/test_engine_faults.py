"""Faults that only the engine finds are told in terms of what was written, with their places."""

import json
from typing import Any

import pytest

from finback.services.sampler.compiler import Vocabulary, compile_grammar
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec

RANGE = "invalid character class range, the start must be <= the end"


def refusal(vocabulary: Vocabulary, kind: str, text: Any) -> InvalidRequest:
    written = text if isinstance(text, str) else json.dumps(text)
    with pytest.raises(InvalidRequest) as caught:
        compile_grammar(vocabulary, GrammarSpec(kind=kind, text=written), "")
    return caught.value


@pytest.mark.parametrize(
    ("text", "at", "what"),
    [
        ("[z-a]", 0, RANGE),
        ("ab[z-a]", 3, RANGE),
        ("a/b[z-a]", 4, RANGE),
        ("a\\/b[z-a]", 5, RANGE),
        ("a\nb[z-a]\nc", 4, RANGE),
        ("é[z-a]", 2, RANGE),
        (r"x\p{Foo}", 1, "Unicode property not found"),
        (r"a\q", 1, "unrecognized escape sequence"),
    ],
)
def test_positions_in_expressions(vocabulary: Vocabulary, text: str, at: int, what: str) -> None:
    error = refusal(vocabulary, "regex", text)
    # A range is shown from within its brackets.
    at += text[at : at + 1] == "["
    assert error.public_message == (
        f"the regex cannot be used: regular expression, position {at}: {what}"
    )
    assert error.reason == what


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("start: foo", 'line 1, column 8: unknown name: "foo"'),
        ("start: b\nb: c", 'line 2, column 4: unknown name: "c"'),
        ('start: "a', "line 1, column 10: lexer error"),
        ('root ::= "a"', "line 1, column 7: Expected token"),
        ("start: A\nA: /x[z-a]/", f"line 2, column 4: regular expression, position 2: {RANGE}"),
        ('begin: "a"', "no start rule found"),
    ],
)
def test_places_in_grammars(vocabulary: Vocabulary, text: str, told: str) -> None:
    message = refusal(vocabulary, "lark", text).public_message
    assert message.startswith(f"the lark cannot be used: {told}")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {"a": {"pattern": "^x[z-a]$"}}}, "position 3: "),
        ({"properties": {"a": {"pattern": "^x[z-a]$"}}}, "(at #/properties/a/pattern)"),
        ({"patternProperties": {"[z-a]": {}}}, "(at #/patternProperties/[z-a])"),
        ({"properties": {"b/c": {"multipleOf": 1e-30}}}, "(at #/properties/b~1c/multipleOf)"),
        ({"anyOf": [{"multipleOf": 1e-30}, {"multipleOf": 2e-30}]}, "multipleOf"),
    ],
)
def test_places_in_schemas(vocabulary: Vocabulary, schema: Any, told: str) -> None:
    assert told in refusal(vocabulary, "json_schema", schema).public_message
    tag = {"structures": [{"begin": "<", "schema": schema, "end": ">"}], "triggers": ["<"]}
    message = refusal(vocabulary, "structural_tag", tag).public_message
    assert told.replace("#", "#/structures/0/schema") in message
