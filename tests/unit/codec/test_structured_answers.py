"""Every kind of `structured_outputs` as the answer of every family: thinking free, the rest kept to it."""

import json
from typing import Any

import jsonschema
import pytest

from finback.services.sampler.compiler import Vocabulary
from finback.services.sampler.grammar_source import read_source
from finback.shared.codec.dialogue import Conversation, Tool, ToolChoice
from finback.shared.codec.formats.spans import Start
from finback.shared.codec.output import PlainFormat
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec
from support.codec_families import FAMILIES, WEATHER, Family, conversation
from support.grammar_walk import Walk, vocabulary
from support.parsed import parsed
from support.structured import CHECKS, KINDS, islands

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
SPECS = {
    "json": GrammarSpec(kind="json_schema", text=json.dumps(KINDS["json"])),
    "json_object": GrammarSpec(kind="json_object"),
    "regex": GrammarSpec(kind="regex", text=KINDS["regex"]),
    "choice": GrammarSpec(kind="choice", text=json.dumps(KINDS["choice"])),
    "grammar": GrammarSpec(kind="lark", text=KINDS["grammar"]),
    "structural_tag": GrammarSpec(kind="structural_tag", text=json.dumps(KINDS["structural_tag"])),
}
kinds = pytest.mark.parametrize("kind", SPECS)
UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


@pytest.fixture(scope="module")
def engine() -> Vocabulary:
    return vocabulary()


def answering(kind: str, *tools: Tool, **fields: Any) -> Conversation:
    return (
        conversation(*tools, answer=SPECS[kind], **fields)
        if tools
        else Conversation(turns=conversation().turns, answer=SPECS[kind], **fields)
    )


@families
@kinds
@pytest.mark.parametrize("start", ["opened", "expected"])
def test_behind_free_thoughts(engine: Vocabulary, family: Family, kind: str, start: Start) -> None:
    asked, made = answering(kind), family.format(start)
    grammar = made.grammar(asked)
    assert grammar is not None and grammar.kind == "structural"
    walk = Walk(engine, grammar)
    drawn = [walk.draw(seed) for seed in range(4)]
    answers = [parsed(made.parser(asked), answer) for answer in drawn if answer is not None]
    assert answers or kind == "json_object"
    for parts in answers:
        assert [part[0] for part in parts if part[0] != "text"] in ([], ["reasoning"])
        CHECKS[kind]("".join(str(part[1]) for part in parts if part[0] == "text"))
    thought = "<think>" * (start == "expected") + "[ask] <f= 12 {"
    whole = {"choice": "red", "regex": "123-a", "grammar": "1+2", "json_object": "{}"}
    text = whole.get(kind, '{"a":1}' if kind == "json" else 'x[ask]"no".')
    assert walk.accepts(f"{thought}</think>\n\n{text}")
    assert not walk.accepts(text)
    assert not walk.accepts(f"{thought}</think>\n\n{text}[ask]")


@families
@kinds
def test_without_thinking_it_is_the_whole_answer(family: Family, kind: str) -> None:
    assert family.format().grammar(answering(kind)) == SPECS[kind]
    assert PlainFormat().grammar(answering(kind)) == SPECS[kind]
    barred = answering(kind, WEATHER, tool_choice=ToolChoice(mode="none"))
    assert family.format().grammar(barred) == SPECS[kind]


@families
def test_what_is_kept_from_its_beginning_holds_no_thoughts(family: Family) -> None:
    spelled = '<think>\n<f=foo>{"a": 1, "b": "</think>"}</f>'
    asked = answering("structural_tag")
    assert parsed(family.format().parser(asked), spelled) == [("text", spelled)]
    free = Conversation(turns=asked.turns)
    assert parsed(family.format().parser(free), spelled)[0][0] == "reasoning"
    thinking = family.format("opened").parser(asked)
    assert [part[0] for part in parsed(thinking, "hm</think>so")] == ["reasoning", "text"]


@families
@pytest.mark.parametrize("kind", ["regex", "choice", "grammar"])
def test_beside_tools_it_is_one_or_calls(engine: Vocabulary, family: Family, kind: str) -> None:
    grammar = family.format().grammar(answering(kind, WEATHER))
    assert grammar is not None
    walk = Walk(engine, grammar)
    text = {"choice": "red", "regex": "123-a", "grammar": "1+2"}[kind]
    call = family.calls(("get_weather", '{"city": "Paris"}'))
    assert walk.accepts(text)
    assert walk.accepts(call)
    assert not walk.accepts(text + call)
    assert not walk.accepts("Something else.")
    forced = answering(kind, WEATHER, tool_choice=ToolChoice(mode="required"))
    wanted = family.format().grammar(forced)
    assert wanted is not None
    assert not Walk(engine, wanted).accepts(text)


@families
def test_a_lenient_answer_stays_lenient_behind_thoughts(family: Family) -> None:
    schema = json.dumps(UNIQUE)
    for strictness in ("strict", "lenient"):
        answer = GrammarSpec(kind="json_schema", text=schema, strictness=strictness)
        asked = Conversation(turns=conversation().turns, answer=answer)
        grammar = family.format("opened").grammar(asked)
        assert grammar is not None
        if strictness == "lenient":
            assert read_source(grammar).widened == ("#/uniqueItems",)
            continue
        with pytest.raises(InvalidRequest, match="#/uniqueItems") as caught:
            read_source(grammar)
        assert caught.value.param == "tools"  # the part says of no field that it is its own


@families
def test_a_tool_is_blamed_by_its_own_field(family: Family) -> None:
    bad = Tool(
        name="bad",
        parameters={
            "type": "object",
            "properties": {"tags": UNIQUE},
            "required": ["tags"],
            "additionalProperties": False,
        },
        strict=True,
        param="tools.1.function.parameters",
    )
    choice = ToolChoice(mode="required")
    grammar = family.format().grammar(conversation(WEATHER, bad, tool_choice=choice))
    assert grammar is not None
    with pytest.raises(InvalidRequest, match="#/properties/tags/uniqueItems") as caught:
        read_source(grammar)
    assert caught.value.param == bad.param


def test_islands_are_found_without_the_engine() -> None:
    assert islands('a<f=foo>{"a": 1}</f>[ask]"no".b') == [{"a": 1}, "no"]
    for wrong in ("<f=", '<f=foo>{"a": "x"}</f>', '[ask]"no"!'):
        with pytest.raises((AssertionError, ValueError, jsonschema.ValidationError)):
            islands(wrong)
