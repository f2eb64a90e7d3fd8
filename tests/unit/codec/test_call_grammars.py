"""Grammars of every family, through the real engine: what they let through is what was asked for."""

import json

import jsonschema
import pytest

from finback.services.sampler.compiler import Vocabulary
from finback.shared.codec.dialogue import Conversation, Tool, ToolChoice
from finback.shared.codec.formats.spans import Start
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec
from support.codec_families import (
    FAMILIES,
    NOTHING,
    QUERY,
    TOOLS,
    WEATHER,
    Family,
    conversation,
)
from support.grammar_walk import Walk, vocabulary
from support.parsed import Part, parsed

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
DRAWS = 12
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANSWER = GrammarSpec(kind="json_schema", text=json.dumps(PERSON))
REQUIRED = ToolChoice(mode="required")
UPPER = Tool(name="upper", kind="custom", grammar=GrammarSpec(kind="regex", text='[A-Z" \\n]{2,9}'))
SUM = Tool(
    name="sum",
    kind="custom",
    grammar=GrammarSpec(kind="lark", text='start: NUM ("+" NUM)*\nNUM: /[0-9]{1,3}/'),
)


@pytest.fixture(scope="module")
def engine() -> Vocabulary:
    return vocabulary()


def draws(
    engine: Vocabulary,
    family: Family,
    asked: Conversation,
    start: Start = "answer",
    number: int = DRAWS,
) -> list[list[Part]]:
    """Parsed random answers to a conversation that has a grammar."""
    made = family.format(start)
    grammar = made.grammar(asked)
    assert grammar is not None
    walk = Walk(engine, grammar)
    answers = [walk.draw(seed) for seed in range(number)]
    found = [parsed(made.parser(asked), answer) for answer in answers if answer is not None]
    assert len(found) >= number // 3
    return found


def check_call(part: Part, *tools: Tool) -> None:
    """A whole call of one of `tools`, arguments by their schema where it is strict."""
    kind, name, arguments, is_whole = part
    assert kind == "call"
    assert is_whole is True
    tool = next(tool for tool in tools if tool.name == name)
    if tool.kind == "function":
        value = json.loads(str(arguments))
        jsonschema.validate(value, dict(tool.parameters or {"type": "object"}))


@families
@pytest.mark.parametrize("start", ["answer", "opened", "expected"])
def test_required(engine: Vocabulary, family: Family, start: Start) -> None:
    names = set()
    for parts in draws(engine, family, conversation(tool_choice=REQUIRED), start):
        thoughts = [part for part in parts if part[0] == "reasoning"]
        calls = parts[len(thoughts) :]
        assert len(thoughts) <= (start != "answer")
        assert calls
        for part in calls:
            check_call(part, *TOOLS)
        names |= {part[1] for part in calls}
    assert len(names) >= 2


@families
def test_one_call_of_a_named_tool(engine: Vocabulary, family: Family) -> None:
    choice = ToolChoice(mode="required", names=("get_weather",), is_parallel=False)
    for parts in draws(engine, family, conversation(tool_choice=choice)):
        assert len(parts) == 1
        check_call(parts[0], WEATHER)


@families
@pytest.mark.parametrize("is_parallel", [True, False])
def test_auto_with_strict_tools(engine: Vocabulary, family: Family, is_parallel: bool) -> None:
    choice = ToolChoice(is_parallel=is_parallel)
    num_calls = 0
    asked = conversation(WEATHER, NOTHING, tool_choice=choice)
    for parts in draws(engine, family, asked, number=5 * DRAWS):
        calls = [part for part in parts if part[0] == "call"]
        for part in calls:
            check_call(part, WEATHER, NOTHING)
        assert is_parallel or len(calls) <= 1
        num_calls += len(calls)
    assert num_calls


@families
@pytest.mark.parametrize("start", ["answer", "opened"])
def test_content_or_calls(engine: Vocabulary, family: Family, start: Start) -> None:
    kinds = set()
    for parts in draws(engine, family, conversation(WEATHER, answer=ANSWER), start):
        said = [part for part in parts if part[0] != "reasoning"]
        kinds |= {part[0] for part in said}
        if said[0][0] == "text":
            assert len(said) == 1
            jsonschema.validate(json.loads(str(said[0][1])), PERSON)
        else:
            for part in said:
                check_call(part, WEATHER)
    assert "text" in kinds or family.name != "hermes"


@families
def test_content_after_thinking(engine: Vocabulary, family: Family) -> None:
    asked = Conversation(turns=conversation().turns, answer=ANSWER)
    for parts in draws(engine, family, asked, "opened"):
        jsonschema.validate(json.loads(str(parts[-1][1])), PERSON)
        assert [part[0] for part in parts][-1] == "text"
        assert len(parts) <= 2
    assert family.format().grammar(asked) == ANSWER


@families
def test_custom_tools_keep_to_their_grammar(engine: Vocabulary, family: Family) -> None:
    choice = ToolChoice(mode="required", is_parallel=False)
    names = set()
    for parts in draws(engine, family, conversation(UPPER, SUM, tool_choice=choice)):
        assert len(parts) == 1
        kind, name, text, is_whole = parts[0]
        assert (kind, is_whole) == ("call", True)
        names.add(name)
        if name == "sum":
            assert all(number.isdigit() for number in str(text).split("+"))
        else:
            assert 2 <= len(str(text)) <= 9
            assert set(str(text)) <= set('ABCDEFGHIJKLMNOPQRSTUVWXYZ" \n')
    assert names == {"sum", "upper"}


@families
def test_a_called_tool_as_the_model_writes_it(engine: Vocabulary, family: Family) -> None:
    """The spelling that models are trained on is among what the grammar allows."""
    grammar = family.format().grammar(conversation(tool_choice=REQUIRED))
    assert grammar is not None
    walk = Walk(engine, grammar)
    good = ("get_weather", '{"city": "Paris", "days": 3}'), ("get", "{}")
    assert walk.accepts(family.calls(good[0]))
    assert walk.accepts(family.calls(*good))
    assert walk.accepts(family.calls(("query", '{"input": "select \\"x\\""}')))
    assert not walk.accepts(family.calls(("get_weather", '{"days": 3}')))
    assert not walk.accepts(family.calls(("rm", "{}")))


@families
def test_no_grammar_where_nothing_is_to_be_enforced(family: Family) -> None:
    made = family.format()
    assert made.grammar(conversation(NOTHING, QUERY)) is None
    assert made.grammar(conversation(tool_choice=ToolChoice(mode="none"))) is None
    assert made.grammar(conversation(NOTHING, answer=ANSWER)) is not None
    limited = ToolChoice(names=("get",))
    assert made.grammar(conversation(NOTHING, QUERY, tool_choice=limited)) is not None


@families
def test_parameters_must_be_an_object(family: Family) -> None:
    tool = Tool(name="f", parameters={"type": "array"}, strict=True)
    with pytest.raises(InvalidRequest, match="'f' must be of type object"):
        family.format().grammar(conversation(tool))


@families
@pytest.mark.parametrize("start", ["answer", "opened"])
def test_markers_that_only_control_tokens_can_spell(family: Family, start: Start) -> None:
    special = frozenset({"<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>"})
    engine, made = vocabulary(special), family.format(start, special)
    asked = conversation(WEATHER, NOTHING)
    grammar = made.grammar(asked)
    assert grammar is not None
    walk = Walk(engine, grammar)
    answers = [walk.draw(seed) for seed in range(5 * DRAWS)]
    found = [parsed(made.parser(asked), answer) for answer in answers if answer is not None]
    calls = [part for parts in found for part in parts if part[0] == "call"]
    assert calls
    for part in calls:
        check_call(part, WEATHER, NOTHING)
