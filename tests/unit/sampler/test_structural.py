"""Structural grammars: parts put together with the sampler's own options, refused by name."""

import json
from typing import Any

import pytest

from finback.services.sampler.compiler import Grammar, compile_grammar
from finback.services.sampler.grammar_source import engine_text, is_exact
from finback.shared.codec.dialogue import Tool, ToolChoice
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec
from support.codec_families import FAMILIES, conversation
from support.grammar_walk import vocabulary

# What the engine cannot enforce.
CONDITIONAL = {"type": "object", "properties": {"a": {"type": "string", "format": "regex"}},
               "if": {"properties": {"a": {"pattern": "x"}}}, "then": {"required": ["b"]}}  # fmt: skip


def structure(lark: str, **parts: dict[str, Any]) -> GrammarSpec:
    return GrammarSpec(kind="structural", text=json.dumps({"lark": lark, "parts": parts}))


def compiled(spec: GrammarSpec) -> Grammar:
    return compile_grammar(vocabulary(), spec, "")


def test_every_kind_of_part() -> None:
    spec = structure(
        "start: @a @b @c @d @e",
        a={"kind": "json_object", "text": ""},
        b={"kind": "json_schema", "text": '{"type": "integer"}'},
        c={"kind": "regex", "text": "x+"},
        d={"kind": "choice", "text": '["y", "z"]'},
        e={"kind": "lark", "text": 'start: "w"'},
    )
    matcher = compiled(spec).start.deep_copy()
    assert all(matcher.consume_token(value) for value in b'{ "k": []}12xxzw')
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"lark": "start: \\"a\\""}', '{"lark": "a", "parts": {"p": 1}}']
)
def test_what_is_no_structure(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine_text(GrammarSpec(kind="structural", text=text or "{"))
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    "part", [{"kind": "structural", "text": "x"}, {"kind": "lark", "text": ""}]
)
def test_parts_of_no_known_kind(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="no part of a grammar"):
        engine_text(structure("start: @p", p=part))


def test_a_schema_cannot_loosen_the_options() -> None:
    schema = {"type": "integer", "x-guidance": {"whitespace_pattern": ".*", "lenient": True}}
    text = engine_text(
        structure("start: @p", p={"kind": "json_schema", "text": json.dumps(schema)})
    )
    options = json.loads(text)["grammars"][1]["json_schema"]["x-guidance"]
    assert options["lenient"] is False
    assert options["whitespace_pattern"] != ".*"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_only_strict_tools_are_refused(family: Any) -> None:
    choice = ToolChoice(mode="required")
    made = family.format()
    loose = made.grammar(conversation(Tool(name="f", parameters=CONDITIONAL), tool_choice=choice))
    assert is_exact(loose) == (family.name == "qwen3-coder")  # its strings are free text
    assert compiled(loose).num_bytes > 0
    strict = Tool(name="f", parameters=CONDITIONAL, strict=True)
    with pytest.raises(InvalidRequest) as caught:
        compiled(made.grammar(conversation(strict, tool_choice=choice)))
    assert caught.value.param == "tools"
